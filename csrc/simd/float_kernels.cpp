// Kernels of one instruction set that multiply floats or nothing (CMakeLists.txt defines QUIRE_ISA and the -m flags).
// The same loops widen and multiply bfloat16, so it is compiled along with them.
#include "attention/attention.h"
#include "linear/adapted.h"
#include "linear/best.h"
#include "linear/kernel_tables.h"
#include "linear/rowwise.h"
#include "sample/sampler_kernels.h"
#include "simd/kernels.h"
#include "simd/pair_kernels.h"
#include "simd/probe_kernels.h"

namespace quire::QUIRE_ISA {

#define QUIRE_PRODUCT(name, Traits) float_product<quire::Traits, false>(),
extern const FloatKernels float_kernels = {
    .float_products = {QUIRE_LAYOUTS(QUIRE_PRODUCT)},
    .attention_f32 = attention<float>,
    .attention_workspace_f32 = attention_workspace,
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
    .add = add,
    .scale = scale,
    .probe_fp32 = probe_fp32,
    .probe_read = probe_read,
    .sampler = &sampler_kernels,
};
#undef QUIRE_PRODUCT

}  // namespace quire::QUIRE_ISA
