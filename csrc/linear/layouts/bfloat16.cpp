#include "linear/layouts/bfloat16.h"

namespace quire {

bool Bfloat16::pack_panel(const PanelRows& rows, const MatrixView& view, char* out) {
  Bf16Block block;
  for (int k = 0; k < view.cols; k += kPackColumns) {
    const int pairs = (read_block(rows, view.cols, k, kPackColumns, block) + 1) / 2;
    char* to = out + size_t(k / 2) * 64;
    for (int pair = 0; pair < pairs; ++pair)
      for (int lane = 0; lane < PanelRows::kLanes; ++lane, to += 4) std::memcpy(to, &block.lanes[lane][2 * pair], 4);
  }
  return true;
}

}  // namespace quire
