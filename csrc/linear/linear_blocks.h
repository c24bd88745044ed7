// Products with weights of blocks: a task unpacks a panel's columns once for all rows, then multiplies them from cache,
// by float activations or activations rounded to int8. Knows the packing and the pool; knows no plan.
#pragma once

#include "linear/block_micro.h"
#include "linear/block_pairs.h"
#include "linear/block_row.h"
#include "linear/block_value_row.h"
#include "linear/linear.h"
#include "linear/linear_tables.h"

namespace quire::QUIRE_ISA {

// Float activations: panels become float32.
struct ExactBlocks {
  // The columns unpacked at a time for tiles of so many rows, and the bytes of a column: with a scale for each 64 columns.
  static int chunk(int) { return kChunkColumns; }
  static constexpr size_t kColumnBytes = 65;

  static constexpr int kRowPanels = kValuePanels;

  float* packed;  // [tile][K][R]

  explicit ExactBlocks(const LinearArgs& a) : packed(static_cast<float*>(a.workspace)) {}
  static size_t workspace(const MatrixView& w, int rows) { return size_t(rows) * size_t(w.padded_cols()) * 4 + 128; }
  static Tiles tiles(int rows) { return tiles_for<DotF32>(rows); }
  static int panels(int rows) { return max_panels(rows); }

  void pack(const LinearArgs& a, int begin, int end, void*) const {
    pack_block<false>(a.x + size_t(begin) * a.x_stride, a.x_stride, end - begin, a.weight.cols, a.weight.padded_cols(),
                      packed + size_t(begin) * size_t(a.weight.padded_cols()));
  }
  // Whether multiply_row has loops for all kinds of a weight.
  static bool takes_row(const MatrixView& w) {
    for (int i = 0; i < w.format.blocks.count; ++i)
      if (!kMultiplyValues[int(w.format.blocks.parts[i].kind)][0]) return false;
    return true;
  }
  // The outputs of the only row and 1, 2 or 4 panels of a kind, without a place for their values.
  void multiply_row(const MatrixView& w, const BlockPanel& panel, int panels, float* c) const {
    kMultiplyValues[int(panel.kind)][panels / 2](panel.data, w.padded_cols(), packed, c);
  }
  void unpack(const BlockPanel& panel, int k, int columns, char* out) const {
    float* floats = reinterpret_cast<float*>(out);
    if (UnpackFloats* numbers = kSummedNumbers[int(panel.kind)].unpack) numbers(panel.data, k, columns, floats);
    else unpack_values(panel, k, columns, floats);
  }
  // Rows [begin, end) times panels whose columns [k, k + columns) were unpacked to b.
  void multiply(const MatrixView& w, int, const BlockPanel& panel, int begin, int end, int k, int columns, const char* b,
                size_t panel_bytes, int panels, float* c, size_t c_stride) const {
    const int rows = end - begin;
    const float* a = packed + size_t(begin) * size_t(w.padded_cols()) + size_t(k) * size_t(rows);
    const size_t bytes = panels < max_panels(rows) && rows > kExactRows ? 0 : panel_bytes;
    MicroArgs m{a, b, bytes, columns, c, c_stride, true, 0};
    m.group = kSummedNumbers[int(panel.kind)].columns;
    if (m.group > 0) micro_for<DotSummed, Prefetch::weights>(rows, panels)(m);
    else micro_for<DotF32, Prefetch::weights>(rows, panels)(m);
  }
};

#if defined(QUIRE_BF16_DOT)
// Activations rounded to bfloat16.
struct PairBlocks {
  static int chunk(int) { return kChunkColumns; }
  static constexpr size_t kColumnBytes = pair_group_bytes(16) / 16;
  static constexpr int kRowPanels = 1;

  uint32_t* packed;  // [tile][K / 2][R], crossed

  explicit PairBlocks(const LinearArgs& a) : packed(static_cast<uint32_t*>(a.workspace)) {}
  static Tiles tiles(int rows) { return {rows, kBlockTileRows}; }
  static int panels(int rows) { return block_panels(rows); }

