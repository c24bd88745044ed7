// Rounds activations to int8 with one scale per row, for weights of int8 and int4. Knows rows and packings; no threads.
#pragma once

#include "linear/layouts.h"
#include "linear/micro/loops.h"

namespace quire::QUIRE_ISA {

// Columns of float32 or bfloat16 in a block of K; blocks of smaller types have more.
constexpr int kBlockK = 256;

using Tiles = EqualTiles;

// One tile for all rows, if a single loop can take them.
template <class Dot>
inline Tiles tiles_for(int rows) {
  return {rows, rows <= kMaxRows ? kMaxRows : BlockTile<Dot>::rows};
}

inline bool holds_floats(const MatrixView& w) {
  return with_layout(w.format.layout, [](auto layout) QUIRE_INLINE_LAMBDA { return layout.kHolds == Holds::floats; });
}

// K split into equal blocks of whole steps; the last may be shorter.
struct BlocksOfK {
  int padded, size;
  explicit BlocksOfK(const MatrixView& w) : padded(w.padded_cols()), size(padded) {
    const int wanted = holds_floats(w) ? kBlockK : 4 * kBlockK, step = max_of(2, w.unit());
    const int most = wanted + wanted / 4;  // a longer block is better than a short one behind it
    const int count = (padded + most - 1) / most;
    size = ((padded + count - 1) / count + step - 1) / step * step;
  }
  int columns(int begin) const { return min_of(size, padded - begin); }
};

// The rounded rows in the workspace of a product: the packed tiles, then the scales, then the sums.
struct QuantizedRows {
  float* scale;   // [rows]
  int32_t* sums;  // [groups][R] per tile, as Dot::begin takes them; floats for layouts with offsets

  explicit QuantizedRows(const LinearArgs& a) {
    char* p = static_cast<char*>(a.workspace) + packed_bytes(a.weight, a.rows);
    scale = reinterpret_cast<float*>(p);
    sums = reinterpret_cast<int32_t*>(p + (size_t(a.rows) * 4 + 63) / 64 * 64);
  }

