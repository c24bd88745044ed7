// blocks: rows of blocks (linear/blocks/kinds.h). A panel begins with the words of its rows: [words][16] of four bytes. A unit of it
// is one block of each row, or two if they are small: heads [16] of the blocks, then their words [words][16]. Parts of a
// weight may be of different kinds; a panel has one.
//
// Kinds with a table in each row lie row by row instead, because the CPU looks up 16 codes in one table at once: a panel
// begins with the tables [16][entries]; a unit is 128 columns of each row [16], 16 lanes of eight codes. Code j of lane l
// is column 16 j + l. Codes of three bits are in three planes of a byte per lane.
#pragma once

#include "linear/format.h"

namespace quire {

// One panel of a weight of blocks.
struct BlockPanel {
  BlockKind kind;
  int part;  // in Format::blocks
  const char* data;
};

struct Blocks {
  static constexpr Holds kHolds = Holds::blocks;

  static void check(const Format& format);
  // Throws std::invalid_argument if the parts do not add up to the weight's rows, or the columns are not whole blocks.
  static void check_parts(const MatrixView& view);
  // The geometry of the first part: all have as many columns.
  static Geometry geometry(const Format& format, int cols) { return geometry(format.blocks.parts[0].kind, cols); }
  static Geometry geometry(BlockKind kind, int cols) {
    const BlockShape& shape = shape_of(kind);
    const int columns = shape.columns * shape.per_unit(), units = (cols + columns - 1) / columns;
    const size_t unit = size_t(shape.bytes) * 16 * size_t(shape.per_unit());
    const size_t bytes = 16 * row_bytes(kind) + unit * size_t(units);
    return {units * columns, columns, unit, bytes, (bytes + 63) / 64 * 64 - bytes};
  }
  QUIRE_INLINE static size_t panel_bytes(BlockKind kind, int cols) {
    const Geometry g = geometry(kind, cols);
    return g.columns_bytes + g.tail_bytes;
  }
  static size_t nbytes(const MatrixView& view);
  // Places rows of blocks (null: padding) in a panel, byte for byte.
  static void pack_panel(const char* const (&rows)[16], const MatrixView& view, BlockKind kind, char* out);

  QUIRE_INLINE static BlockPanel panel(const MatrixView& w, int index) {
    const BlockParts& parts = w.format.blocks;
    if (parts.count == 1)
      return {parts.parts[0].kind, 0, w.data + panel_bytes(parts.parts[0].kind, w.cols) * size_t(index)};
    if (w.gated) {
      const size_t gate = panel_bytes(parts.parts[0].kind, w.cols), up = panel_bytes(parts.parts[1].kind, w.cols);
      const int odd = index % 2;
      return {parts.parts[odd].kind, odd, w.data + (gate + up) * size_t(index / 2) + (odd ? gate : 0)};
    }
    const char* data = w.data;
    int part = 0;
    for (; index >= parts.parts[part].rows / 16 && part + 1 < parts.count; ++part) {
      data += panel_bytes(parts.parts[part].kind, w.cols) * size_t(parts.parts[part].rows / 16);
      index -= parts.parts[part].rows / 16;
    }
    return {parts.parts[part].kind, part, data + panel_bytes(parts.parts[part].kind, w.cols) * size_t(index)};
  }
};

}  // namespace quire
