// Keys of sparse attention: read back from the cache as floats, and entries made of windows of them. Knows the KV layout and
// block tables; knows no query.
#pragma once

#include "kernels/kernels.h"
#include "rowwise/norm.h"
#include "rowwise/store_keys.h"
#include "simd/simd.h"

namespace quire::QUIRE_ISA {

// Calls f(get) with the elements of a block's keys as floats: get(h, row) of the only head.
template <class F>
QUIRE_INLINE void with_keys(const KVView& kv, int block, F&& f) {
  char* tile = kv.key_tile(block, 0);
  const size_t rows = size_t(kv.block_size);
  auto plain = [&](const auto* p, auto&& widen) QUIRE_INLINE_LAMBDA {
    f([&](size_t h, size_t row) QUIRE_INLINE_LAMBDA { return widen(p[h * rows + row]); });
  };
  if (kv.type == KVType::f32)
    return plain(reinterpret_cast<const float*>(tile), [](float x) QUIRE_INLINE_LAMBDA { return x; });
  if (kv.type == KVType::bf16)
    return plain(reinterpret_cast<const uint16_t*>(tile), [](uint16_t x) QUIRE_INLINE_LAMBDA { return bf16_to_float(x); });
  if (kv.widens())
    return with_narrow(kv.type, tile, [&](const auto* p) QUIRE_INLINE_LAMBDA {
      plain(p, [](auto x) QUIRE_INLINE_LAMBDA { return widened_one(x); });
    });
  const auto* bytes = reinterpret_cast<const uint8_t*>(tile);
  const auto* scales = reinterpret_cast<const float*>(tile + kv.tile_elements());
  f([&](size_t h, size_t row) QUIRE_INLINE_LAMBDA {
    return float(int(bytes[(h / 4 * rows + row) * 4 + h % 4]) - 128) * scales[row];
  });
}

// Norms and turns a key at `position`, and stores it in the row of the token at `last`.
inline void store_key(const StoreKeysArgs& a, const int32_t* table, float* key, int position, int last, float* scratch) {
  if (a.norm.weight) norm_row(key, a.kv.head_dim, a.norm, key);
  if (a.inv_freq) {
    angles_of(float(position), a.inv_freq, a.half, a.scale, scratch);
    rotate(key, scratch, 2 * a.half);
  }
  const KVRow at = a.kv.row_at(last);
  store_keys(key, 0, 1, a.kv, 0, table[at.block], at.offset, scratch);
}

// Rows [position - count, position) of 16 channels from `channel` on of the raw keys: [count][16].
inline void read_raw(const StoreKeysArgs& a, const int32_t* table, int position, int count, int channel, int lanes, float* to) {
  for (int p = position - count; p < position;) {
    const KVRow at = a.raw.row_of(p);
    const int rest = min_of(a.raw.block_size - at.offset, position - p);
    with_keys(a.raw, table[at.block], [&](auto&& get) QUIRE_INLINE_LAMBDA {
      for (int i = 0; i < rest; ++i)
        for (int lane = 0; lane < 16; ++lane)
          to[i * 16 + lane] = lane < lanes ? get(size_t(channel + lane), size_t(at.offset + i)) : 0.0f;
    });
    p += rest, to += rest * 16;
  }
}

// The entry of the window that ends before `position`, 16 channels at a time. Rows count in the order of their positions.
// `rows` has room for 4 size rows of 16.
inline void make_entry(const StoreKeysArgs& a, const int32_t* table, int position, float* key, float* rows) {
  const int D = a.kv.head_dim, size = a.size, width = a.channels;
  const bool both = a.overlap && position > size;  // the window before counts too
  const int count = both ? 2 * size : size;
  float* gates = rows + 2 * size * 16;
  for (int c = 0; c < D; c += 16) {
    const int lanes = min_of(16, D - c);
    float *at = rows, *gate = gates;
    auto read = [&](int end, int channel) {  // the window that ends there, with its gates
      read_raw(a, table, end, size, channel, lanes, at);
      at += size * 16;
      if (!a.bias) return;
      read_raw(a, table, end, size, width + channel, lanes, gate);
      for (int i = 0; i < size; ++i, gate += 16)
        store(gate, load(gate) + load_first(a.bias + size_t(i) * size_t(width) + channel, lanes));
    };
    if (both) read(position - size, c);
    read(position, a.overlap ? D + c : c);
    V sum = load(rows);
    if (!a.bias) {
      for (int i = 1; i < count; ++i) sum = sum + load(rows + i * 16);
      store_first(key + c, sum / set1(float(size)), lanes);
      continue;
    }
    V most = load(gates), total = set1(0);
    for (int i = 1; i < count; ++i) most = max(most, load(gates + i * 16));
    sum = set1(0);
    for (int i = 0; i < count; ++i) {
      const V share = exp(load(gates + i * 16) - most);
      sum = fma(share, load(rows + i * 16), sum), total = total + share;
    }
    store_first(key + c, sum / total, lanes);
  }
}

}  // namespace quire::QUIRE_ISA
