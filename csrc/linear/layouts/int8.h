// int8: { [ceil(K / 4)][16][4] bytes, each its value plus 128; scale [16] float32 }. One scale per row.
// A screen has two more fields behind the scales of each panel, length [16] and rounding [16] float32: bounds of the
// length of a row, exact and rounded, and of the change by rounding (linear/screened_argmax.h).
#pragma once

#include "linear/format.h"
#include "linear/source_rows.h"

namespace quire {

struct Int8 {
  static constexpr Holds kHolds = Holds::codes;

  static void check(const Format& format) { check_plain(format, "int8"); }
  static Geometry geometry(const Format& format, int cols) {
    const int steps = (cols + 3) / 4;
    return {steps * 4, 4, 64, size_t(steps) * 64, format.screened ? size_t{192} : size_t{64}};
  }
  static bool pack_panel(const PanelRows& rows, const MatrixView& view, char* out);
  // The largest magnitude becomes 127.
  static void quantize(const MatrixView& view, const float* values, const RowCodes& codes);
  static void put_lane(const MatrixView& view, char* panel, int lane, const RowCodes& codes);

  template <class Put>
  QUIRE_INLINE static void read_lane(const MatrixView& w, int panel, int lane, Put&& put) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(w.panel(panel)) + lane * 4;
    const float scale = float_at(w.tail(panel), lane);
    for (int k = 0; k < w.cols; ++k) put(k, float(bytes[k / 4 * 64 + k % 4] - 128) * scale);
  }
};

}  // namespace quire
