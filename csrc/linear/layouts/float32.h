// float32: [K][16].
#pragma once

#include "linear/format.h"
#include "linear/source_rows.h"

namespace quire {

struct Float32 {
  static constexpr Holds kHolds = Holds::floats;

  static void check(const Format& format) { check_plain(format, "float32"); }
  static Geometry geometry(const Format&, int cols) { return {cols, 1, 64, size_t(cols) * 64, 0}; }
  static bool pack_panel(const PanelRows& rows, const MatrixView& view, char* out);

  template <class Put>
  QUIRE_INLINE static void read_lane(const MatrixView& w, int panel, int lane, Put&& put) {
    const char* data = w.panel(panel);
    for (int k = 0; k < w.cols; ++k) put(k, float_at(data, k * 16 + lane));
  }
};

}  // namespace quire
