// Sorts sequences by their block tables: any order that compares block by block makes equal prefixes neighbours.
#include "plan/shared_prefix.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace quire {

void SharedPrefixes::find(int num_seqs, const int32_t* kv_len, const int32_t* slots, const int32_t* block_table,
                          size_t stride, int block_size) {
  auto table = [&](int32_t b) { return block_table + size_t(slots[b]) * stride; };
  auto blocks = [&](int32_t b) { return kv_len[b] / block_size; };  // full blocks
  order_.resize(size_t(num_seqs));
  shared_.assign(size_t(num_seqs), 0);
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    const int way = std::memcmp(table(a), table(b), size_t(std::min(blocks(a), blocks(b))) * sizeof(int32_t));
    if (way != 0) return way < 0;
    return blocks(a) != blocks(b) ? blocks(a) < blocks(b) : a < b;
  });
  for (size_t i = 1; i < size_t(num_seqs); ++i) {
    const int32_t a = order_[i - 1], b = order_[i];
    const int32_t* end = table(a) + std::min(blocks(a), blocks(b));
    shared_[i] = int32_t(std::mismatch(table(a), end, table(b)).first - table(a)) * block_size;
  }
}

}  // namespace quire
