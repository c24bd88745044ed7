// Exact selection of the best tokens of a row without sorting it. Knows values and weights; knows no slot.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "sample/sampler_table.h"

namespace quire {

// The best values: all above `value`, and `ties` of those equal to it.
struct Selected {
  float value;
  int64_t ties;
};

// The `count` largest of the n values of x. A quickselect: pivots from a sample, the first one above most values.
// `a` and `b` hold n + 16 values; `x` may be `a`.
inline Selected select_largest(const SamplerKernels& kernels, const float* x, size_t n, int64_t count, float* a,
                               float* b) {
  constexpr size_t kSortBelow = 256, kSample = 512;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  int64_t above = 0;  // values larger than those in x
  bool halve = false;
  std::vector<float> sample(kSample);
  while (n > kSortBelow) {
    const size_t step = n / kSample + 1, size = (n + step - 1) / step;
    for (size_t i = 0; i < size; ++i) sample[i] = x[i * step];
    std::sort(sample.begin(), sample.begin() + ptrdiff_t(size), std::greater<float>());
    const double share = double(count - above) / double(n) * double(size);
    const size_t rank = halve ? size / 2 : size_t(share + 2 * std::sqrt(share)) + 2;
    const float pivot = sample[std::min(rank, size - 1)];
    float* out = x == b ? a : b;
    size_t kept = kernels.keep_range(x, n, pivot, kInf, out);
    if (above + int64_t(kept) >= count && kept == n) {  // the pivot is the smallest: look strictly above it
      kept = kernels.keep_range(x, n, std::nextafter(pivot, kInf), kInf, out);
      if (above + int64_t(kept) < count) return {pivot, count - above - int64_t(kept)};
    }
    const size_t before = n;
    if (above + int64_t(kept) >= count) {
      x = out;
      n = kept;
    } else {
      above += int64_t(kept);
      float* rest = x == b ? b : a;
      n = kernels.keep_range(x, n, -kInf, pivot, rest);
      x = rest;
    }
    halve = n > before / 2;
  }
  float* sorted = x == b ? a : b;
  std::copy(x, x + n, sorted);
  std::sort(sorted, sorted + n, std::greater<float>());
  const size_t last = size_t(count - above) - 1;
  int64_t ties = 1;
  while (size_t(ties) <= last && sorted[last - size_t(ties)] == sorted[last]) ++ties;
  return {sorted[last], ties};
}

// The id of occurrence number `nth` (from 1) of `value`.
inline int id_of_nth(const float* x, int n, float value, int64_t nth) {
  int64_t seen = 0;
  for (int start = 0; start < n; start += 1024) {
    const int stop = std::min(n, start + 1024);
    int here = 0;
    for (int i = start; i < stop; ++i) here += x[i] == value;
    if (seen + here < nth) {
      seen += here;
      continue;
    }
    for (int i = start; i < stop; ++i)
      if (x[i] == value && ++seen == nth) return i;
  }
  return n - 1;
}

}  // namespace quire
