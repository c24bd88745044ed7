#include "linear/layouts/bfloat16_12.h"

#include <algorithm>

#include "linear/compact_writer.h"

namespace quire {

namespace {

constexpr int kSampledSteps = 16;  // steps of a panel whose values choose its table

}  // namespace

bool Bfloat16In12::pack_panel(const PanelRows& rows, const MatrixView& view, char* out) {
  Bf16Block block;
  const int padded = view.padded_cols();
  // A sample gives a good enough table for most panels; a panel with many escapes gets the table of all its values.
  auto write = [&](int apart, int most_escapes) {
    CompactWriter writer(padded, out);
    for (int k = 0; k < view.cols; k += apart) {
      read_block(rows, view.cols, k, kCompactColumns, block);
      for (const auto& lane : block.lanes) writer.sample(lane);
    }
    writer.choose_table();
    for (int k = 0; k < padded; k += kPackColumns) {
      read_block(rows, view.cols, k, kPackColumns, block);
      for (int first = 0; first < std::min(kPackColumns, padded - k); first += kCompactColumns) {
        uint32_t pairs[kCompactPairs][PanelRows::kLanes];
        for (int lane = 0; lane < PanelRows::kLanes; ++lane)
          for (int pair = 0; pair < kCompactPairs; ++pair)
            std::memcpy(&pairs[pair][lane], &block.lanes[lane][first + 2 * pair], 4);
        writer.step(pairs);
      }
    }
    return writer.finish(most_escapes);
  };
  const int apart = std::max(kCompactColumns, view.cols / kSampledSteps);
  return write(apart, max_escapes(padded) / 4) || write(kCompactColumns, max_escapes(padded));
}

}  // namespace quire
