// Keys and values of a tile, read in place from the cache or copied for many rows. Knows the KV layout and block
// tables; knows no query.
#pragma once

#include <type_traits>

#include "attention/attention_tile.h"
#include "kernels/kernels.h"
#include "simd/simd_narrow.h"

namespace quire::QUIRE_ISA {

// Positions from..to-1 of the tile that begins at `at`.
struct TileRange {
  int at, from, to;

  bool sees(int position) const { return from <= position && position < to; }
  bool touches(int vector) const {
    const int begin = at + vector * kLanes;
    return begin < to && from < begin + kLanes;
  }
};

// Positions low..high-1 of a sequence's kv heads from `head` on. With a `view` they are places in its list.
struct Walk {
  const int32_t* table;
  const QueryView* view;
  int head, heads, low, high;

  int first() const { return low / kTile; }
  int tiles() const { return (high - 1) / kTile + 1 - first(); }
  TileRange range(int tile) const {
    const int at = (first() + tile) * kTile;
    return {at, max_of(low, at), min_of(high, at + kTile)};
  }
};

// The type of copied elements: pairs if they are multiplied as pairs, bytes unchanged, else floats.
template <class T>
using Copied =
    std::conditional_t<std::is_same_v<T, int8_t>, int8_t, std::conditional_t<Steps<T>::kColumns == 2, uint32_t, float>>;

// For int8 keys and values: one scale per position, 0 where not visible.
struct TileScales {
  alignas(64) float keys[kTile];
  alignas(64) float values[kTile];
};

class LayerKV {
 public:
  LayerKV(const KVView& kv, const KVView* entries, int pool) : kv_(kv), entries_(entries), pool_(pool) {}

  // Words for the copies of a tile.
  static size_t copied_words(size_t head_dim, size_t padded) {
    return kTile * (round_up(head_dim, kLanes) + padded);
  }

  // Whether vectors of keys and values are whole in the cache.
  bool whole_vectors() const {
    return kv_.block_size % kLanes == 0 && kv_.head_dim % kLanes == 0 && !kv_.shared_values && !kv_.widens();
  }

  // Pointers into the cache; valid if vectors are whole there.
  template <class T>
  TileKV<T> direct(const Walk& w, TileRange range) const {
    constexpr size_t together = Steps<T>::kTogether;
    TileKV<T> tile{};
    tile.key_stride = size_t(kv_.block_size) * Steps<T>::kColumns;
    tile.row_stride = size_t(kv_.head_dim) * Steps<T>::kColumns, tile.value_stride = kLanes * together;
    tile.head_stride = kv_.tile_bytes() / sizeof(T), tile.heads = w.heads;
    for (int v = 0; v < kTileVectors; ++v) {
      if (!range.touches(v)) continue;
      const Place p = place(w, range.at + v * kLanes);
      tile.keys[v] = key_at<T>(p, w.head) + size_t(p.offset) * together;
      if (!kv_.shared_values) tile.values[v] = value_at<T>(p, w.head);
      if constexpr (std::is_same_v<T, int8_t>) {
        tile.key_scales[v] = scales_of(*p.kv, p.kv->key_tile(p.block, w.head)) + p.offset;
        tile.value_scales[v] = scales_of(*p.kv, p.kv->value_tile(p.block, w.head)) + p.offset;
      }
    }
    return tile;
  }

  // Pointers to copies: keys [kTileVectors][steps][16], values [padded / 16][steps][16], of 4 bytes each, so that a
  // loop over one or two vectors reads contiguous memory. Places outside the range are not written; a pair with one
  // element inside has 0 for the other.
  template <class T>
  TileKV<Copied<T>> copied(const Walk& w, int head, TileRange range, float* memory) const {
    using C = Copied<T>;
    constexpr int columns = Steps<C>::kColumns, vector = kLanes * 4 / int(sizeof(C));  // elements
    const size_t key_elements = size_t(query_steps<C>(kv_.head_dim)) * vector;
    C* keys = reinterpret_cast<C*>(memory);
    C* values = keys + kTileVectors * round_up(size_t(kv_.head_dim), kLanes) * vector;
    copy<T>(w, head, range, keys, values);
    TileKV<C> tile{};
    tile.key_stride = tile.row_stride = vector, tile.value_stride = kTile / columns * vector;
    for (int v = 0; v < kTileVectors; ++v)
      if (range.touches(v))
        tile.keys[v] = keys + size_t(v) * key_elements, tile.values[v] = values + v * (kLanes / columns) * vector;
    return tile;
  }

