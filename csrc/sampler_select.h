// Exact selection of the best tokens of a row without sorting it. Knows values and weights; knows no slot.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "sampler_table.h"

namespace quire {

// The best values: all above `value` and `ties` of those equal to it.
struct Selected {
  float value;
  int64_t ties;
};

// The fewest values, largest first, whose weights sum to at least `target` (which the sum of all reaches). Weights are
// whole numbers with exact sums: `one(value)` is that of one, `sum(values, n)` of many, `inside` of all.
//
// A quickselect: pivots from a sample, first a guess that few values are needed. `a` and `b` hold n + 16 values; `x`
// may be `a`.
template <class One, class Sum>
Selected select_best(const SamplerKernels& kernels, const float* x, size_t n, double target, double inside, One&& one,
                     Sum&& sum, float* a, float* b) {
  constexpr size_t kSortBelow = 256, kSample = 512;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  double above = 0;  // weight of all values larger than those in x
  bool guess_few = true, halve = false;
  std::vector<float> sample(kSample);
  while (n > kSortBelow) {
    const size_t step = n / kSample + 1, count = (n + step - 1) / step;
    for (size_t i = 0; i < count; ++i) sample[i] = x[i * step];
    std::sort(sample.begin(), sample.begin() + ptrdiff_t(count), std::greater<float>());
    size_t rank = 4;
    if (halve) {
      rank = count / 2;
    } else if (!guess_few) {
      double part = 0, whole = 0;
      for (size_t i = 0; i < count; ++i) whole += one(sample[i]);
      const double share = (target - above) / inside * whole;
      for (rank = 0; rank < count && part < share; ++rank) part += one(sample[rank]);
      rank += 2 + size_t(2 * std::sqrt(double(rank)));
    }
    guess_few = false;
    const float pivot = sample[std::min(rank, count - 1)];
    float* out = x == b ? a : b;
    size_t kept = kernels.keep_range(x, n, pivot, kInf, out);
    double mass = above + sum(out, kept);
    if (mass >= target && kept == n) {  // the pivot is the smallest: look strictly above it
      kept = kernels.keep_range(x, n, std::nextafter(pivot, kInf), kInf, out);
      mass = above + sum(out, kept);
      if (mass < target) {
        const double weight = one(pivot);
        double ties = std::ceil((target - mass) / weight);
        while (mass + (ties - 1) * weight >= target) --ties;
        while (mass + ties * weight < target) ++ties;
        return {pivot, int64_t(ties)};
      }
    }
    const size_t before = n;
    if (mass >= target) {
      inside = mass - above;
      x = out;
      n = kept;
    } else {
      inside -= mass - above;
      above = mass;
      float* rest = x == b ? b : a;
      n = kernels.keep_range(x, n, -kInf, pivot, rest);
      x = rest;
    }
    halve = n > before / 2;
  }
  float* sorted = x == b ? a : b;
  std::copy(x, x + n, sorted);
  std::sort(sorted, sorted + n, std::greater<float>());
  size_t i = 0;
  int64_t ties = 0;
  for (; i < n && above < target; ++i) {
    ties = i > 0 && sorted[i] == sorted[i - 1] ? ties + 1 : 1;
    above += one(sorted[i]);
  }
  return {sorted[i - 1], ties};
}

// Id of occurrence number `nth` (from 1) of `value`.
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
