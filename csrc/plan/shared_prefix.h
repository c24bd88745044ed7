// Finds sequences of a step that begin with the same blocks of the KV cache, so that attention can read these once for
// all of them. Knows block tables; knows no kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

class SharedPrefixes {
 public:
  // For `num_seqs` sequences of kv_len[b] tokens; the block table of sequence b is row slots[b].
  void find(int num_seqs, const int32_t* kv_len, const int32_t* slots, const int32_t* block_table, size_t stride,
            int block_size);

  // All sequences; those with equal prefixes are neighbours.
  const int32_t* order() const { return order_.data(); }
  // [i]: the number of positions in blocks that order()[i] shares with order()[i - 1]; 0 for i = 0.
  const int32_t* shared() const { return shared_.data(); }

 private:
  std::vector<int32_t> order_, shared_;
};

}  // namespace quire
