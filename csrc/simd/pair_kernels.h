// Kernels that multiply bfloat16, and screens, of one instruction set.
#pragma once

#include "attention/attention.h"
#include "linear/kernel_tables.h"
#include "linear/screen.h"
#include "simd/kernels.h"
#include "simd/probe_kernels.h"

namespace quire::QUIRE_ISA {

#define QUIRE_PRODUCT(name, Traits) float_product<quire::Traits, true>(),
extern const PairKernels pair_kernels = {
    .bf16_products = {QUIRE_LAYOUTS(QUIRE_PRODUCT)},
    .linear_workspace_float = workspace_with_screen,
    .attention_bf16 = attention<uint16_t>,
    .attention_workspace_bf16 = attention_workspace,
    .screened_best_by = screened_best,
    .screened_rows = kScreenedRows,
    .screen_weight_row = screen_weight_row,
    .probe_bf16 = probe_bf16,
};
#undef QUIRE_PRODUCT

}  // namespace quire::QUIRE_ISA
