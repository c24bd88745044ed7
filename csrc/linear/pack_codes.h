// Packs layouts that hold codes: rounds rows of floats to codes, and places rows of codes unchanged. Knows the traits'
// interface; knows no layout.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear/format.h"
#include "linear/source_rows.h"

namespace quire {

// Scratch memory for the codes of one row.
class RowBuffer {
 public:
  explicit RowBuffer(const MatrixView& view)
      : codes_(size_t(view.padded_cols())),
        scales_(size_t(groups_of(view))),
        offsets_(size_t(groups_of(view))) {}

  RowCodes row() { return {codes_.data(), scales_.data(), offsets_.data()}; }

  // Row r of a source; codes beyond its columns are zero and are multiplied by zeros.
  RowCodes copy(const SourceCodes& source, size_t r, int cols) {
    const size_t groups = scales_.size();
    std::fill(codes_.begin() + cols, codes_.end(), uint8_t{0});
    std::memcpy(codes_.data(), source.codes + r * size_t(cols), size_t(cols));
    std::memcpy(scales_.data(), source.scales + r * groups, groups * sizeof(float));
    if (source.offsets) std::memcpy(offsets_.data(), source.offsets + r * groups, groups * sizeof(float));
    return row();
  }

 private:
  std::vector<uint8_t> codes_;
  std::vector<float> scales_, offsets_;
};

template <class L>
bool pack_codes(const PanelRows& rows, const MatrixView& view, char* out) {
  std::vector<float> values(static_cast<size_t>(view.padded_cols()));
  RowBuffer buffer(view);
  std::memset(out, 0, view.panel_bytes());
  for (int lane = 0; lane < PanelRows::kLanes; ++lane) {
    read_row(rows.lanes[lane], view.cols, view.padded_cols(), values.data());
    L::quantize(view, values.data(), buffer.row());
    L::put_lane(view, out, lane, buffer.row());
  }
  return true;
}

}  // namespace quire