  void load_scales(const Walk& w, int head, TileRange range, TileScales& scales) const {
    std::memset(&scales, 0, sizeof(scales));
    for_runs(w, range, [&](int at, const Place& p) {
      const float* keys = scales_of(*p.kv, p.kv->key_tile(p.block, head)) + p.offset;
      const float* values = kv_.shared_values ? keys : scales_of(*p.kv, p.kv->value_tile(p.block, head)) + p.offset;
      std::memcpy(scales.keys + at, keys, size_t(p.length) * 4);
      std::memcpy(scales.values + at, values, size_t(p.length) * 4);
    });
  }

 private:
  // A row in a block, which `length` - 1 others follow there.
  struct Place {
    const KVView* kv;
    int block, offset, length;
  };

  // The row of a position of a walk, or of a place in its list.
  Place place(const Walk& w, int i) const {
    if (!w.view) return {&kv_, w.table[i / kv_.block_size], i % kv_.block_size, kv_.block_size - i % kv_.block_size};
    const QueryView& q = *w.view;
    if (i < q.own) return kept(kv_, w.table, q.first + i, q.own - i);
    i -= q.own;
    if (!entries_) return kept(kv_, w.table, int(q.numbers[i / pool_]) * pool_ + i % pool_, pool_ - i % pool_);
    return q.numbers ? kept(*entries_, w.table, int(q.numbers[i]), 1) : kept(*entries_, w.table, i, INT32_MAX);
  }
  // Row `row` of a layer, of which at most `most` are wanted from there on.
  static Place kept(const KVView& kv, const int32_t* table, int row, int most) {
    const KVRow at = kv.row_of(row);
    const int rest = kv.every == 1 ? kv.block_size - at.offset
                                   : (kv.block_tokens - 1 - ((row + 1) * kv.every - 1) % kv.block_tokens) / kv.every + 1;
    return {&kv, table[at.block], at.offset, min_of(rest, most)};
  }

  // Behind a block's int8 elements.
  static const float* scales_of(const KVView& kv, const char* tile) {
    return reinterpret_cast<const float*>(tile + kv.tile_elements());
  }

  template <class T>
  const T* key_at(const Place& p, int head) const {
    return reinterpret_cast<const T*>(p.kv->key_tile(p.block, head));
  }
  template <class T>
  const T* value_at(const Place& p, int head) const {
    const char* tile = p.kv->value_tile(p.block, head);
    return reinterpret_cast<const T*>(tile) + size_t(p.offset) * size_t(kv_.head_dim);
  }

  // Calls f(place in the tile, row) for each run of the range within one block.
  template <class F>
  void for_runs(const Walk& w, TileRange range, F&& f) const {
    for (int i = range.from; i < range.to;) {
      Place p = place(w, i);
      p.length = min_of(p.length, range.to - i);
      f(i - range.at, p);
      i += p.length;
    }
  }

  static float widen(float x) { return x; }
  static float widen(uint16_t x) { return bf16_to_float(x); }
  template <class E>
  static float widen(E x) {
    return widened_one(x);
  }

  // Copies bytes unchanged: missing elements may be garbage, because their factors are 0.
  template <class T>
  void copy(const Walk& w, int head, TileRange range, int8_t* to_keys, int8_t* to_values) const {
    const size_t H = size_t(kv_.head_dim), W = size_t(kv_.value_dim);
    const size_t steps = size_t(query_steps<int8_t>(kv_.head_dim));
    for_runs(w, range, [&](int first_place, const Place& run) {
      const auto* values = kv_.shared_values ? nullptr : reinterpret_cast<const int8_t*>(run.kv->value_tile(run.block, head));
      const size_t size = size_t(run.kv->block_size);
      for (int i = 0; i < run.length; ++i) {
        const size_t place = size_t(first_place + i), offset = size_t(run.offset + i);
        const int8_t* key = key_at<int8_t>(run, head) + offset * 4;
        int8_t* key_to = to_keys + (place / kLanes * steps * kLanes + place % kLanes) * 4;
        for (size_t step = 0; step < steps; ++step) std::memcpy(key_to + step * kLanes * 4, key + step * size * 4, 4);
        int8_t* value_to = to_values + place / 4 * kLanes * 4 + place % 4;
        for (size_t h = 0; h < W; ++h)
          value_to[(h / kLanes * (kTile / 4) * kLanes + h % kLanes) * 4] =
              values ? values[(offset / 4 * H + h) * 4 + offset % 4] : int8_t(key[h / 4 * size * 4 + h % 4] ^ 0x80);
      }
    });
  }

  // Narrow elements are copied as floats.
  template <class T>
  void copy(const Walk& w, int head, TileRange range, float* to_keys, float* to_values) const {
    if constexpr (std::is_same_v<T, float>) {
      if (kv_.type == KVType::f16) return copy_floats<Half>(w, head, range, to_keys, to_values);
      if (kv_.type == KVType::e4m3) return copy_floats<E4m3>(w, head, range, to_keys, to_values);
      if (kv_.type == KVType::e5m2) return copy_floats<E5m2>(w, head, range, to_keys, to_values);
    }
    copy_floats<T>(w, head, range, to_keys, to_values);
  }

