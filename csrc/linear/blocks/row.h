// The product of one row of activations in int8 with a panel of blocks: codes are multiplied as they are unpacked, and
// never stored. Knows unpacking and the sums of micro.h, whose order it keeps; knows no thread.
#pragma once

#include "linear/blocks/columns.h"
#include "linear/blocks/streams.h"
#include "simd/simd_dots.h"

namespace quire::QUIRE_ISA {

// A row of activations: [K / 4] words, one scale for every `scaled` columns, and what BlockArgs calls sums.
struct RoundedRow {
  const uint32_t* words;
  const float* scales;
  int scaled;
  const int32_t* sums;
};

// A destination of Unpack<kind>::block that multiplies each code by the activations of its columns.
template <BlockKind kind>
class MultipliedBlock {
 public:
  static constexpr CodeShape kShape = Unpack<kind>::shape;
  static constexpr int kGroups = shape_of(kind).columns / kShape.group;

  QUIRE_INLINE MultipliedBlock(const uint32_t* words, const int32_t* sums) : words_(words), sums_(sums) {
    for (int g = 0; g < kGroups; ++g) {
      total_[g] = iset1(kShape.minima || kSigned ? 0 : sums[g]);
      small_[g] = iset1(0);
      count_[g] = 0;
    }
  }

  QUIRE_INLINE void multiply(const PackedBlock& packed) { Unpack<kind>::block(packed, *this); }

  QUIRE_INLINE void scale(int g, V v) { scale_[g] = v; }
  QUIRE_INLINE void minimum(int g, V v) { minimum_[g] = v; }
  QUIRE_INLINE void codes(int column, I v) {
    const I x = iset1(int32_t(words_[column / 4]));
    const int g = column / kShape.group;
#if defined(QUIRE_WORD_DOTS)
    if constexpr (kSigned) {
      const I s = v ^ iset1(int32_t(0x80808080u));
      small_[g] = dot_small(small_[g], size_of_bytes(s), signed_by(x, s));
    } else {
      small_[g] = dot_small(small_[g], v, x);
    }
    if (++count_[g] % kRun == 0) {
      total_[g] = dot_words(total_[g], small_[g], iset1(0x00010001));
      small_[g] = iset1(0);
    }
#else
#if defined(QUIRE_VNNI)
    keep_order();
#endif
    total_[g] = kShape.top < 128 ? dot_low_bytes(total_[g], v, x) : dot_bytes(total_[g], v, x);
#endif
  }

  // part + the groups' sums, in order.
  QUIRE_INLINE V added_to(V part) const {
    for (int g = 0; g < kGroups; ++g) {
      part = fma(scale_[g], to_float(total_[g]), part);
      if constexpr (kShape.minima)
        part = fma(set1(reinterpret_cast<const float*>(sums_)[g]), minimum_[g], part);
    }
    return part;
  }

 private:
#if defined(QUIRE_WORD_DOTS)
  // Codes of a whole byte are 128 more than signed ones, whose products need no sum of the activations.
  static constexpr bool kSigned = kShape.top > 127;
  static_assert(!kSigned || (kShape.zero == 128 && !kShape.minima));
  static constexpr int kRun = small_run(kSigned ? 128 : kShape.top, kShape.group / 4);
#else
  static constexpr bool kSigned = false;
#endif

  const uint32_t* words_;
  const int32_t* sums_;
  V scale_[kGroups], minimum_[kShape.minima ? kGroups : 1];
  I total_[kGroups], small_[kGroups];
  int count_[kGroups];
};

template <BlockKind kind>
struct BlockOfRow {
  using type = MultipliedBlock<kind>;
};
#if defined(QUIRE_AVX2)
template <BlockKind kind>
  requires(kStreamed<kind>)
struct BlockOfRow<kind> {
  using type = StreamedBlock<kind>;
};
#endif

// The 16 outputs of a panel to c.
template <BlockKind kind>
void multiply_row(const char* panel, int columns, const RoundedRow& row, float* c) {
  using Block = typename BlockOfRow<kind>::type;
  constexpr BlockShape shape = shape_of(kind);
  const uint32_t* words = row.words;
  const float* scales = row.scales;
  const int32_t* sums = row.sums;
  V total = set1(0), part = set1(0);
  int open = 0;  // columns in `part`
  for_panel_blocks<kind>(panel, 0, columns, [&](const PackedBlock& packed, int k) QUIRE_INLINE_LAMBDA {
    Block block(words, sums);
    block.multiply(packed);
    part = block.added_to(part);
    words += shape.columns / 4, sums += Block::kGroups, open += shape.columns;
    if (open == row.scaled || k + shape.columns == columns)
      total = fma(set1(*scales++), part, total), part = set1(0), open = 0;
  });
  store(c, total);
}

using MultiplyRow = void(const char* panel, int columns, const RoundedRow& row, float* c);

// By kind (kernels/byte/block_rows.cpp); null: floats.
extern MultiplyRow* const kMultiplyRow[];

}  // namespace quire::QUIRE_ISA
