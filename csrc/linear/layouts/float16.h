// float16: [K][16], K rounded up to an even number. Values out of its range make the weight bfloat16.
#pragma once

#include "linear/format.h"
#include "linear/source_rows.h"

namespace quire {

struct Float16 {
  static constexpr Holds kHolds = Holds::floats;

  static void check(const Format& format) { check_plain(format, "float16"); }
  static Geometry geometry(const Format&, int cols) {
    const int padded = (cols + 1) / 2 * 2;
    return {padded, 2, 64, size_t(padded) * 32, 0};
  }
  // False if a finite value is out of range.
  static bool pack_panel(const PanelRows& rows, const MatrixView& view, char* out);

  template <class Put>
  QUIRE_INLINE static void read_lane(const MatrixView& w, int panel, int lane, Put&& put) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(w.panel(panel)) + lane;
    for (int k = 0; k < w.cols; ++k) put(k, f16_to_float(halves[k * 16]));
  }
};

}  // namespace quire
