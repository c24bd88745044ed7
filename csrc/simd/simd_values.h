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

// tables[code][lane], each lane with a table of its own of 2^bits entries.
template <int bits>
inline V pick_own(const float* tables, I code) {
  if constexpr (bits == 0) return load(tables);
  else
    return select(has_bit<bits - 1>(code), pick_own<bits - 1>(tables + (kLanes << (bits - 1)), code),
                  pick_own<bits - 1>(tables, code));
}

}  // namespace quire::QUIRE_ISA
