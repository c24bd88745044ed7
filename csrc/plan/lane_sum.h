// A sum in double precision whose order depends on its length alone.
#pragma once

#include <cstddef>

namespace quire {

// The sum of value(i) for i < n, in eight lanes.
template <typename Value>
double lane_sum(size_t n, const Value& value) {
  double lanes[8] = {};
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (size_t lane = 0; lane < 8; ++lane) lanes[lane] += value(i + lane);
  for (; i < n; ++i) lanes[i % 8] += value(i);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

}  // namespace quire
