// Products of bytes with exact sums, with the instructions that there are: four bytes at a time, or two words of 16
// bits. All give the same integers. Knows registers; knows no layout.
#pragma once

#include <cstdint>

#include "simd/simd_int.h"

namespace quire::QUIRE_ISA {

#if defined(QUIRE_VNNI)
// sum + the four products of bytes of each lane: unsigned bytes of u times signed bytes of s.
inline I dot_bytes(I sum, I u, I s) {
  // Assembly, because with the intrinsic g++ 12 copies the sum before and after, and spills.
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.r) : "v"(u.r), "v"(s.r));
  return sum;
}
#elif defined(QUIRE_AVX2) || defined(QUIRE_AVX512)
#define QUIRE_WORD_DOTS
// The number of sums of two products each, of bytes up to `most` and activations, that fit into 16 bits together: a power
// of two, `wanted` at most.
constexpr int small_run(int most, int wanted) {
  int run = 1;
  while (run < wanted && 2 * run * 2 * most * 127 <= 32767) run *= 2;
  return run;
}

// An I of words holds two 16-bit integers in each lane.
//
// Products are added without intrinsics: since integers may be added in any order, g++ 12 would compute all products of
// a step first, and run out of registers.
inline I even_bytes(I a) { return a & iset1(0x00ff00ff); }  // bytes 0 and 2 as words; odd_bytes: 1 and 3
#if defined(QUIRE_AVX512)
inline I odd_bytes(I a) { return {_mm512_srli_epi16(a.r, 8)}; }
inline I even_signed_bytes(I a) { return {_mm512_srai_epi16(_mm512_slli_epi16(a.r, 8), 8)}; }
inline I odd_signed_bytes(I a) { return {_mm512_srai_epi16(a.r, 8)}; }
// sum + the two products of words of each lane.
inline I dot_words(I sum, I a, I b) {
  __m512i products;
  __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum.r), "=&v"(products) : "v"(a.r), "v"(b.r));
  return sum;
}
// Words + two products each: bytes of u without a sign, of s with. Right where all fits into 16 bits.
inline I dot_small(I words, I u, I s) {
  __m512i products;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(words.r), "=&v"(products) : "v"(u.r), "v"(s.r));
  return words;
}
// The size of signed bytes, and bytes of x with the sign of those of s; dot_small of both is the product of s and x.
inline I size_of_bytes(I s) { return {_mm512_abs_epi8(s.r)}; }
inline I signed_by(I x, I s) {
  return {_mm512_mask_sub_epi8(x.r, _mm512_movepi8_mask(s.r), _mm512_setzero_si512(), x.r)};
}
// Of each four integers, all at most 32,767 or taken for that, the first and third as words, then the others: 8 lanes.
inline void store_word_pairs(void* to, I a) {
  const __m512i words = _mm512_min_epi32(a.r, _mm512_set1_epi32(32767));
  const __m512i upper = _mm512_slli_epi32(_mm512_bsrli_epi128(words, 8), 16);
  const __m512i pairs = _mm512_or_si512(_mm512_and_si512(words, _mm512_set1_epi32(0xffff)), upper);
  _mm512_mask_compressstoreu_epi64(to, 0x55, pairs);
}
#else
inline I odd_bytes(I x) { return {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)}; }
inline I even_signed_bytes(I x) {
  return {_mm256_srai_epi16(_mm256_slli_epi16(x.a, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(x.b, 8), 8)};
}
inline I odd_signed_bytes(I x) { return {_mm256_srai_epi16(x.a, 8), _mm256_srai_epi16(x.b, 8)}; }
inline __m256i dot_words_half(__m256i sum, __m256i x, __m256i y) {
  __m256i products;
  __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(x), "x"(y));
  return sum;
}
inline __m256i dot_small_half(__m256i words, __m256i u, __m256i s) {
  __m256i products;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(words), "=&x"(products) : "x"(u), "x"(s));
  return words;
}
// sum + the two products of words of each lane.
inline I dot_words(I sum, I x, I y) { return {dot_words_half(sum.a, x.a, y.a), dot_words_half(sum.b, x.b, y.b)}; }
// Words + two products each: bytes of u without a sign, of s with. Right where all fits into 16 bits.
inline I dot_small(I words, I u, I s) {
  return {dot_small_half(words.a, u.a, s.a), dot_small_half(words.b, u.b, s.b)};
}
// The size of signed bytes, and bytes of x with the sign of those of s; dot_small of both is the product of s and x.
inline I size_of_bytes(I s) { return {_mm256_abs_epi8(s.a), _mm256_abs_epi8(s.b)}; }
inline I signed_by(I x, I s) { return {_mm256_sign_epi8(x.a, s.a), _mm256_sign_epi8(x.b, s.b)}; }
// Of each four integers, all at most 32,767 or taken for that, the first and third as words, then the others: 8 lanes.
inline void store_word_pairs(void* to, I x) {
  auto put = [to](int half, __m256i v) {
    const __m256i words = _mm256_min_epi32(v, _mm256_set1_epi32(32767));
    const __m256i upper = _mm256_slli_epi32(_mm256_srli_si256(words, 8), 16);
    const __m256i pairs = _mm256_blend_epi16(words, upper, 0xaa);
    const __m256i front = _mm256_permute4x64_epi64(pairs, 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(to) + half, _mm256_castsi256_si128(front));
  };
  put(0, x.a), put(1, x.b);
}
#endif
#elif defined(QUIRE_NEON)
// sum + the four products of bytes of each lane, both signed.
inline int32x4_t dot_signed(int32x4_t sum, int8x16_t a, int8x16_t b) {
#if defined(QUIRE_DOT)
  return vdotq_s32(sum, a, b);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
inline int8x16_t signed_of(int32x4_t q) { return vreinterpretq_s8_s32(q); }
QUIRE_EACH(I, dot_low_bytes, (I sum, I u, I s), dot_signed(sum.q[i], signed_of(u.q[i]), signed_of(s.q[i])))
#if defined(QUIRE_I8MM)
QUIRE_EACH(I, dot_bytes, (I sum, I u, I s), vusdotq_s32(sum.q[i], bytes_of(u.q[i]), signed_of(s.q[i])))
#else
// u s = (u - 128) s + 128 s; the compiler shares the latter between products with one s.
QUIRE_EACH(I, dot_minus_128, (I s), dot_signed(vdupq_n_s32(0), signed_of(s.q[i]), vdupq_n_s8(-128)))
inline I dot_bytes(I sum, I u, I s) { return dot_low_bytes(sum, u ^ iset1(int32_t(0x80808080u)), s) - dot_minus_128(s); }
#endif
#else
inline I dot_bytes(I sum, I u, I s) {
  return each([&](int i) {
    int32_t total = sum.v[i];
    for (int j = 0; j < 32; j += 8) total += int32_t(uint32_t(u.v[i]) >> j & 255u) * int8_t(uint32_t(s.v[i]) >> j);
    return total;
  });
}
#endif

#if !defined(QUIRE_WORD_DOTS) && !defined(QUIRE_NEON)
inline I dot_low_bytes(I sum, I u, I s) { return dot_bytes(sum, u, s); }  // bytes of u below 128
#endif

// Activations for dot_words: the first and third of four bytes as words, then the second and fourth.
inline void spread(const int8_t* q, int columns, uint32_t* to) {
  for (int k = 0; k < columns; k += 4) {
    const uint32_t first = uint16_t(q[k]), second = uint16_t(q[k + 1]);
    *to++ = first | uint32_t(uint16_t(q[k + 2])) << 16;
    *to++ = second | uint32_t(uint16_t(q[k + 3])) << 16;
  }
}

#if defined(QUIRE_WORD_DOTS)
constexpr int kDotElements = 2;  // elements of 4 bytes that four columns of activations take

// acc[r][p] += the products of a [kDotElements][R] with the four bytes of each lane.
template <int R, int P>
inline void add_dots(const uint32_t* a, const I (&w)[P], I (&acc)[R][P]) {
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    I words[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) words[p] = odd ? odd_bytes(w[p]) : even_bytes(w[p]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const I x = iset1(int32_t(a[odd * R + r]));
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = dot_words(acc[r][p], words[p], x);
    }
  }
}

