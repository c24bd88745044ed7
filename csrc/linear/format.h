// The format of a packed weight: its layout, the layout's parameters, and its shape. Knows sizes; knows no kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/blocks/kinds.h"
#include "plan/memory.h"

namespace quire {

// The registry of layouts: X(name, traits). The traits struct of each lies in linear/layouts/NAME.h; layouts.h includes
// them all and calls the right one.
#define QUIRE_LAYOUTS(X)  \
  X(float32, Float32)     \
  X(float16, Float16)     \
  X(bfloat16, Bfloat16)   \
  X(bfloat16_12, Bfloat16In12) \
  X(int8, Int8)           \
  X(int4, Int4)           \
  X(blocks, Blocks)

enum class Layout : int {
#define QUIRE_LAYOUT_NAME(name, Traits) name,
  QUIRE_LAYOUTS(QUIRE_LAYOUT_NAME)
#undef QUIRE_LAYOUT_NAME
};

// The kind of elements that a layout holds.
enum class Holds { floats, codes, blocks };

enum class RoundedNumber : int { none, int8, e4m3, e2m1 };
enum class RoundedScale : int { float32, powers, e8m0, e4m3, fixed };

// How activations are rounded before they are multiplied (Rounding in weights/activations.py).
struct InputRounding {
  RoundedNumber number = RoundedNumber::none;
  RoundedScale scales = RoundedScale::float32;
  int columns = 0;  // that share a scale; 0: the whole row
  float outer = 1, most = 0;
  int zero = 0;
  bool asymmetric = false;

  QUIRE_INLINE bool present() const { return number != RoundedNumber::none; }
};

// A layout, its parameters, and the type of the activations that it is multiplied with.
struct Format {
  Layout layout = Layout::float32;
  int group = 0;           // int4: columns of a row that share a scale: 32, 64 or 128
  bool offsets = false;    // int4: values are scale * code - offset, else scale * (code - 8)
  bool narrow = false;     // int4: scales are bfloat16, and an offset is held as its zero point, offset / scale
  bool int8_rows = false;  // codes: activations are rounded to int8, one scale per row; blocks: one per block of columns
  bool inputs = false;     // codes and blocks: columns have an order of their own, and inputs are multiplied first
  bool screened = false;   // float layouts: a screen lies behind the panels; int8: this is a screen
  BlockParts blocks;       // blocks: their kinds
  int nonzeros = 0;        // blocks of floats: entries of a sparse part (sparse.h)
  InputRounding rounding;  // of activations; with int8_rows it has one scale for all, which rows take
};

struct SparseEntry {
  int32_t column;
  float value;
};

// The place of a panel's columns: units of equal size one after the other, then a tail. The last unit may be shorter.
struct Geometry {
  int padded_cols = 0;  // columns of a panel, zero padded
  int unit = 1;         // columns of a unit: a panel can be cut at multiples of it
  size_t unit_bytes = 0;
  size_t columns_bytes = 0;  // of all columns
  size_t tail_bytes = 0;     // behind them
};

// A packed weight [O, K]: panels of 16 rows, each contiguous, zero padded in O and in K. The layout says how the
// columns of a panel lie. In a gated weight the panels alternate: 16 rows of the gate, the same 16 rows of the up
// projection, ...
struct MatrixView {
  const char* data = nullptr;
  int rows = 0, cols = 0;  // O (of a gated weight: 2 I) and K
  Format format;
  bool gated = false;
  Geometry geometry;
  size_t panels_bytes = 0;  // of all panels

  QUIRE_INLINE int padded_cols() const { return geometry.padded_cols; }
  QUIRE_INLINE int unit() const { return geometry.unit; }
  // Bytes of a panel's columns [0, k), k a multiple of unit().
  QUIRE_INLINE size_t offset(int k) const { return size_t(k / geometry.unit) * geometry.unit_bytes; }
  QUIRE_INLINE size_t tail_bytes() const { return geometry.tail_bytes; }
  QUIRE_INLINE size_t panel_bytes() const { return geometry.columns_bytes + geometry.tail_bytes; }
  QUIRE_INLINE int panels() const { return gated ? 2 * ((rows / 2 + 15) / 16) : (rows + 15) / 16; }
  QUIRE_INLINE const char* panel(int index) const { return data + panel_bytes() * size_t(index); }
  QUIRE_INLINE const char* tail(int index) const { return panel(index) + geometry.columns_bytes; }
  // The screen: a copy rounded to int8 that follows the panels (screened_argmax.h).
  QUIRE_INLINE bool has_screen() const { return format.screened && format.layout != Layout::int8; }
  MatrixView screen() const;
  // With `inputs`, behind the panels: the input that each column multiplies, and the factor that it is multiplied with.
  QUIRE_INLINE size_t inputs_bytes() const { return format.inputs ? size_t(cols + 15) / 16 * 128 : 0; }
  QUIRE_INLINE const int32_t* order() const { return reinterpret_cast<const int32_t*>(data + panels_bytes); }
  QUIRE_INLINE const float* factors() const {
    return reinterpret_cast<const float*>(order() + (cols + 15) / 16 * 16);
  }
  // The sparse part is behind the inputs: the first entry of each packed row, and the end of the last; then the entries.
  QUIRE_INLINE size_t sparse_starts_bytes() const { return (size_t(panels()) * 64 + 4 + 63) / 64 * 64; }
  QUIRE_INLINE size_t sparse_bytes() const {
    return format.nonzeros > 0 ? sparse_starts_bytes() + (size_t(format.nonzeros) * sizeof(SparseEntry) + 63) / 64 * 64 : 0;
  }
  QUIRE_INLINE const int32_t* sparse_starts() const {
    return reinterpret_cast<const int32_t*>(data + panels_bytes + inputs_bytes());
  }
  QUIRE_INLINE const SparseEntry* sparse_entries() const {
    return reinterpret_cast<const SparseEntry*>(data + panels_bytes + inputs_bytes() + sparse_starts_bytes());
  }
  // Includes the screen, the inputs and the sparse part.
  size_t nbytes() const;
};

// Throws std::invalid_argument if a format has parameters that its layout does not take.
void check_plain(const Format& format, const char* name);

// Throws std::invalid_argument if a weight cannot have this shape and format.
MatrixView make_view(size_t rows, size_t cols, const Format& format, bool gated);

// Groups of columns that share a scale; without groups the whole row is one.
QUIRE_INLINE int groups_of(const MatrixView& w) { return w.format.group > 0 ? w.padded_cols() / w.format.group : 1; }

// The row of O on lane `lane` of panel `panel`, or -1 in the padding.
QUIRE_INLINE int source_row(const MatrixView& view, int panel, int lane) {
  if (!view.gated) {
    const int row = panel * 16 + lane;
    return row < view.rows ? row : -1;
  }
  const int half = view.rows / 2, row = panel / 2 * 16 + lane;
  return row < half ? row + (panel % 2) * half : -1;
}

}  // namespace quire
