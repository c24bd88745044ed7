// Products with weights of blocks: a task unpacks a panel's columns once for all rows, then multiplies them from cache.
// Knows the packing and the pool; knows no plan.
//
// A struct of activations says how: exact_product.h (floats), pair_product.h (bfloat16) and rounded_product.h (int8).
#pragma once

#include "linear/blocks/columns.h"
#include "linear/blocks/table_product.h"
#include "linear/product.h"

namespace quire::QUIRE_ISA {

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
      if constexpr (Product::kSparse)
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
    if constexpr (Product::kSparse)
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

}  // namespace quire::QUIRE_ISA
