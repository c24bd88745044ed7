// Allocation and block copies of the KV cache. Knows the layout; knows no sequence and no block table.
#include "plan/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace quire {

KVStore::KVStore(std::vector<KVLayer> layers, KVType type, int num_blocks, int block_size,
                 std::vector<std::vector<float>> scales, std::vector<int> columns, int num_slabs,
                 int num_states, int num_open)
    : layers_(std::move(layers)), scales_(std::move(scales)) {
  if (layers_.empty() || num_blocks < 1 || block_size < 1)
    throw std::invalid_argument("every size of a KV cache must be at least 1");
  if (type == KVType::i8 && block_size % 4 != 0)
    throw std::invalid_argument("an int8 KV cache needs a block size that is a multiple of 4");
  if (columns.empty()) columns.assign(layers_.size(), 0);
  const int last = *std::max_element(columns.begin(), columns.end());
  if (columns.size() != layers_.size() || *std::min_element(columns.begin(), columns.end()) < 0 ||
      last >= int(layers_.size()) || (last > 0 && num_slabs < 1))
    throw std::invalid_argument("the columns of a KV cache are not those of its layers");
  std::vector<size_t> column_bytes(size_t(last) + 1);
  std::vector<size_t> offsets;
  for (const KVLayer& layer : layers_) {
    if (layer.num_kv_heads < 0 || layer.head_dim < 1)
      throw std::invalid_argument("every size of a KV cache must be at least 1");
    if (layer.value_dim < 0 || layer.value_dim > layer.head_dim)
      throw std::invalid_argument("values that are part of keys cannot be longer");
    if (layer.every < 1 || (layer.every > 1 && layer.value_dim == 0))
      throw std::invalid_argument("entries of a KV cache are of at least 1 position, and values are part of them");
    KVView view;
    view.num_kv_heads = layer.num_kv_heads;
    view.head_dim = layer.head_dim;
    view.value_dim = layer.value_width();
    view.shared_values = layer.value_dim > 0;
    view.num_blocks = num_blocks;
    view.block_size = (block_size - 1) / layer.every + 1;
    view.block_tokens = block_size;
    view.every = layer.every;
    view.type = type;
    size_t& bytes = column_bytes[size_t(columns[views_.size()])];
    offsets.push_back(bytes);
    bytes += view.layer_bytes();
    views_.push_back(view);
  }
  const bool fp8 = type == KVType::e4m3 || type == KVType::e5m2;
  if (!scales_.empty() && (!fp8 || scales_.size() != layers_.size()))
    throw std::invalid_argument("only a KV cache in FP8 has scales, for each layer and not for latent attention");
  for (size_t i = 0; i < scales_.size(); ++i) {
    const std::vector<float>& own = scales_[i];
    bool right = own.empty() || (own.size() == 2 * size_t(layers_[i].num_kv_heads) && layers_[i].value_dim == 0);
    for (const float scale : own) right = right && scale > 0 && scale < 1e30f;
    if (!right) throw std::invalid_argument("a layer's KV cache needs a positive scale for the keys and values of each head");
    if (!own.empty()) views_[i].scales = own.data();
  }
  const size_t slab_bytes = *std::max_element(column_bytes.begin(), column_bytes.end());
  place_states(num_states, num_open);
  if (slab_bytes == 0 && row_floats_ == 0) throw std::invalid_argument("a KV cache needs a layer that keeps something");
  if (last > 0) slabs_.assign(size_t(last) + 1, std::vector<int32_t>(size_t(num_blocks)));
  num_slabs_ = last > 0 ? num_slabs : num_blocks;
  memory_ = HugeBuffer(slab_bytes * size_t(num_slabs_));
  for (size_t i = 0; i < views_.size(); ++i) {
    views_[i].base = static_cast<char*>(memory_.data()) + offsets[i];
    views_[i].slab_bytes = slab_bytes;
    if (last > 0) views_[i].slabs = slabs_[size_t(columns[i])].data();
  }
}

void KVStore::copy_blocks(const int32_t* source, const int32_t* destination, size_t count) {
  const KVView& first = views_.front();
  for (size_t i = 0; i < count; ++i)
    for (const int32_t block : {source[i], destination[i]})
      if (block < 0 || block >= first.num_blocks)
        throw std::out_of_range("block " + std::to_string(block) + " is outside the cache's " +
                                std::to_string(first.num_blocks) + " blocks");
  if (first.slab_bytes == 0) return;
  char* memory = static_cast<char*>(memory_.data());
  auto copy = [&](int32_t from, int32_t to) {
    std::memmove(memory + size_t(to) * first.slab_bytes, memory + size_t(from) * first.slab_bytes, first.slab_bytes);
  };
  for (size_t i = 0; i < count; ++i) {
    if (slabs_.empty()) copy(source[i], destination[i]);
    for (const auto& column : slabs_) copy(column[size_t(source[i])], column[size_t(destination[i])]);
  }
}

void KVStore::place_states(int num_states, int num_open) {
  if (num_states < 0 || num_open < 0) throw std::invalid_argument("a cache cannot have fewer than no states");
  num_states_ = num_states, num_open_ = num_open;
  for (const KVLayer& layer : layers_) {
    state_at_.emplace_back();
    for (const StateSize& size : layer.states) {
      state_at_.back().push_back(row_floats_);
      row_floats_ += aligned(size.state) + aligned(size.row * size_t(num_open));
    }
  }
  states_ = HugeBuffer(row_floats_ * sizeof(float) * size_t(num_states));
}

void KVStore::copy_states(const int32_t* source, const int32_t* destination, size_t count) {
  for (size_t i = 0; i < count; ++i)
    for (const int32_t row : {source[i], destination[i]})
      if (row < 0 || row >= num_states_)
        throw std::out_of_range("row " + std::to_string(row) + " is outside the cache's " + std::to_string(num_states_) +
                                " rows of states");
  float* rows = static_cast<float*>(states_.data());
  for (size_t i = 0; i < count; ++i)
    if (source[i] != destination[i] && row_floats_ > 0)
      std::memcpy(rows + size_t(destination[i]) * row_floats_, rows + size_t(source[i]) * row_floats_,
                  row_floats_ * sizeof(float));
}

void KVStore::place_blocks(const int32_t* rows, size_t count) {
  const size_t width = slabs_.size() + 1;
  for (size_t i = 0; i < count * width; ++i) {
    const int most = i % width ? num_slabs_ : num_blocks();
    if (rows[i] < 0 || rows[i] >= most)
      throw std::out_of_range(std::to_string(rows[i]) + " is not a block, or not a slab, of the cache");
  }
  for (size_t i = 0; i < count; ++i)
    for (size_t c = 0; c < slabs_.size(); ++c) slabs_[c][size_t(rows[i * width])] = rows[i * width + c + 1];
}

}  // namespace quire
