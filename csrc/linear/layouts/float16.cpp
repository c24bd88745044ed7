#include "linear/layouts/float16.h"

#include <algorithm>

namespace quire {

bool Float16::pack_panel(const PanelRows& rows, const MatrixView& view, char* out) {
  uint16_t* panel = reinterpret_cast<uint16_t*>(out);
  std::memset(out, 0, view.geometry.columns_bytes);
  for (int k = 0; k < view.cols; k += kPackColumns) {
    const int n = std::min(kPackColumns, view.cols - k);
    for (int lane = 0; lane < PanelRows::kLanes; ++lane) {
      uint16_t halves[kPackColumns];
      if (!rows.lanes[lane].data) continue;
      if (!read_f16(rows.lanes[lane], k, n, halves)) return false;
      for (int i = 0; i < n; ++i) panel[size_t(k + i) * PanelRows::kLanes + size_t(lane)] = halves[i];
    }
  }
  return true;
}

}  // namespace quire
