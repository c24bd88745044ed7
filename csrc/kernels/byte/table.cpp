// The table of kernels that multiply integers.
#include "kernels/parts.h"
#include "kernels/probe_loops.h"

namespace quire::QUIRE_ISA {

static constexpr Linear* product(Layout layout) {
  switch (layout) {
    case Layout::int8:
      return int8_product_i8;
    case Layout::int4:
      return int4_product_i8;
    case Layout::blocks:
      return blocks_product_i8;
    case Layout::float32:
    case Layout::float16:
    case Layout::bfloat16:
    case Layout::bfloat16_12:
      break;
  }
  return nullptr;
}

#define QUIRE_PRODUCT(name, Traits) product(Layout::name),
extern const ByteKernels byte_kernels = {
    .int8_products = {QUIRE_LAYOUTS(QUIRE_PRODUCT)},
    .linear_workspace_i8 = linear_workspace_i8,
    .attention_i8 = attention_i8,
    .attention_workspace_i8 = attention_workspace_i8,
    .probe_int8 = probe_int8,
};
#undef QUIRE_PRODUCT

}  // namespace quire::QUIRE_ISA
