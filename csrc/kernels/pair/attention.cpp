// Attention over caches in bfloat16.
#include "attention/attention.h"
#include "kernels/parts.h"

namespace quire::QUIRE_ISA {

void attention_bf16(const AttentionArgs& a, ThreadPool& pool) { attention<uint16_t>(a, pool); }
size_t attention_workspace_bf16(const AttentionLimits& limits) { return attention_workspace(limits); }

}  // namespace quire::QUIRE_ISA
