// Chooses the kernel of a call by the layout of a weight or the type of a cache. Knows no instruction set.
#include "simd/kernels.h"

#include <algorithm>

namespace quire {

void Kernels::linear(const LinearArgs& a, ThreadPool& pool) const {
  const int layout = int(a.weight.format.layout);
  if (a.weight.format.int8_rows) return int8_products[layout](a, pool);
  (bf16_products[layout] ? bf16_products : float_products)[layout](a, pool);
}

size_t Kernels::linear_workspace(const MatrixView& weight, int max_rows) const {
  return (weight.format.int8_rows ? linear_workspace_i8 : linear_workspace_float)(weight, max_rows);
}

bool Kernels::screened_best(const LinearArgs& a, int32_t* best, ThreadPool& pool) const {
  return screened_best_by(a, int8_products[int(Layout::int8)], best, pool);
}

void Kernels::attention(const AttentionArgs& a, ThreadPool& pool) const {
  switch (a.kv.type) {
    case KVType::f32:
    case KVType::f16:
    case KVType::e4m3:
    case KVType::e5m2:
      return attention_f32(a, pool);
    case KVType::bf16:
      return attention_bf16(a, pool);
    case KVType::i8:
      return attention_i8(a, pool);
  }
}

size_t Kernels::attention_workspace(const AttentionLimits& limits) const {
  return std::max({attention_workspace_f32(limits), attention_workspace_bf16(limits), attention_workspace_i8(limits)});
}

}  // namespace quire
