// Matrix products with packed weights. Knows the packing; knows no plan.
#pragma once

#include "activation.h"
#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

#if defined(QUIRE_BF16_DOT)
constexpr bool kBf16Dot = true;
#else
constexpr bool kBf16Dot = false;
#endif

inline size_t linear_workspace(const MatrixView&, int) { return 0; }

// One panel of 16 outputs of one row: a single chain over k.
inline V panel_sum(const float* x, const MatrixView& w, int panel) {
  const char* data = w.data + w.panel_bytes() * size_t(panel);
  V sum = set1(0);
  if (!w.bf16) {
    for (int k = 0; k < w.cols; ++k) sum = fma(set1(x[k]), load(reinterpret_cast<const float*>(data) + k * 16), sum);
    return sum;
  }
  const uint16_t* pairs = reinterpret_cast<const uint16_t*>(data);
  for (int k = 0; k < w.cols; k += 2) {
    sum = fma(set1(x[k]), pair_first(pairs + k * 16), sum);
    sum = fma(set1(k + 1 < w.cols ? x[k + 1] : 0.0f), pair_second(pairs + k * 16), sum);
  }
  return sum;
}

inline void linear(const LinearArgs& a, ThreadPool& pool) {
  const MatrixView& w = a.weight;
  const int step = w.gated ? 2 : 1, width = w.rows / step;
  pool.parallel_for(w.panels() / step, [&](int group, int) {
    const int panel = group * step, n = min_of(16, width - group * 16);
    for (int row = 0; row < a.rows; ++row) {
      const float* x = a.x + size_t(row) * a.x_stride;
      V v = panel_sum(x, w, panel);
      if (a.bias) v = v + load(a.bias + panel * 16);
      v = activate(a.activation, v);
      if (w.gated) {
        V up = panel_sum(x, w, panel + 1);
        if (a.bias) up = up + load(a.bias + panel * 16 + 16);
        v = v * up;
      }
      if (a.residual) v = v + load_first(a.residual + size_t(row) * a.residual_stride + group * 16, n);
      store_first(a.y + size_t(row) * a.y_stride + group * 16, v, n);
    }
  });
}

}  // namespace quire::QUIRE_ISA
