// Attention over caches in int8.
#include "attention/attention.h"
#include "kernels/parts.h"

namespace quire::QUIRE_ISA {

void attention_i8(const AttentionArgs& a, ThreadPool& pool) { attention<int8_t>(a, pool); }
size_t attention_workspace_i8(const AttentionLimits& limits) { return attention_workspace(limits); }

}  // namespace quire::QUIRE_ISA
