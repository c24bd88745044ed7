// Operations that carry a state from token to token. Knows sequences and their states; knows no plan.
#include "kernels/parts.h"
#include "recurrent/channels.h"
#include "recurrent/scan.h"

namespace quire::QUIRE_ISA {

void convolve(const ConvolveArgs& a, ThreadPool& pool) {
  for_state_ranges(pool, a, 1, a.channels, kConvolvedChannels, [&](const StateSeq& s, int, int first, int last, float*) {
    for (int c = first; c < last; c += kConvolvedChannels)
      convolve_channels(a, s, c, min_of(last, c + kConvolvedChannels));
  });
}

void scan(const ScanArgs& a, ThreadPool& pool) {
  for_state_ranges(pool, a, a.heads, a.columns, kScanWidth,
                   [&](const StateSeq& s, int head, int first, int last, float* scratch) {
    (a.delta ? scan_head<true> : scan_head<false>)(a, s, head, first, last, scratch);
  });
}

void selective_scan(const SelectiveArgs& a, ThreadPool& pool) {
  for_state_ranges(pool, a, 1, (a.channels + 15) / 16, 4, [&](const StateSeq& s, int, int first, int last, float* scratch) {
    selective_channels(a, s, first, last, scratch);
  });
}

void gated_recurrence(const GatedArgs& a, ThreadPool& pool) {
  for_state_ranges(pool, a, 1, (a.channels + 15) / 16, 16, [&](const StateSeq& s, int, int first, int last, float* scratch) {
    gated_channels(a, s, first, last, scratch);
  });
}

}  // namespace quire::QUIRE_ISA
