// Attention over caches in float32, and in types that are widened to it.
#include "attention/attention.h"
#include "kernels/parts.h"

namespace quire::QUIRE_ISA {

template void attend_tile(const TileShape&, const HeadRows&, const TileKV<float>&, const RowTile*, int, const int*,
                          const int*, float*);

void attention_f32(const AttentionArgs& a, ThreadPool& pool) { attention<float>(a, pool); }
size_t attention_workspace_f32(const AttentionLimits& limits) { return attention_workspace(limits); }

}  // namespace quire::QUIRE_ISA