  template <class T>
  void copy_floats(const Walk& walk, int head, TileRange range, float* to_keys, float* to_values) const {
    const size_t H = size_t(kv_.head_dim), W = size_t(kv_.value_dim);
    auto key_to = [&](size_t place) { return to_keys + place / kLanes * H * kLanes + place % kLanes; };
    for_runs(walk, range, [&](int place, const Place& run) {
      const T* keys = key_at<T>(run, head) + run.offset;
      const size_t size = size_t(run.kv->block_size);
      const int length = run.length;
      size_t i = 0;
      for (; place % kLanes == 0 && i + kLanes <= size_t(length); i += kLanes)
        for (size_t h = 0; h < H; ++h) store(key_to(size_t(place) + i) + h * kLanes, load_kv(keys + h * size + i));
      for (; i < size_t(length); ++i)
        for (size_t h = 0; h < H; ++h) key_to(size_t(place) + i)[h * kLanes] = widen(keys[h * size + i]);
      float* to = to_values + size_t(place) * kLanes;
      const T* values = kv_.shared_values ? nullptr : value_at<T>(run, head);
      for (i = 0; i < size_t(length); ++i, to += kLanes) {
        const float* key = key_to(size_t(place) + i);
        size_t w = 0;
        for (; values && w + kLanes <= W; w += kLanes) store(to + w * kTile, load_kv(values + i * H + w));
        for (; w < round_up(W, kLanes); ++w)
          to[w / kLanes * kTile * kLanes + w % kLanes] =
              w >= W ? 0.0f : values ? widen(values[i * H + w]) : key[w * kLanes];
      }
    });
  }

#if defined(QUIRE_BF16_DOT)
  template <class T>
  void copy(const Walk& walk, int head, TileRange range, uint32_t* to_keys, uint32_t* to_values) const {
    const size_t H = size_t(kv_.head_dim), steps = size_t(query_words<uint32_t>(kv_.head_dim));
    auto* halves = reinterpret_cast<uint16_t*>(to_keys);
    // Element h of a copied key is this many elements after its first one.
    auto key_to = [&](int place) {
      return halves + (size_t(place / kLanes) * steps * kLanes + size_t(place % kLanes)) * 2;
    };
    auto element = [](size_t h) { return h / 2 * kLanes * 2 + h % 2; };
    for_runs(walk, range, [&](int place, const Place& run) {
      const T* keys = key_at<T>(run, head) + run.offset;
      const size_t size = size_t(run.kv->block_size);
      const int length = run.length;
      int i = 0;
      for (; place % kLanes == 0 && i + kLanes <= length; i += kLanes)
        for (size_t h = 0; h < H; h += 2) {
          const T *first = keys + h * size + i, *second = h + 1 < H ? first + size : first;
          istore(key_to(place + i) + element(h), load_pairs(first, second, h + 1 < H ? kBothHalves : kFirstHalves));
        }
      for (; i < length; ++i)
        for (size_t h = 0; h < 2 * steps; ++h)
          key_to(place + i)[element(h)] = h < H ? keys[h * size + size_t(i)] : uint16_t{0};
    });
    const size_t W = size_t(kv_.value_dim);
    auto row = [&](int p) { return value_at<T>(place(walk, p), head); };
    for (int p = range.from / 2 * 2; p < range.to; p += 2) {
      const bool has_first = range.sees(p), has_second = range.sees(p + 1);
      uint32_t* to = to_values + size_t(p - range.at) / 2 * kLanes;
      size_t w = 0;
      const T *first = nullptr, *second = nullptr;
      if (!kv_.shared_values) {
        first = row(has_first ? p : p + 1), second = has_second ? row(p + 1) : first;
        const uint32_t which = (has_first ? kFirstHalves : 0) | (has_second ? kSecondHalves : 0);
        for (; w + kLanes <= W; w += kLanes) istore(to + w * (kTile / 2), load_pairs(first + w, second + w, which));
      }
      auto value = [&](bool has, const T* values, int place) -> uint32_t {
        return !has || w >= W ? 0 : values ? values[w] : key_to(place)[element(w)];
      };
      for (; w < round_up(W, kLanes); ++w)
        to[w / kLanes * (kTile / 2) * kLanes + w % kLanes] =
            value(has_first, first, p - range.at) | value(has_second, second, p + 1 - range.at) << 16;
    }
  }
#endif

  const KVView& kv_;
  const KVView* entries_;
  int pool_;
};

}  // namespace quire::QUIRE_ISA
