// I: 16 integers of 32 bits, as V is 16 floats. Knows no layout.
//
// Every instruction set gives the same integers.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "simd/simd.h"

namespace quire::QUIRE_ISA {

#if defined(QUIRE_AVX512)
struct I {
  __m512i r;
};
inline I iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I iload(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void istore(void* p, I v) { _mm512_storeu_si512(p, v.r); }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.r, b.r)}; }
inline I operator&(I a, I b) { return {_mm512_and_si512(a.r, b.r)}; }
inline I operator^(I a, I b) { return {_mm512_xor_si512(a.r, b.r)}; }
inline I shift_right(I a, int bits) { return {_mm512_srl_epi32(a.r, _mm_cvtsi32_si128(bits))}; }
inline I shift_left(I a, int bits) { return {_mm512_sll_epi32(a.r, _mm_cvtsi32_si128(bits))}; }
inline V float_of(I a) { return {_mm512_castsi512_ps(a.r)}; }  // of the bits
inline I max(I a, I b) { return {_mm512_max_epi32(a.r, b.r)}; }
inline I magnitude_bits(V v) { return {_mm512_castps_si512(_mm512_abs_ps(v.r))}; }
inline V to_float(I a) { return {_mm512_cvtepi32_ps(a.r)}; }
// Byte `j` of each integer, as a signed number.
template <int j>
inline V signed_byte(I a) {
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(a.r, 24 - 8 * j), 24))};
}
// The low half byte of each integer less 8.
inline V nibble_less_8(I a) {
  const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm512_permutexvar_ps(a.r, values)};
}
// Stores byte i of 16 as byte `place` of the i-th integer at `to`; the other bytes stay.
inline void store_every_fourth(void* to, int place, const int8_t* bytes) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  _mm512_mask_storeu_epi8(to, 0x1111111111111111ull << place, _mm512_sll_epi32(wide, _mm_cvtsi32_si128(8 * place)));
}
inline I to_int(V v) { return {_mm512_cvtps_epi32(v.r)}; }  // to nearest even
inline void store_int8(int8_t* p, I a) {                    // of each integer the low byte
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.r));
}
#elif defined(QUIRE_AVX2)
struct I {
  __m256i a, b;
};
inline I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I iload(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void istore(void* p, I v) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, v.a);
  _mm256_storeu_si256(q + 1, v.b);
}
inline I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I operator-(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I operator&(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I operator^(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline I shift_right(I x, int bits) {
  const __m128i n = _mm_cvtsi32_si128(bits);
  return {_mm256_srl_epi32(x.a, n), _mm256_srl_epi32(x.b, n)};
}
inline I max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline I magnitude_bits(V x) {
  const V y = abs(x);
  return {_mm256_castps_si256(y.a), _mm256_castps_si256(y.b)};
}
inline I shift_left(I x, int bits) {
  const __m128i n = _mm_cvtsi32_si128(bits);
  return {_mm256_sll_epi32(x.a, n), _mm256_sll_epi32(x.b, n)};
}
inline V float_of(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }  // of the bits
inline V to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
template <int j>
inline V signed_byte(I x) {
  auto byte = [](__m256i v) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * j), 24)); };
  return {byte(x.a), byte(x.b)};
}
inline I to_int(V v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
#elif defined(QUIRE_NEON)
struct I {
  int32x4_t q[4];
};
inline uint8x16_t load_quarter(const void* p, int i) { return vld1q_u8(static_cast<const uint8_t*>(p) + 16 * i); }
inline uint8x16_t bytes_of(int32x4_t q) { return vreinterpretq_u8_s32(q); }
QUIRE_EACH(I, iset1, (int32_t x), vdupq_n_s32(x))
QUIRE_EACH(I, iload, (const void* p), vreinterpretq_s32_u8(load_quarter(p, i)))
inline void istore(void* p, I v) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) vst1q_u8(static_cast<uint8_t*>(p) + 16 * i, bytes_of(v.q[i]));
}
QUIRE_EACH(I, operator+, (I a, I b), vaddq_s32(a.q[i], b.q[i]))
QUIRE_EACH(I, operator-, (I a, I b), vsubq_s32(a.q[i], b.q[i]))
QUIRE_EACH(I, operator&, (I a, I b), vandq_s32(a.q[i], b.q[i]))
QUIRE_EACH(I, operator^, (I a, I b), veorq_s32(a.q[i], b.q[i]))
QUIRE_EACH(I, shift_right, (I a, int bits), vreinterpretq_s32_u32(vreinterpretq_u32_s32(a.q[i]) >> bits))
QUIRE_EACH(I, shift_left, (I a, int bits), vreinterpretq_s32_u32(vreinterpretq_u32_s32(a.q[i]) << bits))
QUIRE_EACH(I, max, (I a, I b), vmaxq_s32(a.q[i], b.q[i]))
QUIRE_EACH(I, magnitude_bits, (V v), vreinterpretq_s32_f32(vabsq_f32(v.q[i])))
QUIRE_EACH(V, float_of, (I a), vreinterpretq_f32_s32(a.q[i]))
QUIRE_EACH(V, to_float, (I a), vcvtq_f32_s32(a.q[i]))
template <int j>
inline V signed_byte(I a) {
  return quarters<V>([&](int i) { return vcvtq_f32_s32(shift_left(a, 24 - 8 * j).q[i] >> 24); });
}
// To nearest even. As on x86: NaN and values out of range become the least integer.
QUIRE_EACH(I, to_int, (V v), vbslq_s32(vcltq_f32(v.q[i], vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(v.q[i]),
                                       vdupq_n_s32(std::numeric_limits<int32_t>::min())))
inline void store_int8(int8_t* p, I a) {  // of each integer the low byte
  auto words = [&](int i) { return vcombine_s16(vmovn_s32(a.q[i]), vmovn_s32(a.q[i + 1])); };
  vst1q_s8(p, vcombine_s8(vmovn_s16(words(0)), vmovn_s16(words(2))));
}
#else
struct I {
  Ints v;
};
template <class F>
inline I each(F&& f) {
  I r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
  return r;
}
inline I iset1(int32_t x) { return {Ints{} + x}; }
inline I iload(const void* p) {
  I r;
  std::memcpy(&r.v, p, sizeof(r.v));
  return r;
}
inline void istore(void* p, I x) { std::memcpy(p, &x.v, sizeof(x.v)); }
// Sums wrap around.
inline I operator+(I x, I y) { return {Ints(Bits(x.v) + Bits(y.v))}; }
inline I operator-(I x, I y) { return {Ints(Bits(x.v) - Bits(y.v))}; }
inline I operator&(I x, I y) { return {x.v & y.v}; }
inline I operator^(I x, I y) { return {x.v ^ y.v}; }
inline I shift_right(I x, int bits) { return {Ints(Bits(x.v) >> bits)}; }
inline I shift_left(I x, int bits) { return {Ints(Bits(x.v) << bits)}; }
inline I max(I x, I y) { return {x.v > y.v ? x.v : y.v}; }
inline I magnitude_bits(V x) { return {Ints(to_bits(abs(x)))}; }
inline V float_of(I x) { return from_bits(Bits(x.v)); }
inline V to_float(I x) { return {__builtin_convertvector(x.v, Floats)}; }
template <int j>
inline V signed_byte(I x) {
  return to_float({shift_left(x, 24 - 8 * j).v >> 24});
}
inline I to_int(V v) {
  const V rounded = round_even(v);
  // As on x86: NaN and values out of range become the least integer.
  return each([&](int i) {
    const float x = rounded.r[i];
    return x >= -0x1p31f && x < 0x1p31f ? int32_t(x) : std::numeric_limits<int32_t>::min();
  });
}
#endif

// The same in a register: g++ would load a value again for each use, or broadcast it within each product, which then runs
// at half the rate.
#if defined(QUIRE_AVX512)
inline I held(I a) {
  __asm__("" : "+v"(a.r));
  return a;
}
#elif defined(QUIRE_AVX2)
inline I held(I x) {
  __asm__("" : "+x"(x.a), "+x"(x.b));
  return x;
}
#else
inline I held(I x) { return x; }
#endif

// Of a pair of bfloat16 in each lane: the first, and the second.
inline V pair_first(I a) { return float_of(shift_left(a, 16)); }
inline V pair_second(I a) { return float_of(a & iset1(int32_t(0xffff0000u))); }

#if defined(QUIRE_BF16_DOT) && defined(QUIRE_NEON)
// sum + (the two products of bfloat16 of each lane): both additions round to odd, and denormal numbers count as 0.
QUIRE_EACH(V, dot_pairs, (V sum, I x, I y),
           vbfdotq_f32(sum.q[i], vreinterpretq_bf16_s32(x.q[i]), vreinterpretq_bf16_s32(y.q[i])))
inline void store_halves(uint16_t* p, V v) { store_bf16(p, v); }
// Pairs of the 16 bfloat16 at `first` and at `second`; the first, or second, ones are 0 if bit 0, or 1, of `halves` is clear.
inline I load_pairs(const uint16_t* first, const uint16_t* second, uint32_t halves) {
  const int32_t mask = (halves & 1 ? 0xffff : 0) | (halves & 2 ? -0x10000 : 0);
  return iset1(mask) & quarters<I>([&](int i) {
    const uint16x4_t a = vld1_u16(first + 4 * i), b = vld1_u16(second + 4 * i);
    return vreinterpretq_s32_u32(vmovl_u16(a) | vshll_n_u16(b, 16));
  });
}
#elif defined(QUIRE_BF16_DOT)
// sum + the two products of bfloat16 of each lane, the second ones first.
inline V dot_pairs(V sum, I x, I y) {
#if defined(QUIRE_BF16_DOT_EMULATED)
  return fma(pair_first(x), pair_first(y), fma(pair_second(x), pair_second(y), sum));
#else
  return {_mm512_dpbf16_ps(sum.r, (__m512bh)x.r, (__m512bh)y.r)};
#endif
}
// 16 floats rounded as by store_bf16, for dot_pairs. Denormal ones may become 0: dot_pairs takes them for 0 anyway.
inline void store_halves(uint16_t* p, V v) {
#if defined(QUIRE_BF16_DOT_EMULATED)
  store_bf16(p, v);
#else
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v.r));
#endif
}
alignas(64) constexpr uint16_t kPairOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
// Pairs of the 16 bfloat16 at `first` and at `second`; element i is 0 if bit 2 i, or 2 i + 1, of `halves` is clear.
inline I load_pairs(const uint16_t* first, const uint16_t* second, uint32_t halves) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  return {_mm512_maskz_permutexvar_epi16(halves, _mm512_load_si512(kPairOrder), both)};
}
#endif

