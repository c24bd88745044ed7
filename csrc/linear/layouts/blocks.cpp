#include "linear/layouts/blocks.h"

#include <cstring>
#include <stdexcept>

namespace quire {

void Blocks::check(const Format& format) {
  const BlockParts& blocks = format.blocks;
  if (blocks.count < 1 || blocks.count > BlockParts::kMost)
    throw std::invalid_argument("a weight of blocks needs one to four parts of different kinds");
  if (format.group != 0 || format.offsets || format.narrow || format.screened)
    throw std::invalid_argument("weights of blocks have no groups, offsets, scales in bfloat16 or screen");
  for (int i = 0; i < blocks.count; ++i)
    if (format.int8_rows && holds_floats(blocks.parts[i].kind))
      throw std::invalid_argument("weights of floats are not multiplied with activations in int8");
}

void Blocks::check_parts(const MatrixView& view) {
  const BlockParts& blocks = view.format.blocks;
  int64_t rows = 0;
  for (int i = 0; i < blocks.count; ++i) {
    const BlockParts::Part& part = blocks.parts[i];
    if (view.cols % shape_of(part.kind).columns != 0)
      throw std::invalid_argument("rows of a weight of blocks are not whole blocks");
    if (part.rows < 1 || geometry(part.kind, view.cols).padded_cols != view.geometry.padded_cols)
      throw std::invalid_argument("parts of a weight of blocks do not fit together");
    if (!view.gated && i + 1 < blocks.count && part.rows % 16 != 0)
      throw std::invalid_argument("parts of different kinds of blocks must have a multiple of 16 rows");
    rows += part.rows;
  }
  if (rows != view.rows || (view.gated && blocks.count > 1 && (blocks.count > 2 || blocks.parts[0].rows * 2 != view.rows)))
    throw std::invalid_argument("parts of a weight of blocks have another number of rows than the weight");
}

size_t Blocks::nbytes(const MatrixView& view) {
  const BlockParts& blocks = view.format.blocks;
  if (blocks.count == 1) return panel_bytes(blocks.parts[0].kind, view.cols) * size_t(view.panels());
  size_t bytes = 0;
  for (int i = 0; i < blocks.count; ++i)
    bytes += panel_bytes(blocks.parts[i].kind, view.cols) * size_t((blocks.parts[i].rows + 15) / 16);
  return bytes;
}

namespace {

constexpr int kTableColumns = 128;  // of a unit

void pack_tables(const char* const (&rows)[16], int cols, BlockKind kind, char* out) {
  const int bits = table_bits(kind), row_unit = kTableColumns / 8 * bits;
  for (int lane = 0; lane < 16; ++lane) {
    if (!rows[lane]) continue;
    std::memcpy(out + size_t(lane) * row_bytes(kind), rows[lane], row_bytes(kind));
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(rows[lane]) + row_bytes(kind);
    for (int column = 0; column < cols; ++column) {
      const int from = bits * column, at = column % kTableColumns;
      int code = codes[from / 8] >> (from % 8);
      if (from % 8 + bits > 8) code |= codes[from / 8 + 1] << (8 - from % 8);
      char* unit = out + 16 * row_bytes(kind) + size_t(column / kTableColumns * 16 + lane) * size_t(row_unit);
      for (int bit = 0; bit < bits; ++bit) {
        const int to = at / 16 * bits + bit;
        const int byte = bits == 4 ? at % 16 * 4 + to / 8 : to / 8 * 16 + at % 16;
        unit[byte] = char(unit[byte] | (code >> bit & 1) << (to % 8));
      }
    }
  }
}

}  // namespace

void Blocks::pack_panel(const char* const (&rows)[16], const MatrixView& view, BlockKind kind, char* out) {
  const BlockShape& shape = shape_of(kind);
  const int blocks = view.cols / shape.columns, per_unit = shape.per_unit(), words = shape.words();
  const size_t head_bytes = size_t(shape.head_bytes), unit_bytes = size_t(shape.bytes) * 16 * size_t(per_unit);
  std::memset(out, 0, panel_bytes(kind, view.cols));
  if (table_bits(kind)) return pack_tables(rows, view.cols, kind, out);
  for (int lane = 0; lane < 16; ++lane)
    for (int word = 0; rows[lane] && word < row_words(kind); ++word)
      std::memcpy(out + word * 64 + lane * 4, rows[lane] + word * 4, 4);
  out += 16 * row_bytes(kind);
  for (int block = 0; block < blocks; ++block) {
    const int place = block % per_unit;
    char* unit = out + unit_bytes * size_t(block / per_unit);
    char *heads = unit + 16 * head_bytes * size_t(place), *to = unit + 16 * head_bytes * size_t(per_unit);
    to += size_t(place) * size_t(words) * 64;
    for (int lane = 0; lane < 16; ++lane) {
      if (!rows[lane]) continue;
      const char* from = rows[lane] + row_bytes(kind) + size_t(block) * size_t(shape.bytes);
      std::memcpy(heads + size_t(lane) * head_bytes, from + shape.head, head_bytes);
      const char* before = shape.head == 0 ? from + head_bytes : from;  // a head is first or last
      for (int word = 0; word < words; ++word) std::memcpy(to + word * 64 + lane * 4, before + word * 4, 4);
    }
  }
}

}  // namespace quire