// Sums of products of half bytes u with bytes s, at most kSmallDots of them between calls of `gather`: two products are
// at most 3,810, and eight times that fits in 16 bits.
struct SmallSum {
  I sum, words;
};
constexpr int kSmallDots = 8;
inline SmallSum small_sum(int32_t begin) { return {iset1(begin), iset1(0)}; }
inline SmallSum add_small(SmallSum sum, I u, I s) { return {sum.sum, dot_small(sum.words, u, s)}; }
inline SmallSum gather(SmallSum sum) { return {dot_words(sum.sum, sum.words, iset1(0x00010001)), iset1(0)}; }
inline I whole(SmallSum sum) { return sum.sum; }
#else
constexpr int kDotElements = 1;
template <int R, int P>
inline void add_dots(const uint32_t* a, const I (&w)[P], I (&acc)[R][P]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const I x = iset1(int32_t(a[r]));
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) acc[r][p] = dot_bytes(acc[r][p], w[p], x);
  }
}

using SmallSum = I;
constexpr int kSmallDots = 2;
inline SmallSum small_sum(int32_t begin) { return iset1(begin); }
inline SmallSum add_small(SmallSum sum, I u, I s) { return dot_low_bytes(sum, u, s); }
inline SmallSum gather(SmallSum sum) { return sum; }
inline I whole(SmallSum sum) { return sum; }
#endif

}  // namespace quire::QUIRE_ISA
