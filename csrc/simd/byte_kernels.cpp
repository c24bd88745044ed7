// Kernels of one instruction set that multiply integers (CMakeLists.txt defines QUIRE_ISA and the -m flags).
#include "attention/attention.h"
#include "linear/kernel_tables.h"
#include "simd/kernels.h"
#include "simd/probe_kernels.h"

namespace quire::QUIRE_ISA {

#define QUIRE_PRODUCT(name, Traits) int8_product<quire::Traits>(),
extern const ByteKernels byte_kernels = {
    .int8_products = {QUIRE_LAYOUTS(QUIRE_PRODUCT)},
    .linear_workspace_i8 = int8_workspace,
    .attention_i8 = attention<int8_t>,
    .attention_workspace_i8 = attention_workspace,
    .probe_int8 = probe_int8,
};
#undef QUIRE_PRODUCT

}  // namespace quire::QUIRE_ISA
