// Products with weights whose rows have tables (tables.h). Knows the packing and the pool; knows no plan.
#pragma once

#include "linear/blocks/tables.h"
#include "linear/product.h"

namespace quire::QUIRE_ISA {

// Whether all kinds of a weight have tables.
inline bool has_tables(const MatrixView& w) {
  for (int i = 0; i < w.format.blocks.count; ++i)
    if (!table_bits(w.format.blocks.parts[i].kind)) return false;
  return true;
}

// Adds the products of rows x with the sparse parts of some panels to c, each output's in the order of its entries. The
// distances of x are from row to row and from column to column.
inline void add_sparse(const MatrixView& w, int panel, int panels, int rows, const float* x, size_t row_stride,
                       size_t column_stride, float* c, size_t c_stride) {
  if (w.format.nonzeros == 0) return;
  const int32_t* starts = w.sparse_starts() + panel * 16;
  for (int output = 0; output < panels * 16; ++output)
    for (int32_t j = starts[output]; j < starts[output + 1]; ++j) {
      const SparseEntry entry = w.sparse_entries()[j];
      const float* column = x + size_t(entry.column) * column_stride;
      for (int r = 0; r < rows; ++r) {
        float* to = c + size_t(r) * c_stride + output;
        *to = __builtin_fmaf(entry.value, column[size_t(r) * row_stride], *to);
      }
    }
}

// For make_products; activations stay float32.
struct TableProduct {
  LinearArgs a;
  Tiles tiles;
  float* packed;  // [row][K]

  explicit TableProduct(const LinearArgs& args)
      : a(args), tiles(a.rows, kLaneTileRows), packed(static_cast<float*>(a.workspace)) {}

  bool in_place() const { return false; }
  void pack(int tile, void* scratch) const {
    const int begin = tiles.begin(tile), end = tiles.begin(tile + 1);
    const LinearArgs rows = normed(a, begin, end, static_cast<float*>(scratch));
    const size_t padded = size_t(a.weight.padded_cols()), cols = size_t(a.weight.cols);
    for (int r = begin; r < end; ++r) {
      float* to = packed + size_t(r) * padded;
      std::memcpy(to, rows.x + size_t(r) * rows.x_stride, cols * 4);
      std::memset(to + cols, 0, (padded - cols) * 4);
    }
  }
  int group() const { return 2; }
  void stream(int first, int last, void* scratch) const { multiply_panels(0, 1, first, last, scratch); }
  void multiply(ThreadPool& pool) const {
    for_blocks(a, tiles, 2, pool, [&](int tile0, int tile1, int first, int last, int thread) {
      multiply_panels(tile0, tile1, first, last, pool.scratch(thread));
    });
  }

 private:
  // Panels [first, last) times tiles [tile0, tile1).
  void multiply_panels(int tile0, int tile1, int first, int last, void* scratch) const {
    const MatrixView& w = a.weight;
    const int row0 = tiles.begin(tile0), rows = tiles.begin(tile1) - row0, group = w.gated ? 2 : 1;
    float* values = static_cast<float*>(scratch);
    float* sums = values + 16 * kTableChunk;
    float* c = sums + size_t(rows) * 256;
    for (int panel = first; panel < last; panel += group) {
      for (int p = 0; p < group; ++p) {
        const BlockPanel from = Blocks::panel(w, panel + p);
        if (a.rows == 1) multiply_row(from, c + p * 16);
        else multiply_rows(from, tile0, tile1, values, sums, c + p * 16, size_t(group) * 16);
      }
      const size_t padded = size_t(w.padded_cols());
      add_sparse(w, panel, group, rows, packed + size_t(row0) * padded, padded, 1, c, size_t(group) * 16);
      epilogue<DotF32>(a, c, size_t(group) * 16, row0, rows, panel, group);
    }
  }
  void multiply_row(const BlockPanel& panel, float* c) const {
    const int padded = a.weight.padded_cols();
    if (table_bits(panel.kind) == 3) multiply_tables<3>(panel.data, padded, packed, c);
    else multiply_tables<4>(panel.data, padded, packed, c);
  }
  void multiply_rows(const BlockPanel& panel, int tile0, int tile1, float* values, float* sums, float* c,
                     size_t c_stride) const {
    const int row0 = tiles.begin(tile0), rows = tiles.begin(tile1) - row0, padded = a.weight.padded_cols();
    std::memset(sums, 0, size_t(rows) * 256 * 4);
    for (int k = 0; k < padded; k += kTableChunk) {
      const int columns = min_of(kTableChunk, padded - k);
      (table_bits(panel.kind) == 3 ? unpack_table_rows<3> : unpack_table_rows<4>)(panel.data, k, columns, values);
      for (int tile = tile0; tile < tile1; ++tile) {
        const int begin = tiles.begin(tile), count = tiles.begin(tile + 1) - begin;
        lane_adder(count)(packed + size_t(begin) * size_t(padded) + k, size_t(padded), values, columns,
                          sums + size_t(begin - row0) * 256);
      }
    }
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < 16; ++i) c[size_t(r) * c_stride + size_t(i)] = reduce_add(load(sums + (size_t(r) * 16 + size_t(i)) * 16));
  }
};

}  // namespace quire::QUIRE_ISA
