// RMSNorm and LayerNorm of a row. Knows no threads and no plan.
#pragma once

#include "kernels/kernels.h"
#include "simd/simd.h"

namespace quire::QUIRE_ISA {

inline float sum_of_squares(const float* x, int n, float mean) {
  V sum = set1(0), m = set1(mean);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const V d = load(x + i) - m;
    sum = fma(d, d, sum);
  }
  if (i < n) {
    const V d = select(first_lanes(n - i), load_first(x + i, n - i) - m, set1(0));
    sum = fma(d, d, sum);
  }
  return reduce_add(sum);
}

inline float mean_of(const float* x, int n) {
  V sum = set1(0);
  int i = 0;
  for (; i + 16 <= n; i += 16) sum = sum + load(x + i);
  if (i < n) sum = sum + load_first(x + i, n - i);
  return reduce_add(sum) / float(n);
}

inline void norm_row(const float* x, int n, const Norm& norm, float* y) {
  const float mean = norm.rms ? 0.0f : mean_of(x, n);
  const V scale = set1(1.0f / __builtin_sqrtf(sum_of_squares(x, n, mean) / float(n) + norm.eps)), m = set1(mean);
  for (int i = 0; i < n; i += 16) {
    const int lanes = min_of(16, n - i);
    V v = (load_first(x + i, lanes) - m) * scale * load_first(norm.weight + i, lanes);
    if (norm.bias) v = v + load_first(norm.bias + i, lanes);
    store_first(y + i, v, lanes);
  }
}

}  // namespace quire::QUIRE_ISA
