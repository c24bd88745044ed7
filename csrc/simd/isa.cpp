// Run-time detection of instruction sets and the choice of a kernel table. Knows no kernel's inside.
#include "simd/isa.h"

#include <stdexcept>

#include "simd/kernels.h"

namespace quire {

namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports also asks the operating system (xgetbv) whether it saves the wide registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
// AMD's cores multiply pairs of bfloat16 at twice the rate of floats; Intel's since Sapphire Rapids, which have other
// units for them, at half of it (one product in two cycles where floats have two in one).
bool has_quick_bf16() {
  return has_avx512_bf16() && (!__builtin_cpu_is("intel") || __builtin_cpu_is("cooperlake"));
}
#endif

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (has_quick_bf16()) names.push_back("avx512_bf16");
  if (has_avx512_vnni()) names.push_back("avx512_vnni");
  if (has_avx512_bf16() && !has_quick_bf16()) names.push_back("avx512_bf16");
  if (has_avx512()) names.push_back("avx512");
  if (has_avx2()) names.push_back("avx2");
#endif
#ifdef QUIRE_HAS_neon
  names.push_back("neon");
#endif
  names.push_back("scalar");
#if defined(__x86_64__)
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
#ifdef QUIRE_HAS_avx512_bf16
  if (isa == "avx512_bf16") return avx512_bf16::kernels;
  if (isa == "avx512_bf16_emulated") return avx512_bf16_emulated::kernels;
  if (isa == "avx512_vnni") return avx512_vnni::kernels;
  if (isa == "avx512") return avx512::kernels;
  if (isa == "avx2") return avx2::kernels;
#endif
#ifdef QUIRE_HAS_neon
  if (isa == "neon") return neon::kernels;
#endif
  if (isa == "scalar") return scalar::kernels;
  throw std::invalid_argument("no kernels were built for isa '" + isa + "'");
}

}  // namespace quire
