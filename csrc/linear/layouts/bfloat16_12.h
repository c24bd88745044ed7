// bfloat16_12: bfloat16 in 12 bits without loss (compact.h): [ceil(K / 8)] steps, a table, escapes.
#pragma once

#include "linear/compact.h"
#include "linear/format.h"
#include "linear/source_rows.h"

namespace quire {

struct Bfloat16In12 {
  static constexpr Holds kHolds = Holds::floats;

  static void check(const Format& format) { check_plain(format, "bfloat16"); }
  static Geometry geometry(const Format&, int cols) {
    const int steps = (cols + kCompactColumns - 1) / kCompactColumns, padded = steps * kCompactColumns;
    return {padded, kCompactColumns, kCompactBytes, size_t(steps) * kCompactBytes, compact_tail_bytes(padded)};
  }
  // False if there are more escapes than a panel may have.
  static bool pack_panel(const PanelRows& rows, const MatrixView& view, char* out);

  template <class Put>
  QUIRE_INLINE static void read_lane(const MatrixView& w, int panel, int lane, Put&& put) {
    compact_lane(w.panel(panel), w.padded_cols(), lane, [&](int k, uint16_t bits) QUIRE_INLINE_LAMBDA {
      if (k < w.cols) put(k, widened(bits));
    });
  }
};

}  // namespace quire