#if !defined(QUIRE_AVX512)
#if !defined(QUIRE_NEON)
inline void store_int8(int8_t* p, I a) {
  int32_t lanes[kLanes];
  istore(lanes, a);
  for (int i = 0; i < kLanes; ++i) p[i] = int8_t(lanes[i]);
}
#endif
inline void store_every_fourth(void* to, int place, const int8_t* bytes) {
  for (int i = 0; i < kLanes; ++i) static_cast<int8_t*>(to)[4 * i + place] = bytes[i];
}
inline V nibble_less_8(I a) { return to_float((a & iset1(15)) - iset1(8)); }
#endif

#if defined(QUIRE_AVX512)
inline int32_t reduce_add(I a) { return _mm512_reduce_add_epi32(a.r); }
inline int32_t reduce_max(I a) { return _mm512_reduce_max_epi32(a.r); }
#elif defined(QUIRE_NEON)
inline int32_t reduce_add(I a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.q[0], a.q[1]), vaddq_s32(a.q[2], a.q[3]))); }
inline int32_t reduce_max(I a) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.q[0], a.q[1]), vmaxq_s32(a.q[2], a.q[3]))); }
#else
inline int32_t reduce_add(I a) {
  uint32_t lanes[kLanes], total = 0;
  istore(lanes, a);
  for (const uint32_t lane : lanes) total += lane;
  return int32_t(total);
}
inline int32_t reduce_max(I a) {
  int32_t lanes[kLanes];
  istore(lanes, a);
  int32_t most = lanes[0];
  for (const int32_t lane : lanes) most = max_of(most, lane);
  return most;
}
#endif

