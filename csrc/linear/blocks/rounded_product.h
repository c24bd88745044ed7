// Products of blocks with activations rounded to int8. Knows unpacked panels; knows no thread.
#pragma once

#include "linear/blocks/micro.h"
#include "linear/blocks/product.h"
#include "linear/blocks/row.h"

namespace quire::QUIRE_ISA {

// Activations rounded to int8 by blocks of columns.
struct RoundedBlocks {
  static int chunk(int) { return kChunkColumns; }
  static constexpr size_t kColumnBytes = kChunkBytes / kChunkColumns;

  uint32_t* words;         // [tile][K / 4][R]
  uint32_t* spread_words;  // [tile][K / 4][2][R], for codes multiplied in 16 bits
  float* scales;           // [tile][K / columns][R]
  int32_t* sums;           // [part][tile][K / group][R]
  int scaled;              // columns that share a scale
  bool spreads;

  // The largest block of a mixed weight: all its parts are multiplied with activations rounded in such blocks.
  static int scale_columns(const MatrixView& w) {
    int most = 0;
    for (int i = 0; i < w.format.blocks.count; ++i) most = max_of(most, shape_of(w.format.blocks.parts[i].kind).columns);
    return most;
  }
  static bool needs_words(const CodeShape& codes) { return kDotElements > 1 && codes.top > 127; }
  static size_t words_bytes(const MatrixView& w, int rows) {
    return round_up(size_t(rows) * size_t(w.padded_cols()), 64);
  }
  static size_t scales_bytes(const MatrixView& w, int rows) {
    return round_up(size_t(rows) * size_t(w.padded_cols()) / 8, 64);
  }
  static size_t workspace(const MatrixView& w, int rows) {
    const size_t sums = round_up(size_t(rows) * size_t(w.padded_cols()) / 4, 64);
    return words_bytes(w, rows) * (kDotElements > 1 ? 3 : 1) + scales_bytes(w, rows) +
           sums * size_t(w.format.blocks.count) + 128;
  }
  static Tiles tiles(int rows) { return {rows, kBlockTileRows}; }
  static int panels(int rows) { return block_panels(rows); }

  explicit RoundedBlocks(const LinearArgs& a) : scaled(scale_columns(a.weight)), spreads(false) {
    for (int i = 0; i < a.weight.format.blocks.count; ++i)
      spreads = spreads || needs_words(codes_of(a.weight.format.blocks.parts[i].kind));
    char* p = static_cast<char*>(a.workspace);
    words = reinterpret_cast<uint32_t*>(p), p += words_bytes(a.weight, a.rows);
    spread_words = reinterpret_cast<uint32_t*>(p), p += kDotElements > 1 ? 2 * words_bytes(a.weight, a.rows) : 0;
    scales = reinterpret_cast<float*>(p), p += scales_bytes(a.weight, a.rows);
    sums = reinterpret_cast<int32_t*>(p);
  }

  // The first sum of a tile from column k on, for a part of a weight.
  int32_t* sums_at(const MatrixView& w, int rows, int part, int begin, int count, int k) const {
    const int group = codes_of(w.format.blocks.parts[part].kind).group;
    const size_t of_part = round_up(size_t(rows) * size_t(w.padded_cols()) / 4, 64) / 4;
    return sums + size_t(part) * of_part + size_t(begin) * size_t(w.padded_cols() / group) +
           size_t(k / group) * size_t(count);
  }

  // `memory` is for R rows of int8.
  void pack(const LinearArgs& a, int begin, int end, void* memory) const {
    const MatrixView& w = a.weight;
    const int padded = w.padded_cols(), count = end - begin;
    int8_t* rounded = static_cast<int8_t*>(memory);
    for (int r = 0; r < count; ++r) {
      const float* x = a.x + size_t(begin + r) * a.x_stride;
      int8_t* q = rounded + size_t(r) * size_t(padded);
      float* scale = scales + size_t(begin) * size_t(padded / 32) + r;
      for (int k = 0; k < padded; k += scaled, scale += count) {
        const int present = max_of(0, min_of(min_of(scaled, padded - k), w.cols - k));
        const Int8Scale found = int8_scale(x + k, present);
        *scale = found.scale;
        round_to_int8(x + k, present, found.inverse, q + k);
        std::memset(q + k + present, 0, size_t(min_of(scaled, padded - k) - present));
      }
      for (int part = 0; part < w.format.blocks.count; ++part) note_sums(a, part, begin, count, r, q);
    }
    const size_t steps = size_t(padded / 4), offset = size_t(begin) * steps;
    transpose(reinterpret_cast<const uint32_t*>(rounded), steps, count, int(steps), words + offset, size_t(count));
    if (spreads) {
      uint32_t* row = reinterpret_cast<uint32_t*>(rounded + size_t(count) * size_t(padded));
      for (int r = 0; r < count; ++r) spread(rounded + size_t(r) * size_t(padded), padded, row + size_t(r) * steps * 2);
      transpose(row, steps * 2, count, int(steps * 2), spread_words + offset * 2, size_t(count));
    }
  }

  // Sums of row r of a tile by group, as the loops take them (BlockArgs).
  void note_sums(const LinearArgs& a, int part, int begin, int count, int r, const int8_t* q) const {
    const MatrixView& w = a.weight;
    const CodeShape& codes = codes_of(w.format.blocks.parts[part].kind);
    int32_t* to = sums_at(w, a.rows, part, begin, count, 0) + r;
    for (int k = 0; k < w.padded_cols(); k += codes.group, to += count) {
      int32_t sum = 0;
      for (int i = 0; i < codes.group; ++i) sum += q[k + i];
      const float minus = float(-sum);
      if (codes.minima) std::memcpy(to, &minus, 4);
      else *to = -codes.zero * sum;
    }
  }

  static constexpr int kRowPanels = 1;
  static constexpr bool kSparse = false;
  static bool takes_row(const MatrixView&) { return true; }
  void multiply_row(const MatrixView& w, const BlockPanel& panel, int, float* c) const {
    const RoundedRow row{words, scales, scaled, sums_at(w, 1, panel.part, 0, 1, 0)};
    kMultiplyRow[int(panel.kind)](panel.data, w.padded_cols(), row, c);
  }
  void unpack(const BlockPanel& panel, int k, int columns, char* out) const {
    kUnpackCodes[int(panel.kind)](panel.data, k, columns, out);
  }

  void multiply(const MatrixView& w, int all_rows, const BlockPanel& panel, int begin, int end, int k, int columns,
                const char* b, size_t panel_bytes, int panels, float* c, size_t c_stride) const {
    const CodeShape& codes = codes_of(panel.kind);
    const int rows = end - begin, padded = w.padded_cols();
    const size_t at = size_t(begin) * size_t(padded / 4) + size_t(k / 4) * size_t(rows);
    BlockArgs m{words + at, b, panel_bytes, columns / codes.group, codes.group / 4, 1,
                scaled / codes.group, codes.minima,
                scales + size_t(begin) * size_t(padded / 32) + size_t(k / scaled) * size_t(rows),
                sums_at(w, all_rows, panel.part, begin, rows, k), c, c_stride};
#if defined(QUIRE_WORD_DOTS)
    if (needs_words(codes)) {
      m.a = spread_words + 2 * at;
      return block_micro<WideCodes>(rows, panels)(m);
    }
    while (m.run < m.steps && 2 * m.run * 2 * codes.top * 127 <= 32767) m.run *= 2;
    block_micro<SmallCodes>(rows, panels)(m);
#else
    block_micro<WideCodes>(rows, panels)(m);
#endif
  }
};

}  // namespace quire::QUIRE_ISA
