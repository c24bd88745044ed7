// The workspace of products with float activations, the largest output by a weight's screen, and the rows of screens.
#include "linear/screened_argmax.h"

#include "kernels/parts.h"

namespace quire::QUIRE_ISA {

// Bytes for a product of float activations and for `screened_best`.
size_t linear_workspace_float(const MatrixView& weight, int max_rows) {
  if (weight.format.layout == Layout::blocks) return blocks_workspace(weight, max_rows);
  const size_t product = float_workspace(weight, max_rows);
  return weight.has_screen() ? max_of(product, ScreenMemory::bytes(weight, min_of(max_rows, kScreenedRows))) : product;
}

ScreenWeightRow screen_weight_row(const float* x, int n, char* bytes) {
  const Int8Scale scale = int8_scale(x, n);
  const LengthBounds bounds = length_bounds<DotF32>(x, n, scale);
  if (bounds.rounding < __builtin_inff())
    for (int k = 0; k < n; k += kLanes)
      store_int8(reinterpret_cast<int8_t*>(bytes + k), to_int(load(x + k) * set1(scale.inverse)) + iset1(128));
  return {scale.scale, bounds.length + bounds.rounding, bounds.rounding};
}

// `screen_product` multiplies with weights of int8, by activations rounded to int8.
bool screened_best(const LinearArgs& a, Linear* screen_product, int32_t* best, ThreadPool& pool) {
  const bool plain = !a.norm.weight && !a.bias && a.activation == Activation::none && !a.residual;
  const bool fits = a.rows <= kScreenedRows && a.weight.cols < kScreenColumns && a.weight.rows >= 16;
  if (!plain || !fits || !a.weight.has_screen()) return false;
  return with_layout(a.weight.format.layout, [&](auto layout) {
    if constexpr (layout.kHolds == Holds::floats)
      return screened_best_as<typename DotOf<decltype(layout)>::type>(a, screen_product, best, pool);
    else
      return false;
  });
}

}  // namespace quire::QUIRE_ISA
