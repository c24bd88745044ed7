// Chooses the kernel of a call by the layout of a weight or the type of a cache. Knows no instruction set.
#include "kernels/kernels.h"

#include <algorithm>

namespace quire {

void Kernels::linear(const LinearArgs& a, ThreadPool& pool) const { linear(&a, 1, pool); }

void Kernels::linear(const LinearArgs* products, int count, ThreadPool& pool) const {
  auto kernel = [this](const LinearArgs& a) {
    const int layout = int(a.weight.format.layout);
    if (a.weight.format.int8_rows) return int8_products[layout];
    const bool blocks = a.weight.format.layout == Layout::blocks;
    Linear* const pairs = blocks && multiplies_pairs && !multiplies_pairs(a.weight) ? nullptr : bf16_products[layout];
    // Activations that the format rounded keep their values.
    const bool exact = !pairs || (a.weight.format.rounding.present() && float_products[layout]);
    return exact ? float_products[layout] : pairs;
  };
  for (int first = 0, next; first < count; first = next) {
    for (next = first + 1; next < std::min(count, first + kMostProducts) && kernel(products[next]) == kernel(products[first]);)
      ++next;
    kernel(products[first])(products + first, next - first, pool);
  }
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
