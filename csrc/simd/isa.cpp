// Detects instruction sets at run time and chooses a kernel table. Knows no kernel.
#include "simd/isa.h"

#include <stdexcept>

#if defined(QUIRE_HAS_neon) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(QUIRE_HAS_neon)
#include <sys/auxv.h>
#endif

#include "kernels/kernels.h"

namespace quire {

// The groups of kernels that each set compiles (CMakeLists.txt).
#define QUIRE_DECLARE(isa)                     \
  namespace isa {                              \
  extern const FloatKernels float_kernels;     \
  extern const ByteKernels byte_kernels;       \
  extern const PairKernels pair_kernels;       \
  }
QUIRE_DECLARE(scalar)
QUIRE_DECLARE(avx2)
QUIRE_DECLARE(avx512)
QUIRE_DECLARE(avx512_vnni)
QUIRE_DECLARE(avx512_bf16)
QUIRE_DECLARE(avx512_bf16_emulated)
QUIRE_DECLARE(neon)
QUIRE_DECLARE(neon_dot)
QUIRE_DECLARE(neon_i8mm)
QUIRE_DECLARE(neon_bf16)
#undef QUIRE_DECLARE

namespace {

#ifdef QUIRE_HAS_avx512_bf16
// __builtin_cpu_supports also checks (by xgetbv) that the operating system saves the wide registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
// It also looks up bytes in tables of 128 (VBMI), which of all CPUs that multiply bfloat16 Cooper Lake alone cannot.
bool has_avx512_bf16() {
  return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
// AMD's cores multiply pairs of bfloat16 at twice the rate of floats. Intel's, which have other units for them, do so at
// half the rate (one product in two cycles, against two of floats per cycle).
bool has_quick_bf16() { return has_avx512_bf16() && !__builtin_cpu_is("intel"); }
#endif

#if defined(QUIRE_HAS_neon) && defined(__APPLE__)
bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_neon_dot() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_neon_i8mm() { return has_neon_dot() && has_feature("hw.optional.arm.FEAT_I8MM"); }
bool has_neon_bf16() { return has_neon_i8mm() && has_feature("hw.optional.arm.FEAT_BF16"); }
#elif defined(QUIRE_HAS_neon)
// Linux's HWCAP_ASIMDDP, HWCAP2_I8MM and HWCAP2_BF16.
bool has_neon_dot() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool has_neon_i8mm() { return has_neon_dot() && (getauxval(AT_HWCAP2) >> 13 & 1); }
bool has_neon_bf16() { return has_neon_i8mm() && (getauxval(AT_HWCAP2) >> 14 & 1); }
#endif

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
#ifdef QUIRE_HAS_avx512_bf16
  __builtin_cpu_init();
  if (has_quick_bf16()) names.push_back("avx512_bf16");
  if (has_avx512_vnni()) names.push_back("avx512_vnni");
  if (has_avx512_bf16() && !has_quick_bf16()) names.push_back("avx512_bf16");
  if (has_avx512()) names.push_back("avx512");
  if (has_avx2()) names.push_back("avx2");
#endif
#ifdef QUIRE_HAS_neon
  if (has_neon_bf16()) names.push_back("neon_bf16");
  if (has_neon_i8mm()) names.push_back("neon_i8mm");
  if (has_neon_dot()) names.push_back("neon_dot");
  names.push_back("neon");
#endif
  names.push_back("scalar");
#ifdef QUIRE_HAS_avx512_bf16_emulated
  if (has_avx512()) names.push_back("avx512_bf16_emulated");
#endif
  return names;
}

std::string resolve_isa(const std::string& name) {
  const std::vector<std::string> names = available_isas();
  if (name == "auto") return names.front();
  std::string known;
  for (const std::string& n : names) {
    if (n == name) return name;
    known += (known.empty() ? "" : ", ") + n;
  }
  throw std::invalid_argument("isa '" + name + "' cannot run on this CPU; choose one of: auto, " + known);
}

const Kernels& kernels_for(const std::string& isa) {
  static const Kernels sets[] = {
#ifdef QUIRE_HAS_avx512_bf16
      {avx512::float_kernels, avx512_vnni::byte_kernels, avx512_bf16::pair_kernels, "avx512_bf16"},
      {avx512::float_kernels, avx512_vnni::byte_kernels, avx512::pair_kernels, "avx512_vnni"},
      {avx512::float_kernels, avx512::byte_kernels, avx512::pair_kernels, "avx512"},
      {avx2::float_kernels, avx2::byte_kernels, avx2::pair_kernels, "avx2"},
#endif
#ifdef QUIRE_HAS_avx512_bf16_emulated
      {avx512::float_kernels, avx512::byte_kernels, avx512_bf16_emulated::pair_kernels, "avx512_bf16_emulated"},
#endif
#ifdef QUIRE_HAS_neon
      {neon::float_kernels, neon_i8mm::byte_kernels, neon_bf16::pair_kernels, "neon_bf16"},
      {neon::float_kernels, neon_i8mm::byte_kernels, neon::pair_kernels, "neon_i8mm"},
      {neon::float_kernels, neon_dot::byte_kernels, neon::pair_kernels, "neon_dot"},
      {neon::float_kernels, neon::byte_kernels, neon::pair_kernels, "neon"},
#endif
      {scalar::float_kernels, scalar::byte_kernels, scalar::pair_kernels, "scalar"},
  };
  for (const Kernels& set : sets)
    if (isa == set.name) return set;
  throw std::invalid_argument("no kernels were built for isa '" + isa + "'");
}

}  // namespace quire
