// How keys and values of a cache lie in memory, layer by layer. Knows the layout; knows no sequence and no block table.
//
// [slab][layer], so that memory is touched as blocks are used. A block is a slab of all layers or, with columns, a slab
// of each column's layers, wherever `place_blocks` puts it. In each layer, keys come first, then values:
//   K [kv_head][head_dim][block_size]   transposed: vector lanes are positions, so scores need no horizontal sums
//   V [kv_head][block_size][head_dim]
// Elements are float, float16, bfloat16 (uint16_t), FP8 of two kinds, or int8. A head's tile is contiguous: head_dim *
// block_size elements.
// In int8, four elements that a dot product of bytes multiplies together are neighbours. A tile's elements are followed
// by one float scale per position: that of its key, or of its value, in this head.
//   K [kv_head][head_dim / 4][block_size][4]   bytes are value + 128; head_dim is rounded up to a multiple of 4
//   V [kv_head][block_size / 4][head_dim][4]   groups of positions 4 i to 4 i + 3; block_size is a multiple of 4
// With shared values (latent attention) there is no V: a value is the first value_dim elements of its key.
// A layer of entries (KVLayer in devices/kv.py) has one row for each `every` positions, in the block of the last of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/memory.h"

namespace quire {

enum class KVType : int { f32, bf16, i8, f16, e4m3, e5m2 };

// Where a row lies: the number of its block in a sequence's table, and the place in that block.
struct KVRow {
  int block, offset;
};

// Plain view of one layer of a cache, safe to use in per-ISA code.
struct KVView {
  char* base = nullptr;            // of the layer in slab 0
  size_t slab_bytes = 0;           // all layers of a column
  const int32_t* slabs = nullptr;  // of each block, in the layer's column; null: block i is slab i
  int num_kv_heads = 0, head_dim = 0, value_dim = 0, num_blocks = 0, block_size = 0;  // block_size: rows of a block
  int every = 1, block_tokens = 0;  // positions of a row, and of a block
  KVType type = KVType::f32;
  bool shared_values = false;
  const float* scales = nullptr;  // [2 heads]: those of the keys, then of the values, or null: 1

  QUIRE_INLINE size_t element_bytes() const {
    return type == KVType::f32 ? 4 : type == KVType::bf16 || type == KVType::f16 ? 2 : 1;
  }
  // Whether elements are widened to float before they are multiplied.
  QUIRE_INLINE bool widens() const { return type == KVType::f16 || type == KVType::e4m3 || type == KVType::e5m2; }
  QUIRE_INLINE size_t tile_elements() const {
    return size_t(type == KVType::i8 ? (head_dim + 3) / 4 * 4 : head_dim) * size_t(block_size);
  }
  QUIRE_INLINE size_t tile_bytes() const {
    return tile_elements() * element_bytes() + (type == KVType::i8 ? size_t(block_size) * 4 : 0);
  }
  QUIRE_INLINE size_t side_bytes() const { return size_t(num_kv_heads) * tile_bytes(); }  // keys or values of a layer
  QUIRE_INLINE size_t layer_bytes() const { return side_bytes() * (shared_values ? 1 : 2); }

  // Row i of a sequence: that of position i, or entry i.
  QUIRE_INLINE KVRow row_of(int i) const {
    if (every == 1) return {i / block_size, i % block_size};
    return row_at((i + 1) * every - 1);
  }
  // The row of a position, or of the entry that ends there.
  QUIRE_INLINE KVRow row_at(int position) const {
    return {position / block_tokens, position % block_tokens / (every < block_tokens ? every : block_tokens)};
  }

  // Stored keys and values of a head are divided by these.
  QUIRE_INLINE float key_scale(int head) const { return scales ? scales[head] : 1.0f; }
  QUIRE_INLINE float value_scale(int head) const { return scales ? scales[num_kv_heads + head] : 1.0f; }

  // First byte of the tile of (block, kv head).
  QUIRE_INLINE char* key_tile(int block, int head) const {
    return base + size_t(slabs ? slabs[block] : block) * slab_bytes + size_t(head) * tile_bytes();
  }
  QUIRE_INLINE char* value_tile(int block, int head) const { return key_tile(block, head) + side_bytes(); }
};

}  // namespace quire
