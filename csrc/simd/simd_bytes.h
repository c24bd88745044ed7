// Reads the fields of blocks with I: shifts by constants, tables, float16. Knows no kind of block.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "simd/simd_int.h"

namespace quire::QUIRE_ISA {

template <int N>
struct Index {
  static constexpr int value = N;
};

// Calls f(Index<0>), ..., f(Index<N - 1>): shifts need constant counters.
template <int N, class F>
QUIRE_INLINE void unrolled(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) QUIRE_INLINE_LAMBDA {
    (f(Index<i>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

// The same where counters need not be constants: code without vector instructions keeps its loop.
template <int N, class F>
QUIRE_INLINE void repeated(F&& f) {
#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
  unrolled<N>([&](auto i) QUIRE_INLINE_LAMBDA { f(i.value); });
#else
  for (int i = 0; i < N; ++i) f(i);
#endif
}

#if defined(QUIRE_AVX512)
template <int bits>
inline I shr(I a) {
  if constexpr (bits == 0) return a;
  else return {_mm512_srli_epi32(a.r, bits)};
}
template <int bits>
inline I shl(I a) {
  if constexpr (bits == 0) return a;
  else return {_mm512_slli_epi32(a.r, bits)};
}
inline I operator|(I a, I b) { return {_mm512_or_si512(a.r, b.r)}; }
inline I operator-(I a, I b) { return {_mm512_sub_epi32(a.r, b.r)}; }
inline I operator*(I a, I b) { return {_mm512_mullo_epi32(a.r, b.r)}; }
// table[b] for each byte b, all below 16; the table is repeated in each 16 bytes.
inline I lookup(I table, I bytes) { return {_mm512_shuffle_epi8(table.r, bytes.r)}; }
inline I repeat16(const void* table) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(table)))};
}
inline I gather(const uint32_t* table, I index) {
  return {_mm512_i32gather_epi32(index.r, table, 4)};
}
// Of float16 in the low half of each integer.
inline V low_half(I a) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.r))}; }
inline V load_halves(const void* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))}; }
inline I load_bytes(const void* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))}; }
#elif defined(QUIRE_AVX2)
template <int bits>
inline I shr(I x) {
  if constexpr (bits == 0) return x;
  else return {_mm256_srli_epi32(x.a, bits), _mm256_srli_epi32(x.b, bits)};
}
template <int bits>
inline I shl(I x) {
  if constexpr (bits == 0) return x;
  else return {_mm256_slli_epi32(x.a, bits), _mm256_slli_epi32(x.b, bits)};
}
inline I operator|(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline I operator*(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
// table[b] for each byte b, all below 16; the table is repeated in each 16 bytes.
inline I lookup(I table, I bytes) {
  return {_mm256_shuffle_epi8(table.a, bytes.a), _mm256_shuffle_epi8(table.b, bytes.b)};
}
inline I repeat16(const void* table) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(table)));
  return {both, both};
}
inline I gather(const uint32_t* table, I index) {
  const int* p = reinterpret_cast<const int*>(table);
  return {_mm256_i32gather_epi32(p, index.a, 4), _mm256_i32gather_epi32(p, index.b, 4)};
}
// Of float16 in the low half of each integer.
inline V low_half(I x) {
  auto half = [](__m256i v) {
    const __m256i words = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
  };
  return {half(x.a), half(x.b)};
}
inline V load_halves(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline I load_bytes(const void* p) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
#else
#if defined(QUIRE_NEON)
QUIRE_EACH(I, operator|, (I a, I b), vorrq_s32(a.q[i], b.q[i]))
QUIRE_EACH(I, operator*, (I a, I b), vmulq_s32(a.q[i], b.q[i]))
QUIRE_EACH(I, lookup, (I table, I bytes), vreinterpretq_s32_u8(vqtbl1q_u8(bytes_of(table.q[i]), bytes_of(bytes.q[i]))))
QUIRE_EACH(I, repeat16, (const void* table), vreinterpretq_s32_u8(load_quarter(table, 0)))
inline I gather(const uint32_t* table, I index) {
  int32_t at[kLanes];
  istore(at, index);
  for (int32_t& i : at) i = int32_t(table[i]);
  return iload(at);
}
inline float32x4_t widen_halves(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
QUIRE_EACH(V, low_half, (I a), widen_halves(vmovn_u32(vreinterpretq_u32_s32(a.q[i]))))
QUIRE_EACH(V, load_halves, (const void* p), widen_halves(vld1_u16(static_cast<const uint16_t*>(p) + 4 * i)))
inline I load_bytes(const void* p) {
  const uint8x16_t bytes = load_quarter(p, 0);
  const uint16x8_t words[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)};
  return quarters<I>([&](int i) {
    return vreinterpretq_s32_u32(i % 2 ? vmovl_high_u16(words[i / 2]) : vmovl_u16(vget_low_u16(words[i / 2])));
  });
}
#endif
template <int bits>
inline I shr(I x) {
  return shift_right(x, bits);
}
template <int bits>
inline I shl(I x) {
  return shift_left(x, bits);
}
#if !defined(QUIRE_NEON)
inline I operator|(I x, I y) { return {x.v | y.v}; }
inline I operator*(I x, I y) { return {Ints(Bits(x.v) * Bits(y.v))}; }
// table[b] for each byte b, all below 16; the table is repeated in each 16 bytes.
inline I lookup(I table, I bytes) {
  uint8_t of[64], at[64];
  istore(of, table), istore(at, bytes);
  for (int i = 0; i < 64; ++i) at[i] = of[at[i] & 15];
  return iload(at);
}
inline I repeat16(const void* table) {
  uint8_t of[64];
  for (int i = 0; i < 64; i += 16) std::memcpy(of + i, table, 16);
  return iload(of);
}
inline I gather(const uint32_t* table, I index) {
  return each([&](int i) { return int32_t(table[index.v[i]]); });
}
inline float half_to_float(uint32_t h) {
  const uint32_t exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  float f = float(mantissa) * 0x1p-24f;  // zero and subnormals, exact
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (exponent > 0) bits = (exponent == 31 ? 255u : exponent + 112u) << 23 | mantissa << 13;
  bits |= (h & 0x8000u) << 16;
  std::memcpy(&f, &bits, 4);
  return f;
}
// Of float16 in the low half of each integer.
inline V low_half(I x) {
  alignas(64) float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = half_to_float(uint32_t(x.v[i]) & 0xffffu);
  return load(lanes);
}
inline V load_halves(const void* p) {
  uint16_t halves[kLanes];
  std::memcpy(halves, p, sizeof(halves));
  return low_half(each([&](int i) { return int32_t(halves[i]); }));
}
inline I load_bytes(const void* p) {
  return each([&](int i) { return int32_t(static_cast<const uint8_t*>(p)[i]); });
}
#endif
#endif

inline V high_half(I a) { return low_half(shr<16>(a)); }
// Byte `j` of each integer, unsigned.
template <int j>
inline V unsigned_byte(I a) {
  return to_float(shr<8 * j>(a) & iset1(255));
}
inline V negated(V v) { return float_of(iload(&v) ^ iset1(int32_t(0x80000000u))); }
// Bits 0 to 3 spread over the bytes: byte j is 0 or 1, as bit j is.
inline I spread_bits(I four) { return (four * iset1(0x00204081)) & iset1(0x01010101); }

}  // namespace quire::QUIRE_ISA
