// Paged KV storage of all layers in one allocation, as attention/kv_view.h lays it out. Knows no sequence and no block
// table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/kv_view.h"
#include "plan/memory.h"

namespace quire {

// Heads of one layer; layers may differ. 0 heads: the layer keeps nothing.
struct KVLayer {
  int num_kv_heads, head_dim;

  bool operator==(const KVLayer& other) const {
    return num_kv_heads == other.num_kv_heads && head_dim == other.head_dim;
  }
};

class KVStore {
 public:
  // With value_dim 0, values have head_dim elements; otherwise they are the first value_dim elements of the keys.
  // `scales` are those of each layer's keys and values, empty for 1; they need FP8.
  // With several `columns`, which each layer has one of, blocks are placed in `num_slabs` slabs before they are used.
  // Throws std::invalid_argument if a size is not positive, std::bad_alloc if address space is short.
  KVStore(std::vector<KVLayer> layers, int value_dim, KVType type, int num_blocks, int block_size,
          std::vector<std::vector<float>> scales = {}, std::vector<int> columns = {}, int num_slabs = 0);

  const KVView& layer(int i) const { return views_[size_t(i)]; }
  const std::vector<KVLayer>& layers() const { return layers_; }
  bool shared_values() const { return views_.front().shared_values; }
  int num_blocks() const { return views_.front().num_blocks; }
  int block_size() const { return views_.front().block_size; }
  size_t nbytes() const { return memory_.size(); }

  // Places blocks: `count` rows of a block and the slab of each of its columns. Throws std::out_of_range before any is.
  void place_blocks(const int32_t* rows, size_t count);
  size_t num_columns() const { return slabs_.size(); }

  // Copies whole blocks of every layer; throws std::out_of_range before anything is copied.
  void copy_blocks(const int32_t* source, const int32_t* destination, size_t count);

 private:
  std::vector<KVLayer> layers_;
  std::vector<std::vector<float>> scales_;
  std::vector<KVView> views_;
  int num_slabs_ = 0;
  std::vector<std::vector<int32_t>> slabs_;  // of each column, by block; none if block i is slab i
  HugeBuffer memory_;
};

}  // namespace quire
