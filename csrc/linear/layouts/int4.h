// int4: one scale for each `group` columns of a row:
//   [ceil(K / group)] { scale [16] float32, with offsets: offset [16] float32,
//                       [group / 8][16][4] bytes: column k in the low half of byte k, column 4 + k in the high half }
// With narrow scales two groups share a header: scale [16][2] bfloat16, with offsets: zero point [16][2] bfloat16.
#pragma once

#include "linear/format.h"
#include "linear/source_rows.h"

namespace quire {

struct Int4 {
  static constexpr Holds kHolds = Holds::codes;

  static void check(const Format& format);
  static Geometry geometry(const Format& f, int cols) {
    const int groups = (cols + f.group - 1) / f.group, headers = (groups + per_header(f) - 1) / per_header(f);
    return {groups * f.group, per_header(f) * f.group, header_bytes(f) + size_t(per_header(f)) * group_bytes(f),
            size_t(headers) * header_bytes(f) + size_t(groups) * group_bytes(f), 0};
  }
  static bool pack_panel(const PanelRows& rows, const MatrixView& view, char* out);
  // Without offsets the largest magnitude becomes -8, so that all sixteen codes are used; with offsets the range from
  // least to largest becomes 0 to 15.
  static void quantize(const MatrixView& view, const float* values, const RowCodes& codes);
  static void put_lane(const MatrixView& view, char* panel, int lane, const RowCodes& codes);

  QUIRE_INLINE static size_t header_bytes(const Format& f) { return f.offsets ? 128 : 64; }
  QUIRE_INLINE static int per_header(const Format& f) { return f.narrow ? 2 : 1; }
  QUIRE_INLINE static size_t group_bytes(const Format& f) { return size_t(f.group) * 8; }
  // The header of a group of a panel, and its columns behind it.
  QUIRE_INLINE static size_t header_offset(const MatrixView& w, int group) {
    return size_t(group / per_header(w.format)) * w.geometry.unit_bytes;
  }
  QUIRE_INLINE static size_t columns_offset(const MatrixView& w, int group) {
    const size_t before = size_t(group % per_header(w.format)) * group_bytes(w.format);
    return header_offset(w, group) + header_bytes(w.format) + before;
  }

  template <class Put>
  QUIRE_INLINE static void read_lane(const MatrixView& w, int panel, int lane, Put&& put) {
    const Format& f = w.format;
    const char* data = w.panel(panel);
    for (int group = 0; group * f.group < w.cols; ++group) {
      const char* header = data + header_offset(w, group);
      auto field = [&](const char* p) QUIRE_INLINE_LAMBDA {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(p) + lane * 2;
        return f.narrow ? widened(halves[group % 2]) : float_at(p, lane);
      };
      const float scale = field(header), held = f.offsets ? field(header + 64) : 8;
      const float offset = f.offsets && !f.narrow ? held : scale * held;
      const uint8_t* bytes = reinterpret_cast<const uint8_t*>(data + columns_offset(w, group)) + lane * 4;
      const int begin = group * f.group;
      for (int i = 0; i < f.group && begin + i < w.cols; ++i) {
        const int code = bytes[i / 8 * 64 + i % 4] >> (i % 8 / 4 * 4) & 15;
        put(begin + i, __builtin_fmaf(scale, float(code), -offset));  // as products do
      }
    }
  }
};

}  // namespace quire
