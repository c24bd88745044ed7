// I as codes that stand for floats: FP8, and entries of tables of sixteen. Knows no kind of block.
#pragma once

#include "simd/simd_bytes.h"

namespace quire::QUIRE_ISA {

// E4M3 has the exponent's bias 7 where float16 has 15: its bits as a float16 are the value times 2^-8.
constexpr float kE4m3Scale = 256;

// Of E4M3 in the top bytes of 16-bit halves: float16 bits. Of E5M2 the top byte is the float16.
inline I e4m3_halves(I top) {
  return (top & iset1(int32_t(0x80008000u))) | (shr<1>(top) & iset1(0x3f803f80));
}
inline I e5m2_halves(I top) { return top & iset1(int32_t(0xff00ff00u)); }

// Byte j of each integer as an E4M3 number, times 2^-8.
template <int j>
inline V e4m3_byte(I w) {
  const I halves = e4m3_halves(j % 2 ? w : shl<8>(w));
  if constexpr (j < 2) return low_half(halves);
  else return high_half(halves);
}

#if defined(QUIRE_AVX512)
// table[the low four bits of each integer].
struct Table16 {
  __m512 values;
};
inline Table16 table16(const float* p) { return {_mm512_loadu_ps(p)}; }
inline V pick(const Table16& table, I code) { return {_mm512_permutexvar_ps(code.r, table.values)}; }
// The lanes whose bit is set.
template <int bit>
inline M has_bit(I code) {
  return {_mm512_test_epi32_mask(code.r, _mm512_set1_epi32(1 << bit))};
}
#elif defined(QUIRE_AVX2)
struct Table16 {
  __m256 low, high;
};
inline Table16 table16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline V pick(const Table16& table, I code) {
  auto half = [&](__m256i c) {
    const __m256 low = _mm256_permutevar8x32_ps(table.low, c), high = _mm256_permutevar8x32_ps(table.high, c);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(c, 28)));
  };
  return {half(code.a), half(code.b)};
}
template <int bit>
inline M has_bit(I code) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(code.a, 31 - bit)),
          _mm256_castsi256_ps(_mm256_slli_epi32(code.b, 31 - bit))};
}
#else
struct Table16 {
  float values[16];
};
inline Table16 table16(const float* p) {
  Table16 table;
  std::memcpy(table.values, p, sizeof(table.values));
  return table;
}
inline V pick(const Table16& table, I code) {
  alignas(64) float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = table.values[code.v[i] & 15];
  return load(lanes);
}
template <int bit>
inline M has_bit(I code) {
  M m = first_lanes(0);
  for (int i = 0; i < kLanes; ++i) m.m[i] = (code.v[i] >> bit & 1) ? -1 : 0;
  return m;
}
#endif

#if defined(QUIRE_BF16_DOT)
// Bytes `first` and `first + 1` of each integer as the low, or the high, bytes of a pair of 16 bits.
template <int first, bool high>
inline I paired_bytes(I w) {
  constexpr int a = first, none = 0x80;
  constexpr auto at = [](int lane, int i) { return i % 2 == int(high) ? 4 * lane + a + i / 2 : none; };
  const __m128i places = _mm_setr_epi8(
      char(at(0, 0)), char(at(0, 1)), char(at(0, 2)), char(at(0, 3)), char(at(1, 0)), char(at(1, 1)), char(at(1, 2)),
      char(at(1, 3)), char(at(2, 0)), char(at(2, 1)), char(at(2, 2)), char(at(2, 3)), char(at(3, 0)), char(at(3, 1)),
      char(at(3, 2)), char(at(3, 3)));
  return {_mm512_shuffle_epi8(w.r, _mm512_broadcast_i32x4(places))};
}

// table[the low five bits] of each 16 bits.
struct Table32 {
  __m512i values;
};
inline Table32 table32(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
// Sixteen entries, so that the fifth bit does not count.
inline Table32 twice16(const uint16_t* p) {
  return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline I pick_pairs(const Table32& table, I codes) { return {_mm512_permutexvar_epi16(codes.r, table.values)}; }

// E4M3 in the high bytes of pairs as bfloat16. `subnormals`: the numbers of the codes 0 to 7, which bfloat16 holds as
// normal ones.
inline I e4m3_pairs(I high, const Table32& subnormals) {
  const __m512i exponents = _mm512_set1_epi16(0x7800), rest = _mm512_set1_epi16(0x07f0);
  const __m512i magnitude = _mm512_and_si512(_mm512_srli_epi16(high.r, 4), rest);
  const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16((127 - 7) << 7));
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, _mm512_testn_epi16_mask(high.r, exponents),
                                                      _mm512_srli_epi16(high.r, 8), subnormals.values);
  // value | sign
  return {_mm512_ternarylogic_epi32(value, high.r, _mm512_set1_epi16(int16_t(0x8000)), 0xf8)};
}
#endif

// Eight entries, so that the fourth bit does not count.
inline Table16 twice8(const float* p) {
#if defined(QUIRE_AVX512)
  return {_mm512_broadcast_f32x8(_mm256_loadu_ps(p))};
#elif defined(QUIRE_AVX2)
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p)};
#else
  alignas(64) float both[16];
  std::memcpy(both, p, 32);
  std::memcpy(both + 8, p, 32);
  return table16(both);
#endif
}

}  // namespace quire::QUIRE_ISA
