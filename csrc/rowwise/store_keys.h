// Turns keys and stores them in the cache in its own type. Knows the KV layout; knows no block table.
#pragma once

#include "kernels/kernels.h"
#include "simd/simd.h"
#include "simd/simd_int.h"
#include "simd/simd_narrow.h"

namespace quire::QUIRE_ISA {

// cos and sin of a position: [2 half].
inline void angles_of(float position, const float* inv_freq, int half, float scale, float* to) {
  for (int i = 0; i < half; ++i) {
    const float angle = position * inv_freq[i];
    to[i] = __builtin_cosf(angle) * scale;
    to[half + i] = __builtin_sinf(angle) * scale;
  }
}

// Pairs (i, i + half): x' = x cos - y sin, y' = y cos + x sin.
inline void rotate(float* x, const float* angles, int rotary_dim) {
  const int half = rotary_dim / 2;
  float* y = x + half;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const V c = load(angles + i), s = load(angles + half + i), a = load(x + i), b = load(y + i);
    store(x + i, a * c - b * s);
    store(y + i, b * c + a * s);
  }
  if (const int n = half - i; n > 0) {
    const V c = load_first(angles + i, n), s = load_first(angles + half + i, n);
    const V a = load_first(x + i, n), b = load_first(y + i, n);
    store_first(x + i, a * c - b * s, n);
    store_first(y + i, b * c + a * s, n);
  }
}

// Rounds a head to int8 into q [round_up(H, 4)], zero padded; its scale goes behind the tile's elements.
inline void round_head(const float* x, char* tile, const KVView& kv, int offset, int8_t* q) {
  const Int8Scale scale = int8_scale(x, kv.head_dim);
  round_to_int8(x, kv.head_dim, scale.inverse, q);
  for (size_t h = size_t(kv.head_dim); h < round_up(size_t(kv.head_dim), 4); ++h) q[h] = 0;
  std::memcpy(tile + kv.tile_elements() + size_t(offset) * 4, &scale.scale, 4);
}

// Stores keys in int8 (kv_cache.h); `words` has room for `count` keys.
inline void store_int8_keys(const float* k, size_t k_stride, int count, const KVView& kv, char* tile, int offset,
                            uint32_t* words) {
  const size_t steps = size_t(kv.head_dim + 3) / 4;
  for (int i = 0; i < count; ++i)
    round_head(k + size_t(i) * k_stride, tile, kv, offset + i, reinterpret_cast<int8_t*>(words + size_t(i) * steps));
  for (size_t i = 0; i < size_t(count) * steps; ++i) words[i] ^= 0x80808080u;
  transpose(words, steps, count, int(steps), reinterpret_cast<uint32_t*>(tile) + offset, size_t(kv.block_size));
}

// Calls f with a tile's elements by their type.
template <class F>
QUIRE_INLINE void with_narrow(KVType type, char* tile, F&& f) {
  if (type == KVType::f16) f(reinterpret_cast<Half*>(tile));
  else if (type == KVType::e4m3) f(reinterpret_cast<E4m3*>(tile));
  else f(reinterpret_cast<E5m2*>(tile));
}

// Stores the keys of `count` tokens of a head, `k_stride` elements apart, in a block from `offset` on. Elements of a
// stored key are `block_size` apart. `scratch` has room for 16 keys.
inline void store_keys(const float* k, size_t k_stride, int count, const KVView& kv, int head, int block, int offset,
                       float* scratch) {
  char* tile = kv.key_tile(block, head);
  const size_t H = size_t(kv.head_dim), stride = size_t(kv.block_size);
  if (kv.type == KVType::f32)
    return transpose(k, k_stride, count, int(H), reinterpret_cast<float*>(tile) + offset, stride);
  if (kv.type == KVType::i8)
    return store_int8_keys(k, k_stride, count, kv, tile, offset, reinterpret_cast<uint32_t*>(scratch));
  if (kv.widens())
    return with_narrow(kv.type, tile, [&](auto* elements) QUIRE_INLINE_LAMBDA {
      const float scale = kv.key_scale(head);
      for (int i = 0; i < count; ++i)
        for (size_t h = 0; h < H; ++h) narrowed(k[size_t(i) * k_stride + h] / scale, elements + h * stride + offset + i);
    });
  uint16_t* to = reinterpret_cast<uint16_t*>(tile) + offset;
  if (count == kLanes) {
    transpose(k, k_stride, count, int(H), scratch, kLanes);
    for (size_t h = 0; h < H; ++h) store_bf16(to + h * stride, load(scratch + h * kLanes));
    return;
  }
  for (int i = 0; i < count; ++i, ++to, k += k_stride)
    for (size_t h = 0; h < H; h += kLanes) {
      const size_t n = min_of(size_t{kLanes}, H - h);
      uint16_t lanes[kLanes];
      store_bf16(lanes, load_first(k + h, int(n)));
      for (size_t j = 0; j < n; ++j) to[(h + j) * stride] = lanes[j];
    }
}

}  // namespace quire::QUIRE_ISA
