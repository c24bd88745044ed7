// The product of one row of activations in int8 with a block of a panel on AVX2, eight rows of the panel at a time: 16
// registers hold all sums that are open. Knows the places of codes in blocks (unpack.h); knows no panel.
#pragma once

#include "linear/blocks/unpack.h"
#include "simd/simd_dots.h"

namespace quire::QUIRE_ISA {

// Where a kind has its codes: kSets sets, each of whole groups. In a set kStreams streams run through columns, four at a
// time, for kSteps steps; each kStreams / kSums of them belong to one group. codes() gives the codes of one step.
template <BlockKind kind>
struct Streams {
  static constexpr int kSets = 0;
};

template <BlockKind kind>
constexpr bool kStreamed = Streams<kind>::kSets > 0;

#if defined(QUIRE_AVX2)

using Eight = __m256i;  // a word of each of eight rows

// Word i of a block's rows.
QUIRE_INLINE Eight word_at(const char* words, int i) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i * 64));
}
QUIRE_INLINE Eight masked(Eight v, int32_t mask) { return _mm256_and_si256(v, _mm256_set1_epi32(mask)); }
// Words shifted right, or left if `bits` is negative.
template <int bits>
QUIRE_INLINE Eight shifted(Eight v) {
  if constexpr (bits > 0) return _mm256_srli_epi32(v, bits);
  else if constexpr (bits < 0) return _mm256_slli_epi32(v, -bits);
  else return v;
}
template <int bits>
QUIRE_INLINE Eight nibbles(Eight v) {
  return masked(shifted<bits>(v), 0x0f0f0f0f);
}
template <int from, int to, int32_t mask>  // bits of each byte from bit `from` on, as bits from bit `to` on
QUIRE_INLINE Eight moved(Eight v) {
  return masked(shifted<from - to>(v), mask);
}
QUIRE_INLINE Eight joined(Eight a, Eight b) { return _mm256_or_si256(a, b); }

// Groups of 16 columns: a set is every second group of half a block.
struct HalvesOfSixteen {
  static constexpr int kSets = 4, kStreams = 4, kSums = 4, kSteps = 4;
  static constexpr int column(int set, int stream) { return set / 2 * 128 + set % 2 * 16 + stream * 32; }
};

template <>
struct Streams<BlockKind::q6_k> : HalvesOfSixteen {
  template <int set, int step>
  QUIRE_INLINE static void codes(const char* words, Eight (&to)[4]) {
    constexpr int half = set / 2, i = set % 2 * 4 + step;
    const Eight first = word_at(words, half * 16 + i), second = word_at(words, half * 16 + 8 + i);
    const Eight high = word_at(words, 32 + half * 8 + i);
    to[0] = joined(nibbles<0>(first), moved<0, 4, 0x30303030>(high));
    to[1] = joined(nibbles<0>(second), moved<2, 4, 0x30303030>(high));
    to[2] = joined(nibbles<4>(first), moved<4, 4, 0x30303030>(high));
    to[3] = joined(nibbles<4>(second), moved<6, 4, 0x30303030>(high));
  }
};

// Groups of 32 columns: a set is two, the low and the high half bytes of the same words.
struct PairsOfThirtyTwo {
  static constexpr int kSets = 4, kStreams = 2, kSums = 2, kSteps = 8;
  static constexpr int column(int set, int stream) { return set * 64 + stream * 32; }
};

template <>
struct Streams<BlockKind::q4_k> : PairsOfThirtyTwo {
  template <int set, int step>
  QUIRE_INLINE static void codes(const char* words, Eight (&to)[2]) {
    const Eight w = word_at(words, 4 + set * 8 + step);
    to[0] = nibbles<0>(w), to[1] = nibbles<4>(w);
  }
};

template <>
struct Streams<BlockKind::q5_k> : PairsOfThirtyTwo {
  template <int set, int step>
  QUIRE_INLINE static void codes(const char* words, Eight (&to)[2]) {
    const Eight high = word_at(words, 4 + step), w = word_at(words, 12 + set * 8 + step);
    to[0] = joined(nibbles<0>(w), moved<2 * set, 4, 0x10101010>(high));
    to[1] = joined(nibbles<4>(w), moved<2 * set + 1, 4, 0x10101010>(high));
  }
};

