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
#elif defined(QUIRE_NEON)
struct Table16 {
  uint8x16x4_t bytes;
};
inline Table16 table16(const float* p) { return {vld1q_u8_x4(reinterpret_cast<const uint8_t*>(p))}; }
inline V pick(const Table16& table, I code) {
  const I places = (code & iset1(15)) * iset1(0x04040404) + iset1(0x03020100);
  return quarters<V>([&](int i) { return vreinterpretq_f32_u8(vqtbl4q_u8(table.bytes, bytes_of(places.q[i]))); });
}
template <int bit>
inline M has_bit(I code) {
  return quarters<M>([&](int i) { return vtstq_s32(code.q[i], vdupq_n_s32(1 << bit)); });
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
// Codes become pairs of bfloat16 in crossed order: of each four columns the first with the third, then the second with the
// fourth. So bytes, and half bytes two apart, lie in the two halves of an integer.

// table[the low four bits] of each 16 bits.
#if defined(QUIRE_NEON)
struct PairTable {
  uint8x16x2_t bytes;
};
inline PairTable pair_table(const uint16_t* sixteen) {
  return {vld1q_u8_x2(reinterpret_cast<const uint8_t*>(sixteen))};
}
inline I pick_pairs(const PairTable& table, I codes) {
  const I places = (codes & iset1(0x000f000f)) * iset1(0x0202) + iset1(0x01000100);
  return quarters<I>([&](int i) { return vreinterpretq_s32_u8(vqtbl2q_u8(table.bytes, bytes_of(places.q[i]))); });
}
// Pairs of neighbouring columns in crossed order.
inline I crossed(I halves) {
  constexpr uint8x16_t order = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
  return quarters<I>([&](int i) { return vreinterpretq_s32_u8(vqtbl1q_u8(bytes_of(halves.q[i]), order)); });
}
#else
struct PairTable {
  __m512i values;
};
inline PairTable pair_table(const uint16_t* sixteen) {
  return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(sixteen)))};
}
inline I pick_pairs(const PairTable& table, I codes) { return {_mm512_permutexvar_epi16(codes.r, table.values)}; }
// Pairs of neighbouring columns in crossed order.
inline I crossed(I halves) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  return {_mm512_shuffle_epi8(halves.r, _mm512_broadcast_i32x4(order))};
}
#endif

// Of eight columns in half bytes, the first four in the low halves of the bytes: their k-th pair, in the lowest bits.
template <int k>
QUIRE_INLINE I crossed_half(I w) {
  return shr<k % 2 * 8 + k / 2 * 4>(w);
}

// Four columns of E4M3: calls put(0, pairs) and put(1, pairs).
#if defined(QUIRE_BF16_DOT_EMULATED) || defined(QUIRE_NEON)
template <class Put>
QUIRE_INLINE void crossed_e4m3(I w, Put&& put) {
  unrolled<2>([&](auto odd) QUIRE_INLINE_LAMBDA {
    const I halves = e4m3_halves(odd.value ? w : shl<8>(w));
    const V first = low_half(halves) * set1(kE4m3Scale), second = high_half(halves) * set1(kE4m3Scale);
    put(odd.value, shr<16>(iload(&first)) | (iload(&second) & iset1(-0x10000)));
  });
}
#else
// The bytes of the numbers of E4M3 as bfloat16, without a sign. Codes 0 to 7 are multiples of 2^-9.
struct E4m3Bytes {
  uint8_t low[128], high[128];
};
constexpr E4m3Bytes e4m3_bytes() {
  E4m3Bytes bytes{};
  for (int code = 0; code < 128; ++code) {
    int exponent = (code >> 3) + 120, mantissa = code << 4 & 0x70;
    if (code < 8)
      for (exponent = code ? 121 : 0; code && !(mantissa & 0x80); --exponent) mantissa <<= 1;
    const int bits = exponent << 7 | (mantissa & 0x7f);
    bytes.low[code] = uint8_t(bits), bytes.high[code] = uint8_t(bits >> 8);
  }
  return bytes;
}
alignas(64) inline constexpr E4m3Bytes kE4m3Bytes = e4m3_bytes();

template <class Put>
QUIRE_INLINE void crossed_e4m3(I w, Put&& put) {
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3Bytes.low), w.r, _mm512_load_si512(kE4m3Bytes.low + 64));
  const __m512i size = _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3Bytes.high), w.r, _mm512_load_si512(kE4m3Bytes.high + 64));
  const __m512i high = _mm512_ternarylogic_epi32(size, w.r, _mm512_set1_epi8(char(0x80)), 0xf8);  // size | (w & sign)
  const __m512i before = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14));
  const __m512i after = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 15));
  put(0, I{_mm512_mask_shuffle_epi8(low, 0xaaaaaaaaaaaaaaaaull, high, before)});
  put(1, I{_mm512_mask_shuffle_epi8(high, 0x5555555555555555ull, low, after)});
}
#endif
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
