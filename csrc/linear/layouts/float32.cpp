#include "linear/layouts/float32.h"

#include <algorithm>

namespace quire {

bool Float32::pack_panel(const PanelRows& rows, const MatrixView& view, char* out) {
  alignas(64) float block[PanelRows::kLanes][kPackColumns];
  for (int k = 0; k < view.cols; k += kPackColumns) {
    const int n = std::min(kPackColumns, view.cols - k);
    for (int lane = 0; lane < PanelRows::kLanes; ++lane) {
      if (!rows.lanes[lane].data) std::memset(block[lane], 0, sizeof(block[lane]));
      else read_f32(rows.lanes[lane], k, n, block[lane]);
    }
    float* to = reinterpret_cast<float*>(out) + size_t(k) * PanelRows::kLanes;
    for (int i = 0; i < n; ++i)
      for (int lane = 0; lane < PanelRows::kLanes; ++lane) *to++ = block[lane][i];
  }
  return true;
}

}  // namespace quire
