// bfloat16: [ceil(K / 2)][16][2].
#pragma once

#include "linear/format.h"
#include "linear/source_rows.h"

namespace quire {

struct Bfloat16 {
  static constexpr Holds kHolds = Holds::floats;

  static void check(const Format& format) { check_plain(format, "bfloat16"); }
  static Geometry geometry(const Format&, int cols) {
    const int pairs = (cols + 1) / 2;
    return {pairs * 2, 2, 64, size_t(pairs) * 64, 0};
  }
  static bool pack_panel(const PanelRows& rows, const MatrixView& view, char* out);

  template <class Put>
  QUIRE_INLINE static void read_lane(const MatrixView& w, int panel, int lane, Put&& put) {
    const uint16_t* pairs = reinterpret_cast<const uint16_t*>(w.panel(panel)) + lane * 2;
    for (int k = 0; k < w.cols; ++k) put(k, widened(pairs[k / 2 * 32 + k % 2]));
  }
};

}  // namespace quire
