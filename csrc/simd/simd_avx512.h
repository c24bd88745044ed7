// V on AVX-512: one register. Part of simd.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace quire::QUIRE_ISA {

struct V {
  __m512 r;
};
struct M {
  __mmask16 m;
};

inline V set1(float x) { return {_mm512_set1_ps(x)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v.r); }
inline V load_bf16(const uint16_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
// Round to nearest even; NaN stays NaN.
inline __m512i bf16_bits(V v) {
  const __m512i bits = _mm512_castps_si512(v.r);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v.r, v.r, _CMP_UNORD_Q), quiet);
}
inline void store_bf16(uint16_t* p, V v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bf16_bits(v)));
}

inline V operator+(V a, V b) { return {_mm512_add_ps(a.r, b.r)}; }
inline V operator-(V a, V b) { return {_mm512_sub_ps(a.r, b.r)}; }
inline V operator*(V a, V b) { return {_mm512_mul_ps(a.r, b.r)}; }
inline V operator/(V a, V b) { return {_mm512_div_ps(a.r, b.r)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.r, b.r, c.r)}; }  // a * b + c, rounded once
inline V min(V a, V b) { return {_mm512_min_ps(a.r, b.r)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.r, b.r)}; }
inline V abs(V a) { return {_mm512_abs_ps(a.r)}; }
inline V sqrt(V a) { return {_mm512_sqrt_ps(a.r)}; }
inline V round_even(V a) { return {_mm512_roundscale_ps(a.r, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline V scale(V a, V n) { return {_mm512_scalef_ps(a.r, n.r)}; }  // a * 2^n, n whole in [-126, 127]
inline V copysign(V a, V sign) {
  const __m512i bit = _mm512_set1_epi32(int(0x80000000u));
  const __m512i bits = _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign.r), _mm512_castps_si512(a.r), 0xca);
  return {_mm512_castsi512_ps(bits)};
}
inline __m256 add_halves(V a) {  // lane i and lane i + 8
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.r), 1));
  return _mm256_add_ps(_mm512_castps512_ps256(a.r), high);
}
inline M less(V a, V b) { return {_mm512_cmp_ps_mask(a.r, b.r, _CMP_LT_OQ)}; }
inline M first_lanes(int n) { return {__mmask16(n >= 16 ? 0xffff : (1u << n) - 1u)}; }  // lanes 0..n-1
inline V select(M m, V yes, V no) { return {_mm512_mask_mov_ps(no.r, m.m, yes.r)}; }

}  // namespace quire::QUIRE_ISA