  void pack(const LinearArgs& a, int begin, int end, void*) const {
    pack_block<true>(a.x + size_t(begin) * a.x_stride, a.x_stride, end - begin, a.weight.cols, a.weight.padded_cols(),
                     packed + size_t(begin) * size_t(a.weight.padded_cols() / 2));
  }
  static bool takes_row(const MatrixView&) { return true; }
  void multiply_row(const MatrixView& w, const BlockPanel& panel, int, float* c) const {
    kPairKernels[int(panel.kind)].multiply(panel.data, w.padded_cols(), packed, c);
  }
  void unpack(const BlockPanel& panel, int k, int columns, char* out) const {
    kPairKernels[int(panel.kind)].unpack(panel.data, k, columns, out);
  }
  void multiply(const MatrixView& w, int, const BlockPanel& panel, int begin, int end, int k, int columns, const char* b,
                size_t panel_bytes, int panels, float* c, size_t c_stride) const {
    const int rows = end - begin, group = kPairKernels[int(panel.kind)].group;
    const size_t at = size_t(begin) * size_t(w.padded_cols() / 2) + size_t(k / 2) * size_t(rows);
    pair_micro(rows, panels)({packed + at, b, panel_bytes, columns / group, group / 2, c, c_stride});
  }
};
#endif

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

// Finds panels [first, first + most) of one part: how many of them from the first on, a power of two.
inline int panels_alike(const MatrixView& w, int first, int most, BlockPanel* panels) {
  int width = 0;
  for (; width < most; ++width) {
    panels[width] = Blocks::panel(w, first + width);
    if (panels[width].part != panels[0].part) break;
  }
  while (width & (width - 1)) --width;
  return width;
}

// Panels [first, last) times tiles [tile0, tile1).
template <class Product>
inline void multiply_block_panels(const LinearArgs& a, const Product& product, const Tiles& tiles, int tile0, int tile1,
                                  int first, int last, void* scratch) {
  const MatrixView& w = a.weight;
  const int row0 = tiles.begin(tile0), rows = tiles.begin(tile1) - row0;
  const int tile_rows = tiles.begin(tile0 + 1) - row0, chunk = Product::chunk(tile_rows);
  const int most = Product::panels(tile_rows), group = max_of(most, w.gated ? 2 : 1);
  const size_t c_stride = size_t(group + most - 1) * 16;  // room for copies that a loop writes behind its last panel
  char* unpacked = static_cast<char*>(scratch);
  const size_t unpacked_bytes = Product::kColumnBytes * size_t(chunk);  // of a panel
  float* c = reinterpret_cast<float*>(unpacked + unpacked_bytes * size_t(most));
  for (int panel = first; panel < last; panel += group) {
    const int count = min_of(group, last - panel);
    for (int done = 0, width; done < count; done += width) {
      BlockPanel panels[8];
      width = panels_alike(w, panel + done, min_of(most, count - done), panels);
      for (int r = 0; r < rows; ++r) std::memset(c + size_t(r) * c_stride + done * 16, 0, size_t(width) * 64);
      for (int k = 0; k < w.padded_cols(); k += chunk) {
        const int columns = min_of(chunk, w.padded_cols() - k);
        for (int p = 0; p < width; ++p) product.unpack(panels[p], k, columns, unpacked + unpacked_bytes * size_t(p));
        for (int tile = tile0; tile < tile1; ++tile) {
          const int begin = tiles.begin(tile), end = tiles.begin(tile + 1);
          product.multiply(w, a.rows, panels[0], begin, end, k, columns, unpacked, unpacked_bytes,
                           width, c + size_t(begin - row0) * c_stride + done * 16, c_stride);
        }
      }
    }
    for (int tile = tile0; tile < tile1; ++tile) {
      const int begin = tiles.begin(tile), end = tiles.begin(tile + 1);
      float* sums = c + size_t(begin - row0) * c_stride;
      if constexpr (std::is_same_v<Product, ExactBlocks>)
        add_sparse(w, panel, count, end - begin, product.packed + size_t(begin) * size_t(w.padded_cols()), 1,
                   size_t(end - begin), sums, c_stride);
      epilogue<DotF32>(a, sums, c_stride, begin, end - begin, panel, count);
    }
  }
}

// Panels [first, last) times the only row.
template <class Product>
inline void multiply_row_panels(const LinearArgs& a, const Product& product, int first, int last) {
  const MatrixView& w = a.weight;
  constexpr int most = Product::kRowPanels;
  const int group = max_of(most, w.gated ? 2 : 1);
  alignas(64) float c[max_of(most, 2) * 16];
  for (int panel = first; panel < last; panel += group) {
    const int count = min_of(group, last - panel);
    for (int done = 0, width; done < count; done += width) {
      BlockPanel panels[most];
      width = panels_alike(w, panel + done, min_of(most, count - done), panels);
      product.multiply_row(w, panels[0], width, c + done * 16);
    }
    if constexpr (std::is_same_v<Product, ExactBlocks>)
      add_sparse(w, panel, count, 1, product.packed, 0, 1, c, size_t(group) * 16);
    epilogue<DotF32>(a, c, size_t(group) * 16, 0, 1, panel, count);
  }
}

// A product with weights of blocks, for make_products.
template <class Activations>
struct BlockProduct {
  LinearArgs a;
  Activations activations;
  Tiles tiles;

  explicit BlockProduct(const LinearArgs& args) : a(args), activations(a), tiles(Activations::tiles(a.rows)) {}

  bool in_place() const { return false; }
  void pack(int tile, void* scratch) const {
    const int begin = tiles.begin(tile), end = tiles.begin(tile + 1);
    float* memory = static_cast<float*>(scratch);
    float* rounded = memory + size_t(end - begin) * size_t(a.weight.cols);
    activations.pack(normed(a, begin, end, memory), begin, end, rounded);
  }
  int group() const { return max_of(2, Activations::panels(tiles.begin(1))); }
  void stream(int first, int last, void* scratch) const {
    if (a.rows == 1 && Activations::takes_row(a.weight)) multiply_row_panels(a, activations, first, last);
    else multiply_block_panels(a, activations, tiles, 0, 1, first, last, scratch);
  }
  void multiply(ThreadPool& pool) const {
    for_blocks(a, tiles, group(), pool, [&](int tile0, int tile1, int first, int last, int thread) {
      multiply_block_panels(a, activations, tiles, tile0, tile1, first, last, pool.scratch(thread));
    });
  }
};

// The products of a weight of blocks with float activations.
inline Linear* block_product(const MatrixView& w) {
  if (has_tables(w)) return make_products<TableProduct>;
#if defined(QUIRE_BF16_DOT)
  if (has_pairs(w)) return make_products<BlockProduct<PairBlocks>>;
#endif
  return make_products<BlockProduct<ExactBlocks>>;
}

inline void make_block_products(const LinearArgs* args, int count, ThreadPool& pool) {
  for (int first = 0, next; first < count; first = next) {
    Linear* product = block_product(args[first].weight);
    for (next = first + 1; next < count && block_product(args[next].weight) == product;) ++next;
    product(args + first, next - first, pool);
  }
}

}  // namespace quire::QUIRE_ISA