// As MultipliedBlock in row.h. Sums stay in registers until their groups are whole.
template <BlockKind kind>
class StreamedBlock {
 public:
  static constexpr CodeShape kShape = Unpack<kind>::shape;
  static constexpr int kGroups = shape_of(kind).columns / kShape.group;

  QUIRE_INLINE StreamedBlock(const uint32_t* words, const int32_t* sums) : words_(words), sums_(sums) {}

  QUIRE_INLINE void scale(int g, V v) { store(scale_[g], v); }
  QUIRE_INLINE void minimum(int g, V v) { store(minimum_[g], v); }

  QUIRE_INLINE void multiply(const PackedBlock& b) {
    Unpack<kind>::scales(b, *this);
    for (int half = 0; half < 2; ++half)
      unrolled<Codes::kSets>([&](auto s) QUIRE_INLINE_LAMBDA {
        multiply_set<s.value>(b, half);
        keep_order();
      });
  }

  QUIRE_INLINE V added_to(V part) const {
    for (int g = 0; g < kGroups; ++g) {
      part = fma(load(scale_[g]), to_float(iload(total_[g])), part);
      if constexpr (kShape.minima)
        part = fma(set1(reinterpret_cast<const float*>(sums_)[g]), load(minimum_[g]), part);
    }
    return part;
  }

 private:
  using Codes = Streams<kind>;
  static constexpr int kPerSum = Codes::kStreams / Codes::kSums;
  static_assert(kShape.group == kPerSum * Codes::kSteps * 4);
  static constexpr int kRun = small_run(kShape.top, kShape.group / 4);
  // Lines of a block, and those that each step prefetches: half the rows every second line.
  static constexpr int kLines = (shape_of(kind).bytes + 3) / 4, kAllSteps = 2 * Codes::kSets * Codes::kSteps;
  static constexpr int kAhead = (kLines + kAllSteps - 1) / kAllSteps;

  template <int set>
  QUIRE_INLINE void multiply_set(const PackedBlock& b, int half) {
    Eight small[Codes::kSums], total[Codes::kSums];
    unrolled<Codes::kSums>([&](auto sum) QUIRE_INLINE_LAMBDA {
      total[sum.value] = _mm256_set1_epi32(kShape.minima ? 0 : sums_[group<set, sum.value>()]);
    });
    unrolled<Codes::kSteps>([&](auto at) QUIRE_INLINE_LAMBDA {
      constexpr int step = at.value, line = (set * Codes::kSteps + step) * kAhead * 2;
#pragma GCC unroll 4
      for (int i = 0; i < kAhead; ++i)
        if (line + 2 * i < kLines) b.prefetch(b.words + (half + line + 2 * i) * 64);
      Eight codes[Codes::kStreams];
      Codes::template codes<set, step>(b.words + half * 32, codes);
      unrolled<Codes::kStreams>([&](auto each) QUIRE_INLINE_LAMBDA {
        constexpr int stream = each.value, sum = stream / kPerSum, product = step * kPerSum + stream % kPerSum;
        const Eight x = _mm256_set1_epi32(int32_t(words_[Codes::column(set, stream) / 4 + step]));
        small[sum] = product % kRun ? dot_small_half(small[sum], codes[stream], x)
                                    : _mm256_maddubs_epi16(codes[stream], x);
        if (product % kRun == kRun - 1)
          total[sum] = dot_words_half(total[sum], small[sum], _mm256_set1_epi32(0x00010001));
      });
    });
    unrolled<Codes::kSums>([&](auto sum) QUIRE_INLINE_LAMBDA {
      _mm256_store_si256(reinterpret_cast<__m256i*>(total_[group<set, sum.value>()] + half * 8), total[sum.value]);
    });
  }
  template <int set, int sum>
  static constexpr int group() {
    return Codes::column(set, sum * kPerSum) / kShape.group;
  }

  const uint32_t* words_;
  const int32_t* sums_;
  alignas(64) float scale_[kGroups][16], minimum_[kShape.minima ? kGroups : 1][16];
  alignas(64) int32_t total_[kGroups][16];
};
#endif

}  // namespace quire::QUIRE_ISA
