// Expands bfloat16 in 12 bits (compact.h) to the pairs of columns of the 16-bit layout, so that products of both
// layouts have the same bits. Knows panels; knows no product.
#pragma once

#include "linear/compact.h"
#include "simd/simd.h"
#include "simd/simd_int.h"

namespace quire::QUIRE_ISA {

// The columns of a step: [4] pairs of columns, in each lane the two of a row.
struct StepPairs {
  I pairs[kCompactPairs];
};

// The same in memory: [4] pairs of columns [16][2].
struct alignas(64) ExpandedStep {
  uint16_t pairs[kCompactPairs][32];
};

inline void store(ExpandedStep& to, const StepPairs& step) {
#pragma GCC unroll 4
  for (int i = 0; i < kCompactPairs; ++i) istore(to.pairs[i], step.pairs[i]);
}

// A panel's table in the form that `expand` reads.
#if defined(QUIRE_AVX512)
using StepTable = __m512i;
inline StepTable step_table(const char* table) {
  // With a mask: GCC 12 warns about the plain intrinsic (its bug 105593).
  return _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}
#elif defined(QUIRE_AVX2)
using StepTable = __m256i;
inline StepTable step_table(const char* table) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}
#elif defined(QUIRE_NEON)
using StepTable = uint8x16_t;
inline StepTable step_table(const char* table) { return load_quarter(table, 0); }
#else
using StepTable = const char*;
inline StepTable step_table(const char* table) { return table; }
#endif

// A step by its panel's table, without escapes.
QUIRE_INLINE StepPairs expand(const char* step, StepTable table) {
#if defined(QUIRE_AVX512)
  const __m512i codes = _mm512_loadu_si512(step), half_bytes = _mm512_set1_epi8(15);
  auto high = [&](__m512i places) { return _mm512_shuffle_epi8(table, _mm512_and_si512(places, half_bytes)); };
  const __m512i low_0 = _mm512_loadu_si512(step + 64), high_0 = high(codes);
  const __m512i low_1 = _mm512_loadu_si512(step + 128), high_1 = high(_mm512_srli_epi16(codes, 4));
  return {{{_mm512_unpacklo_epi8(low_0, high_0)},
           {_mm512_unpackhi_epi8(low_0, high_0)},
           {_mm512_unpacklo_epi8(low_1, high_1)},
           {_mm512_unpackhi_epi8(low_1, high_1)}}};
#elif defined(QUIRE_AVX2)
  StepPairs result;
  const __m256i half_bytes = _mm256_set1_epi8(15);
  auto load_bytes = [](const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
  for (int half = 0; half < 2; ++half)
    for (int side = 0; side < 2; ++side) {  // lanes 0 to 7, and 8 to 15
      const __m256i codes = load_bytes(step + 32 * side), low = load_bytes(step + 64 + 64 * half + 32 * side);
      const __m256i places = _mm256_and_si256(_mm256_srli_epi16(codes, 4 * half), half_bytes);
      const __m256i high = _mm256_shuffle_epi8(table, places);
      I *const first = result.pairs + 2 * half, *const second = first + 1;
      (side ? first->b : first->a) = _mm256_unpacklo_epi8(low, high);
      (side ? second->b : second->a) = _mm256_unpackhi_epi8(low, high);
    }
  return result;
#elif defined(QUIRE_NEON)
  StepPairs result;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const uint8x16_t codes = load_quarter(step, i), low_0 = load_quarter(step + 64, i), low_1 = load_quarter(step + 128, i);
    const uint8x16_t high_0 = vqtbl1q_u8(table, codes & 15), high_1 = vqtbl1q_u8(table, codes >> 4);
    result.pairs[0].q[i] = vreinterpretq_s32_u8(vzip1q_u8(low_0, high_0));
    result.pairs[1].q[i] = vreinterpretq_s32_u8(vzip2q_u8(low_0, high_0));
    result.pairs[2].q[i] = vreinterpretq_s32_u8(vzip1q_u8(low_1, high_1));
    result.pairs[3].q[i] = vreinterpretq_s32_u8(vzip2q_u8(low_1, high_1));
  }
  return result;
#else
  uint16_t pairs[kCompactPairs][32];
  for (int pair = 0; pair < kCompactPairs; ++pair)
    for (int element = 0; element < 32; ++element)
      pairs[pair][element] = compact_bits(step, table, 2 * pair + element % 2, element / 2);
  StepPairs result;
  for (int pair = 0; pair < kCompactPairs; ++pair) result.pairs[pair] = iload(pairs[pair]);
  return result;
#endif
}

// A panel's table and, in order, its escapes.
class CompactPanel {
 public:
  CompactPanel() = default;
  // `tail` points behind the steps of all `columns`; `step` is the first to expand.
  CompactPanel(const char* tail, int columns, int step) : tail_(tail), columns_(columns) {
    while (patched_step() < uint32_t(step)) ++next_;
  }

  const char* at() const { return tail_; }
  StepTable table() const { return step_table(tail_); }

  // The next step with escapes; huge if there is none.
  uint32_t patched_step() const { return compact_escape(tail_, columns_, next_).at / kCompactValues; }

  // Puts the escapes of step `step` in memory.
  void patch(uint32_t step, ExpandedStep& out) {
    for (; patched_step() == step; ++next_) {
      const Escape e = compact_escape(tail_, columns_, next_);
      out.pairs[e.at / 32 % kCompactPairs][e.at % 16 * 2 + e.at / 16 % 2] = uint16_t(e.bits);
    }
  }

  // The same for a step in registers.
  StepPairs patched(uint32_t step, StepPairs pairs) {
#if defined(QUIRE_AVX512)
    for (; patched_step() == step; ++next_) {
      const Escape e = compact_escape(tail_, columns_, next_);
      const __mmask32 element = __mmask32{1} << (e.at % 16 * 2 + e.at / 16 % 2);
#pragma GCC unroll 4
      for (uint32_t i = 0; i < kCompactPairs; ++i) {
        const __mmask32 here = e.at / 32 % kCompactPairs == i ? element : 0;
        pairs.pairs[i] = {_mm512_mask_set1_epi16(pairs.pairs[i].r, here, short(e.bits))};
      }
    }
#else
    ExpandedStep expanded;
    store(expanded, pairs);
    patch(step, expanded);
    for (int i = 0; i < kCompactPairs; ++i) pairs.pairs[i] = iload(expanded.pairs[i]);
#endif
    return pairs;
  }

 private:
  const char* tail_ = nullptr;
  int columns_ = 0, next_ = 0;
};

}  // namespace quire::QUIRE_ISA
