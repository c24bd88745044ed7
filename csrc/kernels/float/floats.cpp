// Products with weights in float32 and float16, and what all products share.
#include "kernels/parts.h"
#include "linear/product.h"
#include "rowwise/norm.h"
#include "rowwise/rounding.h"

namespace quire::QUIRE_ISA {

template Micro micro_for<DotF32, Prefetch::weights>(int, int);
template Micro micro_for<DotF32, Prefetch::activations>(int, int);

void float32_product(const LinearArgs* a, int count, ThreadPool& pool) {
  make_products<FloatProduct<DotF32>>(a, count, pool);
}
void float16_product(const LinearArgs* a, int count, ThreadPool& pool) {
  make_products<FloatProduct<DotHalves>>(a, count, pool);
}

LinearArgs normed(LinearArgs a, int begin, int end, float* memory) {
  const int width = a.weight.cols;
  const bool ordered = a.weight.format.inputs, rounds = a.weight.format.rounding.present();
  if (!a.norm.weight && !ordered && !rounds) return a;
  float* spare = memory + size_t(end - begin) * size_t(width);
  for (int r = begin; r < end; ++r) {
    const float* x = a.x + size_t(r) * a.x_stride;
    float* to = memory + size_t(r - begin) * size_t(width);
    if (a.norm.weight) {
      float* normed = ordered ? spare : to;
      norm_row(x, width, a.row_norms ? a.row_norms[r] : a.norm, normed), x = normed;
    }
    if (ordered) {
      const int32_t* order = a.weight.order();
      const float* factors = a.weight.factors();
      for (int k = 0; k < width; ++k) to[k] = x[order[k]] * factors[k];
      x = to;
    }
    if (rounds) round_row(x, width, a.weight.format.rounding, to);
  }
  a.x = memory - ptrdiff_t(begin) * width, a.x_stride = size_t(width), a.norm = {}, a.row_norms = nullptr;
  return a;
}

void unscaled_epilogue(const LinearArgs& a, const float* c, size_t c_stride, int first_row, int rows, int first,
                       int panels) {
  epilogue_as<Unscaled, false>(a, c, c_stride, first_row, rows, first, panels);
}

}  // namespace quire::QUIRE_ISA