constexpr float kLeastMagnitude = 1e-30f;  // the reciprocal of a smaller one may overflow

// The greatest of magnitude_bits as a float; NaN if it is not finite.
inline float finite_magnitude(I bits) {
  const int32_t top = reduce_max(bits);
  float most;
  std::memcpy(&most, &top, 4);
  return top < 0x7f800000 ? most : __builtin_nanf("");
}

// The greatest magnitude of n values; NaN if one is not finite.
inline float greatest_magnitude(const float* x, int n) {
  // The bits of magnitudes compare as the numbers do, and those that are not finite are the greatest.
  I top = iset1(0);
  int k = 0;
  for (; k + kLanes <= n; k += kLanes) top = max(top, magnitude_bits(load(x + k)));
  if (k < n) top = max(top, magnitude_bits(load_first(x + k, n - k)));
  return finite_magnitude(top);
}

// Values in int8: q = round(x * inverse), about x / scale.
struct Int8Scale {
  float scale, inverse;
};

// max|x| / 127 of n values; NaN if one is not finite.
inline Int8Scale int8_scale(const float* x, int n) {
  const float most = greatest_magnitude(x, n);
  return {most / 127.0f, most >= kLeastMagnitude ? 127.0f / most : 0.0f};
}

// Stores the low bytes of the first n integers.
inline void store_int8_first(int8_t* p, I a, int n) {
  if (n == kLanes) return store_int8(p, a);
  int8_t bytes[kLanes];
  store_int8(bytes, a);
  std::memcpy(p, bytes, size_t(n));
}

// Rounds n values to q; returns the sum of q. An inverse of 0 makes all of them 0: the values are too small, or one of
// the row is NaN (then its scale is NaN too).
inline int32_t round_to_int8(const float* x, int n, float inverse, int8_t* q) {
  if (inverse == 0.0f) {
    std::memset(q, 0, size_t(n));
    return 0;
  }
  I sum = iset1(0);
  int k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    const I rounded = to_int(load(x + k) * set1(inverse));
    store_int8(q + k, rounded);
    sum = sum + rounded;
  }
  if (k < n) {
    const I rounded = to_int(load_first(x + k, n - k) * set1(inverse));
    store_int8_first(q + k, rounded, n - k);
    sum = sum + rounded;
  }
  return reduce_add(sum);
}

}  // namespace quire::QUIRE_ISA
