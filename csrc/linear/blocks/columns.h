// Columns of a panel of blocks, unpacked to codes or to floats. Knows panels; knows no product and no thread.
#pragma once

#include "linear/blocks/tables.h"
#include "linear/blocks/unpack_grids.h"
#include "linear/blocks/values.h"
#include "kernels/kernels.h"

namespace quire {

using UnpackCodes = void(const char* panel, int k, int columns, char* out);
using UnpackFloats = void(const char* panel, int k, int columns, float* out);
using UnpackValues = void(const BlockPanel& panel, int k, int columns, float* out);

// A kind whose sums are scaled, each of so many columns; 0: it is none.
struct SummedNumbers {
  int columns = 0;
  UnpackFloats* unpack = nullptr;
};

}  // namespace quire

// Compiled once for all groups of kernels that a set combines (kernels/float/block_columns.cpp).
namespace quire::QUIRE_FLOAT_ISA {

// By kind: unpack_codes, unpack_floats, and unpack_floats in groups; null for kinds that have none.
extern UnpackCodes* const kUnpackCodes[];
extern UnpackFloats* const kUnpackFloats[];
extern const SummedNumbers kSummedNumbers[];

// The values of columns [k, k + columns) of a panel: [columns][16], rounded as the formats' decoders round.
UnpackValues unpack_values;

}  // namespace quire::QUIRE_FLOAT_ISA

namespace quire::QUIRE_ISA {

using QUIRE_FLOAT_ISA::kSummedNumbers;
using QUIRE_FLOAT_ISA::kUnpackCodes;
using QUIRE_FLOAT_ISA::unpack_values;

constexpr int kChunkColumns = 256;  // unpacked at a time: a multiple of every block
constexpr size_t kChunkBytes = size_t(kChunkColumns / 16) * group_bytes(16);

// Calls f(block, its first column) for the blocks of columns [k, k + columns) of a panel; k is a multiple of kChunkColumns.
// If several adjacent panels are read together, blocks prefetch what is read after them.
template <BlockKind kind, class F>
QUIRE_INLINE void for_panel_blocks(const char* panel, int k, int columns, F&& f, size_t panel_bytes = 0, int panels = 1) {
  constexpr BlockShape shape = shape_of(kind);
  constexpr int per_unit = shape.per_unit();
  constexpr size_t head_bytes = 16 * size_t(shape.head_bytes), words_bytes = 64 * size_t(shape.words());
  constexpr size_t heads = head_bytes * size_t(per_unit), unit_bytes = size_t(shape.bytes) * 16 * size_t(per_unit);
  const char* unit = panel + 16 * row_bytes(kind) + size_t(k / (shape.columns * per_unit)) * unit_bytes;
  for (const int end = k + columns; k < end; unit += unit_bytes) {
    // What lies behind a panel is the next one, which is being read; what is read next lies behind the last.
    const bool last = panels > 1 && unit + bytes_ahead(kind) >= panel + panel_bytes;
    const ptrdiff_t ahead = bytes_ahead(kind) + (last ? ptrdiff_t(panel_bytes) * (panels - 1) : 0);
    for (int i = 0; i < per_unit; ++i, k += shape.columns) {
      const PackedBlock block{unit + head_bytes * size_t(i), unit + heads + words_bytes * size_t(i), panel, ahead,
                              prefetched_far(kind)};
      // Reading a word prefetches a word: without this, one line of each unit would come late.
      if (heads > 0 && i == 0) block.prefetch(unit);
      f(block, k);
    }
  }
}

// Codes of columns [k, k + columns) of a panel; k is a multiple of kChunkColumns.
template <BlockKind kind>
void unpack_codes(const char* panel, int k, int columns, char* out) {
  constexpr int group = Unpack<kind>::shape.group;
  for_panel_blocks<kind>(panel, k, columns, [&](const PackedBlock& block, int) QUIRE_INLINE_LAMBDA {
    Unpack<kind>::block(block, UnpackedBlock<group>{out});
    out += size_t(shape_of(kind).columns / group) * group_bytes(group);
  });
}

template <BlockKind kind>
constexpr CodeShape code_shape() {
  if constexpr (holds_floats(kind)) return {};
  else return Unpack<kind>::shape;
}

constexpr CodeShape kCodeShapes[] = {
#define QUIRE_CODES(name, columns, bytes, head, head_bytes) code_shape<BlockKind::name>(),
    QUIRE_BLOCK_KINDS(QUIRE_CODES)
#undef QUIRE_CODES
};

QUIRE_INLINE const CodeShape& codes_of(BlockKind kind) { return kCodeShapes[int(kind)]; }

// Values of columns [k, k + columns) of a panel whose kind has Values; k is a multiple of kChunkColumns. With `grouped`, its
// numbers by block: the scale [16], then those of each column [16].
template <BlockKind kind, bool grouped = false>
void unpack_floats(const char* panel, int k, int columns, float* out) {
  for_panel_blocks<kind>(panel, k, columns, [&](const PackedBlock& packed, int) QUIRE_INLINE_LAMBDA {
    const Values<kind> block(packed);
    constexpr int run = Values<kind>::kRun;
    if constexpr (grouped) store(out, block.scale), out += 16;
    for_runs<shape_of(kind).columns / run>([&](int r) QUIRE_INLINE_LAMBDA {
      block.run(r, [&](int j, V value) QUIRE_INLINE_LAMBDA {
        if constexpr (kNumbersOf<Values<kind>> && !grouped) value = value * block.scale;
        store(out + j * 16, value);
      });
      out += run * 16;
    });
  });
}

// Calls put(column, value) for each column of a row of a weight of blocks.
template <class Put>
QUIRE_INLINE void read_block_row(const MatrixView& w, int panel, int lane, Put&& put) {
  alignas(64) float values[kChunkColumns * 16];
  const BlockPanel from = Blocks::panel(w, panel);
  for (int k = 0; k < w.cols; k += kChunkColumns) {
    const int columns = min_of(kChunkColumns, w.padded_cols() - k);
    unpack_values(from, k, columns, values);
    for (int i = 0; i < min_of(columns, w.cols - k); ++i) put(k + i, values[i * 16 + lane]);
  }
}


}  // namespace quire::QUIRE_ISA
