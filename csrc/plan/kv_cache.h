// Paged KV storage of all layers in one allocation, as attention/kv_view.h lays it out. Knows no sequence and no block
// table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/kv_view.h"
#include "plan/memory.h"

namespace quire {

// The state of one operation for a sequence, and its open rows (StateSpec in devices/kv.py): numbers of floats.
struct StateSize {
  size_t state, row;

  bool operator==(const StateSize&) const = default;
};

// Heads of one layer; layers may differ. 0 heads: the layer keeps nothing per token. With value_dim 0, values have head_dim
// elements; otherwise they are the first value_dim elements of the keys. `every` above 1: rows are entries.
struct KVLayer {
  int num_kv_heads, head_dim, value_dim = 0, every = 1;
  std::vector<StateSize> states{};

  int value_width() const { return value_dim > 0 ? value_dim : head_dim; }
  bool operator==(const KVLayer&) const = default;
};

class KVStore {
 public:
  // `scales` are those of each layer's keys and values, empty for 1; they need FP8.
  // With several `columns`, which each layer has one of, blocks are placed in `num_slabs` slabs before they are used.
  // Throws std::invalid_argument if a size is not positive, std::bad_alloc if address space is short.
  KVStore(std::vector<KVLayer> layers, KVType type, int num_blocks, int block_size,
          std::vector<std::vector<float>> scales = {}, std::vector<int> columns = {}, int num_slabs = 0, int num_states = 0,
          int num_open = 0);

  const KVView& layer(int i) const { return views_[size_t(i)]; }
  const std::vector<KVLayer>& layers() const { return layers_; }
  int num_blocks() const { return views_.front().num_blocks; }
  int block_size() const { return views_.front().block_tokens; }
  size_t nbytes() const { return memory_.size(); }

  // Places blocks: `count` rows of a block and the slab of each of its columns. Throws std::out_of_range before any is.
  void place_blocks(const int32_t* rows, size_t count);
  size_t num_columns() const { return slabs_.size(); }

  // Copies whole blocks of every layer; throws std::out_of_range before anything is copied.
  void copy_blocks(const int32_t* source, const int32_t* destination, size_t count);

  // Rows of states: each has the states of all layers, with `num_open` open rows of each. Nothing clears them.
  int num_states() const { return num_states_; }
  int num_open() const { return num_open_; }
  float* state(int layer, int i, int row) const {
    return static_cast<float*>(states_.data()) + size_t(row) * row_floats_ + state_at_[size_t(layer)][size_t(i)];
  }
  float* open_rows(int layer, int i, int row) const {
    return state(layer, i, row) + aligned(layers_[size_t(layer)].states[size_t(i)].state);
  }
  // Copies whole rows of states, in order; throws std::out_of_range before anything is copied.
  void copy_states(const int32_t* source, const int32_t* destination, size_t count);

 private:
  static size_t aligned(size_t floats) { return (floats + 15) / 16 * 16; }
  void place_states(int num_states, int num_open);

  int num_states_ = 0, num_open_ = 0;
  size_t row_floats_ = 0;
  std::vector<std::vector<size_t>> state_at_;  // by layer and state: where it is in a row
  HugeBuffer states_;
  std::vector<KVLayer> layers_;
  std::vector<std::vector<float>> scales_;
  std::vector<KVView> views_;
  int num_slabs_ = 0;
  std::vector<std::vector<int32_t>> slabs_;  // of each column, by block; none if block i is slab i
  HugeBuffer memory_;
};

}  // namespace quire
