// Products of blocks with float activations. Knows unpacked panels; knows no thread.
#pragma once

#include "linear/blocks/product.h"
#include "linear/blocks/value_row.h"

namespace quire::QUIRE_ISA {

// Float activations: panels become float32.
struct ExactBlocks {
  // The columns unpacked at a time for tiles of so many rows, and the bytes of a column: with a scale for each 64 columns.
  static int chunk(int) { return kChunkColumns; }
  static constexpr size_t kColumnBytes = 65;

  static constexpr int kRowPanels = kValuePanels;
  static constexpr bool kSparse = true;  // adds the sparse part of a weight

  float* packed;  // [tile][K][R]

  explicit ExactBlocks(const LinearArgs& a) : packed(static_cast<float*>(a.workspace)) {}
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

}  // namespace quire::QUIRE_ISA
