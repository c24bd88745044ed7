// The table of kernels that multiply bfloat16, in pairs or widened.
#include "kernels/parts.h"
#include "kernels/probe_loops.h"
#include "linear/argmax_candidates.h"

namespace quire::QUIRE_ISA {

static constexpr Linear* product(Layout layout) {
  switch (layout) {
    case Layout::bfloat16:
      return bfloat16_product;
    case Layout::bfloat16_12:
      return bfloat16_12_product;
#if defined(QUIRE_BF16_DOT)
    case Layout::int4:
      return int4_product_bf16;
    case Layout::blocks:
      return blocks_product_bf16;
#else
    case Layout::int4:
    case Layout::blocks:
#endif
    case Layout::float32:
    case Layout::float16:
    case Layout::int8:
      break;
  }
  return nullptr;
}

#define QUIRE_PRODUCT(name, Traits) product(Layout::name),
extern const PairKernels pair_kernels = {
    .bf16_products = {QUIRE_LAYOUTS(QUIRE_PRODUCT)},
#if defined(QUIRE_BF16_DOT)
    .multiplies_pairs = multiplies_pairs,
#else
    .multiplies_pairs = nullptr,
#endif
    .linear_workspace_float = linear_workspace_float,
    .attention_bf16 = attention_bf16,
    .attention_workspace_bf16 = attention_workspace_bf16,
    .screened_best_by = screened_best,
    .screened_rows = kScreenedRows,
    .screen_weight_row = screen_weight_row,
    .probe_bf16 = probe_bf16,
};
#undef QUIRE_PRODUCT

}  // namespace quire::QUIRE_ISA
