// Kinds of blocks: the types of llama.cpp whose rows are blocks of 32 or 256 columns with scales of their own. Knows sizes
// and where a block's fields lie; the kernels know what they mean (block_unpack.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/memory.h"

namespace quire {

// X(name, columns of a block, bytes of a block, offset and bytes of its head). The head is the field that keeps the others
// from being whole words: a scale in float16, or an exponent of one byte.
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
  X(iq1_m, 256, 56, 0, 0)

enum class BlockKind : uint8_t {
#define QUIRE_BLOCK_NAME(name, columns, bytes, head, head_bytes) name,
  QUIRE_BLOCK_KINDS(QUIRE_BLOCK_NAME)
#undef QUIRE_BLOCK_NAME
};

struct BlockShape {
  const char* name;
  int columns, bytes, head, head_bytes;

  // Blocks of a row that lie together in a panel: their heads, then their words.
  constexpr int per_unit() const { return columns == 32 ? 2 : 1; }
  constexpr int words() const { return (bytes - head_bytes) / 4; }
};

constexpr BlockShape kBlockShapes[] = {
#define QUIRE_BLOCK_SHAPE(name, columns, bytes, head, head_bytes) {#name, columns, bytes, head, head_bytes},
    QUIRE_BLOCK_KINDS(QUIRE_BLOCK_SHAPE)
#undef QUIRE_BLOCK_SHAPE
};
constexpr int kBlockKinds = int(sizeof(kBlockShapes) / sizeof(kBlockShapes[0]));

QUIRE_INLINE constexpr const BlockShape& shape_of(BlockKind kind) { return kBlockShapes[int(kind)]; }

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