  static size_t packed_bytes(const MatrixView& w, int rows) {
    const size_t column = w.format.layout == Layout::int8 ? kDotElements : 1;
    return (size_t(rows) * size_t(w.padded_cols()) * column + 63) / 64 * 64;
  }
};

// Columns that share a scale: without groups all of them.
inline int group_of(const MatrixView& w) { return w.format.group > 0 ? w.format.group : w.padded_cols(); }

inline size_t quantized_bytes(const MatrixView& w, int rows) {
  return QuantizedRows::packed_bytes(w, rows) + size_t(rows) * 4 * size_t(1 + groups_of(w)) + 128;
}

// The first sum of a tile's rows from column k on.
inline size_t group_sums_offset(const MatrixView& w, int first_row, int rows, int k) {
  return size_t(first_row) * size_t(groups_of(w)) + size_t(k / group_of(w)) * size_t(rows);
}

// The scale of a row. Rows that were rounded with one scale for all keep it.
inline Int8Scale row_scale(const MatrixView& w, const float* x) {
  if (!w.format.rounding.present()) return int8_scale(x, w.cols);
  const float scale = w.format.rounding.outer;
  if (x[0] != x[0]) return {x[0], 0.0f};  // the whole row is NaN
  return {scale, 1.0f / scale};
}

// Rounds and packs rows [begin, end), one tile, by blocks of K: `place(k, columns)` gives a block's destination.
// `rounded` is scratch memory for a block and one more row.
template <class Dot, class Place>
inline void quantize_tile(const LinearArgs& a, const QuantizedRows& rows, int begin, int end, uint32_t* rounded,
                          Place&& place) {
  const MatrixView& w = a.weight;
  const BlocksOfK blocks(w);
  const int count = end - begin, group = group_of(w);
  float inverse[kMaxRows];
  for (int r = 0; r < count; ++r) {
    const Int8Scale scale = row_scale(w, a.x + size_t(begin + r) * a.x_stride);
    rows.scale[begin + r] = scale.scale;
    inverse[r] = scale.inverse;  // 0 if a value of the row is not finite, because sums of NaN would overflow
  }
  for (int k = 0; k < blocks.padded; k += blocks.size) {
    const int columns = blocks.columns(k), present = min_of(columns, w.cols - k);
    const int elements = columns / Dot::kStepK * Dot::kStepA;  // of a row
    constexpr bool spreads = Dot::kStepA * 4 > Dot::kStepK;
    for (int r = 0; r < count; ++r) {
      const float* x = a.x + size_t(begin + r) * a.x_stride + k;
      uint32_t* row = rounded + r * elements;
      int8_t* q = reinterpret_cast<int8_t*>(spreads ? rounded + count * elements : row);
      for (int i = 0; i < columns; i += group) {
        const int32_t sum = round_to_int8(x + i, min_of(min_of(group, columns), present - i), inverse[r], q + i);
        int32_t* to = rows.sums + group_sums_offset(w, begin, count, k + i) + r;
        const float real = float(sum);
        if (w.format.offsets) std::memcpy(to, &real, 4);
        else *to = ((k + i) % group ? *to : 0) - Dot::kHeldPlus * sum;
      }
      std::memset(q + present, 0, size_t(columns - present));
      if (spreads) spread(q, columns, row);
    }
    transpose(rounded, size_t(elements), count, elements, place(k, columns), size_t(count));
  }
}

// Rounds activations as the product does.
template <class Dot>
inline V multiplied(V v) {
#if defined(QUIRE_BF16_DOT)
  if constexpr (Dot::kStepA < Dot::kStepK) {
    uint16_t halves[kLanes];
    store_halves(halves, v);
    return load_bf16(halves);
  }
#endif
  return v;
}

// Sums of a tile's float activations by group, as the product multiplies them.
template <class Dot>
inline void sum_groups(const LinearArgs& a, int begin, int end, int32_t* sums) {
  const MatrixView& w = a.weight;
  const int group = w.format.group;
  for (int r = begin; r < end; ++r) {
    const float* x = a.x + size_t(r) * a.x_stride;
    for (int first = 0; first < w.cols; first += group) {
      V sum = set1(0);
      for (int k = first; k < min_of(first + group, w.cols); k += 16)
        sum = sum + multiplied<Dot>(load_first(x + k, min_of(16, w.cols - k)));
      const float total = reduce_add(sum);
      std::memcpy(sums + group_sums_offset(w, begin, end - begin, first) + size_t(r - begin), &total, 4);
    }
  }
}

// Applies the scales that a panel's sums still lack. Products that need none share `Unscaled`, and so their epilogue.
struct Unscaled {
  Unscaled(const LinearArgs&, int) {}
  V operator()(const float* sums, size_t) const { return load(sums); }
};

// Integer sums: one scale per row of activations and one per output.
struct ScaledBytes {
  const float* row_scale;
  const V scale;
  ScaledBytes(const LinearArgs& a, int panel) : row_scale(a.x_scale), scale(load(scales(a.weight, panel))) {}
  V operator()(const float* sums, size_t row) const {
    return to_float(iload(sums)) * (scale * set1(row_scale[row]));
  }
  // The scales [16] behind a panel's columns.
  static const float* scales(const MatrixView& w, int panel) {
    return reinterpret_cast<const float*>(w.tail(panel));
  }
};

struct ScaledOutputs {
  const V scale;
  ScaledOutputs(const LinearArgs& a, int panel) : scale(load(ScaledBytes::scales(a.weight, panel))) {}
  V operator()(const float* sums, size_t) const { return load(sums) * scale; }
};

struct ScaledRows {
  const float* row_scale;
  ScaledRows(const LinearArgs& a, int) : row_scale(a.x_scale) {}
  V operator()(const float* sums, size_t row) const { return load(sums) * set1(row_scale[row]); }
};

template <class Dot>
struct Scaling {
  using type = Unscaled;
};
template <>
struct Scaling<DotI8> {
  using type = ScaledBytes;
};
template <>
struct Scaling<DotI8Wide> {
  using type = ScaledOutputs;
};
template <>
struct Scaling<DotI4> {
  using type = ScaledRows;
};

}  // namespace quire::QUIRE_ISA
