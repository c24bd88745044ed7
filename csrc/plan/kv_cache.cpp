// Allocation and block copies of the KV cache. Knows the layout; knows no sequence and no block table.
#include "plan/kv_cache.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace quire {

KVStore::KVStore(int num_layers, int num_kv_heads, int head_dim, int value_dim, KVType type, int num_blocks,
                 int block_size) {
  if (num_layers < 1 || num_kv_heads < 1 || head_dim < 1 || num_blocks < 1 || block_size < 1)
    throw std::invalid_argument("every size of a KV cache must be at least 1");
  if (value_dim < 0 || value_dim > head_dim)
    throw std::invalid_argument("values that are part of keys cannot be longer");
  if (type == KVType::i8 && block_size % 4 != 0)
    throw std::invalid_argument("an int8 KV cache needs a block size that is a multiple of 4");
  view_.num_layers = num_layers;
  view_.num_kv_heads = num_kv_heads;
  view_.head_dim = head_dim;
  view_.value_dim = value_dim > 0 ? value_dim : head_dim;
  view_.shared_values = value_dim > 0;
  view_.num_blocks = num_blocks;
  view_.block_size = block_size;
  view_.type = type;
  memory_ = HugeBuffer(view_.block_bytes() * size_t(num_blocks));
  view_.base = static_cast<char*>(memory_.data());
}

void KVStore::copy_blocks(const int32_t* source, const int32_t* destination, size_t count) {
  for (size_t i = 0; i < count; ++i)
    for (const int32_t block : {source[i], destination[i]})
      if (block < 0 || block >= view_.num_blocks)
        throw std::out_of_range("block " + std::to_string(block) + " is outside the cache's " +
                                std::to_string(view_.num_blocks) + " blocks");
  for (size_t i = 0; i < count; ++i)
    std::memmove(view_.key_tile(0, destination[i], 0), view_.key_tile(0, source[i], 0), view_.block_bytes());
}

}  // namespace quire
