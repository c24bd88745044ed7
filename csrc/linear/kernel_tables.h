// Chooses the loop that multiplies each layout, for the tables of kernels.h. Knows types only.
#pragma once

#include "linear/linear.h"
#include "linear/linear_blocks.h"

namespace quire::QUIRE_ISA {

// The kernels of a group (kernels.h) by layout; null for layouts that the group does not multiply.
inline size_t int8_workspace(const MatrixView& w, int max_rows) {
  return w.format.layout == Layout::blocks ? RoundedBlocks::workspace(w, max_rows) : quantized_bytes(w, max_rows);
}

template <class Dot>
constexpr bool kMultipliesBf16 = std::is_same_v<Dot, DotBf16> || std::is_same_v<Dot, Compact<DotBf16>>;

// Int4 and blocks are multiplied as bfloat16 if that is quicker, else as float32.
template <class L, bool Bf16>
constexpr Linear* float_product() {
  using Dot = typename ProductsOf<L>::Float;
#if defined(QUIRE_BF16_DOT)
  if constexpr (Bf16 && L::kHolds == Holds::blocks) return make_block_products;
  else if constexpr (Bf16 && std::is_same_v<L, Int4>) return make_products<FloatProduct<DotI4Pairs>>;
  else
#endif
  if constexpr (L::kHolds == Holds::blocks) return Bf16 ? nullptr : make_block_products;
  else if constexpr (kMultipliesBf16<Dot> == Bf16) return make_products<FloatProduct<Dot>>;
  else return nullptr;
}

template <class L>
constexpr Linear* int8_product() {
  using Dot = typename ProductsOf<L>::Int8;
  if constexpr (L::kHolds == Holds::blocks) return make_products<BlockProduct<RoundedBlocks>>;
  else if constexpr (std::is_void_v<Dot>) return nullptr;
  else return make_products<QuantizedProduct<Dot>>;
}

}  // namespace quire::QUIRE_ISA
