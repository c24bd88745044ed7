// Products of blocks with activations rounded to bfloat16. Knows unpacked panels; knows no thread.
#pragma once

#include "linear/blocks/pairs.h"
#include "linear/blocks/product.h"

namespace quire::QUIRE_ISA {

// Activations rounded to bfloat16.
struct PairBlocks {
  static int chunk(int) { return kChunkColumns; }
  static constexpr size_t kColumnBytes = pair_group_bytes(16) / 16;
  static constexpr int kRowPanels = 1;
  static constexpr bool kSparse = false;

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

}  // namespace quire::QUIRE_ISA
