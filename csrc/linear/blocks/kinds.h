// Kinds of blocks: rows of 32 to 256 columns with their own scales, as llama.cpp's types and the formats of other libraries
// have them. Knows the size of a block and the place of its fields; the kernels know their meaning (unpack.h for
// integer codes, values.h for codes that stand for floats).
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/memory.h"

namespace quire {

// X(name, columns of a block, bytes of a block, offset and bytes of its head). The head is the field without which the
// rest is whole words: a scale in float16, or an exponent of one byte.
#define QUIRE_BLOCK_KINDS(X)  \
  X(q4_0, 32, 18, 0, 2)       \
  X(q4_1, 32, 20, 0, 0)       \
  X(q5_0, 32, 22, 0, 2)       \
  X(q5_1, 32, 24, 0, 0)       \
  X(q8_0, 32, 34, 0, 2)       \
  X(q2_k, 256, 84, 0, 0)      \
  X(q3_k, 256, 110, 108, 2)   \
  X(q4_k, 256, 144, 0, 0)     \
  X(q5_k, 256, 176, 0, 0)     \
  X(q6_k, 256, 210, 208, 2)   \
  X(iq4_nl, 32, 18, 0, 2)     \
  X(iq4_xs, 256, 136, 0, 0)   \
  X(mxfp4, 32, 17, 0, 1)      \
  X(tq1_0, 256, 54, 52, 2)    \
  X(tq2_0, 256, 66, 64, 2)    \
  X(iq2_xxs, 256, 66, 0, 2)   \
  X(iq2_xs, 256, 74, 0, 2)    \
  X(iq2_s, 256, 82, 0, 2)     \
  X(iq3_xxs, 256, 98, 0, 2)   \
  X(iq3_s, 256, 110, 0, 2)    \
  X(iq1_s, 256, 50, 0, 2)     \
  X(iq1_m, 256, 56, 0, 0)     \
  X(int8_32, 32, 36, 0, 0)    \
  X(int8_128, 128, 132, 0, 0) \
  X(nvfp4, 64, 36, 0, 0)      \
  X(nvfp4_div, 64, 36, 0, 0)  \
  X(e4m3, 32, 32, 0, 0)       \
  X(e4m3_32, 32, 36, 0, 0)    \
  X(e4m3_128, 128, 132, 0, 0) \
  X(e5m2, 32, 32, 0, 0)       \
  X(e5m2_32, 32, 36, 0, 0)    \
  X(e5m2_128, 128, 132, 0, 0) \
  X(mxfp8, 32, 33, 0, 1)      \
  X(nf4, 64, 36, 0, 0)        \
  X(fp4, 64, 36, 0, 0)        \
  X(lut3, 32, 12, 0, 0)       \
  X(lut4, 32, 16, 0, 0)       \
  X(affine4_32, 32, 24, 0, 0) \
  X(affine4_64, 64, 40, 0, 0) \
  X(affine8_32, 32, 40, 0, 0) \
  X(affine8_128, 128, 136, 0, 0)

enum class BlockKind : uint8_t {
#define QUIRE_BLOCK_NAME(name, columns, bytes, head, head_bytes) name,
  QUIRE_BLOCK_KINDS(QUIRE_BLOCK_NAME)
#undef QUIRE_BLOCK_NAME
};

// Bits of a code into a table of its row; 0: codes of the kind are no such codes.
constexpr int table_bits(BlockKind kind) { return kind == BlockKind::lut3 ? 3 : kind == BlockKind::lut4 ? 4 : 0; }

struct BlockShape {
  const char* name;
  int columns, bytes, head, head_bytes;
  bool table;

  // The number of blocks of a row that lie together in a panel: their heads first, then their words. Those of tables lie
  // otherwise (layouts/blocks.h).
  constexpr int per_unit() const { return table ? 4 : columns == 32 ? 2 : 1; }
  constexpr int words() const { return (bytes - head_bytes) / 4; }
};

constexpr BlockShape kBlockShapes[] = {
#define QUIRE_BLOCK_SHAPE(name, columns, bytes, head, head_bytes) {#name, columns, bytes, head, head_bytes, table_bits(BlockKind::name) > 0},
    QUIRE_BLOCK_KINDS(QUIRE_BLOCK_SHAPE)
#undef QUIRE_BLOCK_SHAPE
};
constexpr int kBlockKinds = int(sizeof(kBlockShapes) / sizeof(kBlockShapes[0]));

QUIRE_INLINE constexpr const BlockShape& shape_of(BlockKind kind) { return kBlockShapes[int(kind)]; }

// Words of four bytes that a row has before its blocks: a scale of all its columns, or a table.
constexpr int row_words(BlockKind kind) {
  switch (kind) {
    case BlockKind::nvfp4:
    case BlockKind::nvfp4_div:
    case BlockKind::e4m3:
    case BlockKind::e5m2:
      return 1;
    default:
      return table_bits(kind) ? 1 << table_bits(kind) : 0;
  }
}
QUIRE_INLINE constexpr size_t row_bytes(BlockKind kind) { return size_t(row_words(kind)) * 4; }
// Bytes of a row of whole blocks as sources have it: its words, then its blocks.
inline size_t source_bytes(BlockKind kind, size_t cols) {
  return row_bytes(kind) + cols / size_t(shape_of(kind).columns) * size_t(shape_of(kind).bytes);
}

// Whether codes stand for floats, which integers cannot multiply.
constexpr bool holds_floats(BlockKind kind) { return int(kind) >= int(BlockKind::e4m3); }

// The kinds of a weight's parts, in order, each with its rows: equal ones that follow each other are one part.
struct BlockParts {
  static constexpr int kMost = 4;
  struct Part {
    BlockKind kind;
    int rows;
  };
  int count = 0;
  Part parts[kMost] = {};
};

}  // namespace quire
