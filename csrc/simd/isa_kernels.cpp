// All kernels of one instruction set; compiled once per set (CMakeLists.txt defines QUIRE_ISA and the -m flags).
#include "attention/attention.h"
#include "linear/best.h"
#include "simd/kernels.h"
#include "linear/linear.h"
#include "simd/probe_kernels.h"
#include "linear/rowwise.h"
#include "sample/sampler_kernels.h"
#include "linear/screen.h"
#include "simd/simd.h"

#define QUIRE_STRING_(x) #x
#define QUIRE_STRING(x) QUIRE_STRING_(x)

namespace quire::QUIRE_ISA {

extern const Kernels kernels = {
    QUIRE_STRING(QUIRE_ISA),
    linear,
    any_linear_workspace,
    best,
    screened_best,
    kScreenedRows,
    screen_weight_row,
    norm,
    embed,
    rope,
    store_kv,
    store_latent,
    add,
    scale,
    attention,
    attention_workspace,
    probe_fp32,
    probe_bf16,
    probe_int8,
    probe_read,
    &sampler_kernels,
};

}  // namespace quire::QUIRE_ISA
