// The table of kernels that multiply floats by floats or multiply nothing.
#include "kernels/parts.h"
#include "kernels/probe_loops.h"
#include "linear/micro/loops.h"

namespace quire::QUIRE_ISA {

static constexpr Linear* product(Layout layout) {
  switch (layout) {
    case Layout::float32:
      return float32_product;
    case Layout::float16:
      return float16_product;
    case Layout::int8:
      return int8_product;
    case Layout::int4:
      return int4_product;
    case Layout::blocks:
      return blocks_product;
    case Layout::bfloat16:
    case Layout::bfloat16_12:
      break;
  }
  return nullptr;
}

#define QUIRE_PRODUCT(name, Traits) product(Layout::name),
extern const FloatKernels float_kernels = {
    .float_products = {QUIRE_LAYOUTS(QUIRE_PRODUCT)},
    .attention_f32 = attention_f32,
    .attention_workspace_f32 = attention_workspace_f32,
    .best = best,
    .products = products,
    .product_rows = kMaxRows,
    .finish = finish,
    .norm = norm,
    .embed = embed,
    .unpack_blocks = unpack_block_panel,
    .rope = rope,
    .store_kv = store_kv,
    .store_latent = store_latent,
    .store_keys = store_keys,
    .choose = choose,
    .choose_workspace = choose_workspace,
    .add = add,
    .scale = scale,
    .convolve = convolve,
    .scan = scan,
    .selective_scan = selective_scan,
    .gated_recurrence = gated_recurrence,
    .probe_fp32 = probe_fp32,
    .probe_read = probe_read,
    .sampler = &sampler_kernels,
};
#undef QUIRE_PRODUCT

}  // namespace quire::QUIRE_ISA
