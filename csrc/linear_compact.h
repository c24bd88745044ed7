// Weights of bfloat16 in 12 bits (compact.h), expanded to pairs of columns as they lie in 16 bits, so that products of
// the two layouts have the same bits. Knows panels; knows no product.
#pragma once

#include "compact.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// The columns of a step: [4] pairs of columns [16][2].
struct alignas(64) ExpandedStep {
  uint16_t pairs[kCompactPairs][32];
};

// A step by its panel's table, without escapes.
inline void expand(const char* step, const char* table, ExpandedStep& out) {
#if defined(QUIRE_AVX512)
  const __m512i codes = _mm512_loadu_si512(step), half_bytes = _mm512_set1_epi8(15);
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  auto half = [&](__m512i places, const char* low_bytes, uint16_t (*pairs)[32]) {
    const __m512i low = _mm512_loadu_si512(low_bytes);
    const __m512i high = _mm512_shuffle_epi8(bytes, _mm512_and_si512(places, half_bytes));
    _mm512_store_si512(pairs[0], _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(pairs[1], _mm512_unpackhi_epi8(low, high));
  };
  half(codes, step + 64, out.pairs);
  half(_mm512_srli_epi16(codes, 4), step + 128, out.pairs + 2);
#elif defined(QUIRE_AVX2)
  const __m256i half_bytes = _mm256_set1_epi8(15);
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  auto load_bytes = [](const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
  for (int lanes = 0; lanes < 64; lanes += 32) {
    const __m256i codes = load_bytes(step + lanes);
    auto half = [&](__m256i places, const char* low_bytes, uint16_t (*pairs)[32]) {
      const __m256i low = load_bytes(low_bytes + lanes);
      const __m256i high = _mm256_shuffle_epi8(bytes, _mm256_and_si256(places, half_bytes));
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs[0] + lanes / 2), _mm256_unpacklo_epi8(low, high));
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs[1] + lanes / 2), _mm256_unpackhi_epi8(low, high));
    };
    half(codes, step + 64, out.pairs);
    half(_mm256_srli_epi16(codes, 4), step + 128, out.pairs + 2);
  }
#else
  for (int pair = 0; pair < kCompactPairs; ++pair)
    for (int element = 0; element < 32; ++element)
      out.pairs[pair][element] = compact_bits(step, table, 2 * pair + element % 2, element / 2);
#endif
}

// A panel's table and, in order, its escapes.
class CompactPanel {
 public:
  CompactPanel() = default;
  // `tail`: behind the steps of all `columns`; `step`: the first that is expanded.
  CompactPanel(const char* tail, int columns, int step) : tail_(tail), columns_(columns) {
    while (patched_step() < uint32_t(step)) ++next_;
  }

  const char* table() const { return tail_; }

  // The first step that has escapes which were not put yet; huge where none has.
  uint32_t patched_step() const { return compact_escape(tail_, columns_, next_).at / kCompactValues; }

  // Puts what step `step` has of them.
  void patch(uint32_t step, ExpandedStep& out) {
    for (; patched_step() == step; ++next_) {
      const Escape e = compact_escape(tail_, columns_, next_);
      out.pairs[e.at / 32 % kCompactPairs][e.at % 16 * 2 + e.at / 16 % 2] = uint16_t(e.bits);
    }
  }

 private:
  const char* tail_ = nullptr;
  int columns_ = 0, next_ = 0;
};

}  // namespace quire::QUIRE_ISA
