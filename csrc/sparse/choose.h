// The choice of pools: scores of index keys, tile by tile, for a few queries at a time. Knows block tables; knows no thread.
//
// A product is one chain of multiply-adds over head_dim, and heads add up in order, so a score depends on the query and the
// key alone. Only the best are kept.
#pragma once

#include <type_traits>

#include "attention/attention_steps.h"
#include "attention/attention_tile.h"
#include "sparse/choice.h"
#include "sparse/keys.h"

namespace quire::QUIRE_ISA {

constexpr int kChooseRows = 64;  // heads of the queries that share a tile of keys, if a query has fewer
constexpr int kChooseParts = 4;  // tasks per thread if there are few queries

// Some queries of a sequence.
struct QueryRun {
  int seq, first, last;
};

struct ChooseSizes {
  size_t runs, width, queries, tile, rows, scores, choices, thread;
  int parts;  // of keys and queries at once, at most

  ChooseSizes(int tokens, int num_heads, int groups, int head_dim, int top_k, int threads)
      : runs(round_up(size_t(tokens) * sizeof(QueryRun), 64)),
        width(size_t(head_dim)),
        queries(size_t(max_of(1, kChooseRows / num_heads))),
        tile(size_t(kTile) * width),
        rows(queries * size_t(num_heads)),
        scores(rows * kTile),
        choices(queries * size_t(groups) * 2 * size_t(top_k)),
        thread(round_up((tile + rows * width + scores) * 4 + queries * size_t(groups) * sizeof(Choice) + 64, 64) +
               round_up(choices * 8, 64)),
        parts((kChooseParts + 1) * threads) {}
  size_t slot() const { return choices / 2 * 8; }  // what a part leaves: the best of each query and group
  size_t bytes(int threads) const {
    return runs + size_t(threads) * thread + size_t(parts) * (round_up(slot(), 64) + round_up(choices * 4, 64));
  }
};

class Chooser {
 public:
  Chooser(const ChooseArgs& a, int threads)
      : a_(a),
        sizes_(a.cu_q[a.num_seqs], a.num_heads, a.groups, a.kv.head_dim, a.top_k, threads),
        memory_(static_cast<char*>(a.workspace) + sizes_.runs) {}

  char* thread_memory(int thread) const { return memory_ + size_t(thread) * sizes_.thread; }

  const ChooseSizes& sizes() const { return sizes_; }
  int each() const { return int(sizes_.queries); }
  int numbers() const { return a_.top_k + (a_.tail ? 1 : 0); }

  // Keys that the query at a position sees, and pools that it may choose of.
  int keys_of(int position) const { return a_.kv.every == 1 ? position + 1 : (position + 1) / a_.kv.every; }
  int pools_of(int position) const { return a_.kv.every == 1 ? position / a_.size + 1 : keys_of(position); }
  bool chooses(int position) const { return pools_of(position) > a_.top_k; }
  int position(int seq, int token) const { return a_.kv_len[seq] - a_.cu_q[seq + 1] + token; }
  // Keys whose pools begin and end with a tile.
  int unit() const {
    if (a_.kv.every > 1) return kTile;
    int tiles = 1;
    while (tiles * kTile % a_.size) ++tiles;
    return tiles * kTile;
  }

  // The query chooses all that it can.
  void write_all(int seq, int token) const {
    const int p = position(seq, token), pools = pools_of(p);
    for (int g = 0; g < a_.groups; ++g) {
      float* out = row_of(token, g);
      for (int i = 0; i < pools; ++i) out[i] = float(i);
      int at = pools;
      if (const int more = further(p); more >= 0) out[at++] = float(more);
      while (at < numbers()) out[at++] = -1.0f;
    }
  }

  void write(int seq, int token, int group, const uint64_t* best, int count, uint64_t* bits) const {
    const int p = position(seq, token);
    write_numbers(best, count, pools_of(p), further(p), numbers(), bits, row_of(token, group));
  }

  // The best of keys low..high-1 for a run of queries; f(token, group, choice) gets each.
  template <class F>
  void run(const QueryRun& r, int low, int high, int thread, F&& f) const {
    const auto [seq, first, last] = r;
    const int N = a_.num_heads, D = a_.kv.head_dim, count = last - first;
    char* memory = thread_memory(thread);
    auto* keys = reinterpret_cast<float*>(memory);
    float *packed = keys + sizes_.tile, *scores = packed + sizes_.rows * sizes_.width;
    auto* choices = reinterpret_cast<Choice*>(round_up(reinterpret_cast<size_t>(scores + sizes_.scores), 16));
    auto* kept = reinterpret_cast<uint64_t*>(memory + sizes_.thread - round_up(sizes_.choices * 8, 64));
    for (int i = 0; i < count * a_.groups; ++i) choices[i].begin(kept + size_t(i) * 2 * size_t(a_.top_k), a_.top_k);
    const RowTiles<float> tiles(count * N);
    pack(first, tiles, packed);
    const int32_t* table = a_.block_table + size_t(a_.slots[seq]) * a_.block_table_stride;
    high = min_of(high, keys_of(position(seq, last - 1)));
    for (int at = low; at < high; at += kTile) {
      copy_tile(table, at, min_of(high, at + kTile), keys);
      score(tiles, packed, keys, D, scores);
      for (int i = 0; i < count; ++i) {
        const int p = position(seq, first + i), seen = min_of(kTile, min_of(high, keys_of(p)) - at);
        if (seen <= 0 || !chooses(p)) continue;
        for (int g = 0; g < a_.groups; ++g)
          add(choices[i * a_.groups + g], scores + size_t(i * N) * kTile, first + i, g, at, seen, p);
      }
    }
    for (int i = 0; i < count; ++i)
      for (int g = 0; g < a_.groups && chooses(position(seq, first + i)); ++g) {
        choices[i * a_.groups + g].close();
        f(first + i, g, choices[i * a_.groups + g]);
      }
  }

 private:
  float* row_of(int token, int group) const {
    return a_.out + (size_t(token) * size_t(a_.groups) + size_t(group)) * size_t(numbers());
  }
  // The query's own pool if that is not whole; -1: none.
  int further(int position) const { return a_.tail && a_.kv.every > 1 && (position + 1) % a_.size ? position / a_.size : -1; }

  // Queries from `first` on, head by head, in tiles of rows: [D][rows] each.
  void pack(int first, const RowTiles<float>& tiles, float* packed) const {
    const size_t D = sizes_.width, N = size_t(a_.num_heads);
    for (int t = 0; t < tiles.count; ++t) {
      const int begin = tiles.begin(t), rows = tiles.begin(t + 1) - begin;
      const float* from = a_.q + (size_t(first) * N + size_t(begin)) * D;
      transpose(from, D, rows, int(D), packed + size_t(begin) * D, size_t(rows));
    }
  }

  // Keys low..high-1 as vectors of 16 keys, [kTileVectors][D][16].
  void copy_tile(const int32_t* table, int low, int high, float* to) const {
    const size_t D = sizes_.width;
    for (int k = low; k < high;) {
      const KVRow row = a_.kv.row_of(k);
      const int place = k - low, most = min_of(kLanes - place % kLanes, high - k);
      int length = 1;
      while (length < most && row_follows(k + length, row, length)) ++length;
      float* at = to + size_t(place / kLanes) * D * kLanes + place % kLanes;
      with_keys(a_.kv, table[row.block], [&](auto&& get) QUIRE_INLINE_LAMBDA {
        auto copy = [&](int count) QUIRE_INLINE_LAMBDA {
          for (size_t h = 0; h < D; ++h)
            for (int i = 0; i < count; ++i) at[h * kLanes + size_t(i)] = get(h, size_t(row.offset + i));
        };
        if (length == kLanes) copy(kLanes);
        else copy(length);
      });
      k += length;
    }
  }
  bool row_follows(int k, const KVRow& row, int length) const {
    const KVRow next = a_.kv.row_of(k);
    return next.block == row.block && next.offset == row.offset + length;
  }

  // Products [rows][kTile] of all rows with a tile; lanes beyond its keys are garbage.
  void score(const RowTiles<float>& tiles, const float* packed, const float* keys, int D, float* scores) const {
    TileKV<float> kv{};
    kv.key_stride = kLanes;
    Ahead after{};
    for (int v = 0; v < kTileVectors; ++v) kv.keys[v] = keys + v * D * kLanes, after.at[v] = bytes(keys);
    after.stride = 0;
    for (int t = 0; t < tiles.count; ++t) {
      const int begin = tiles.begin(t), rows = tiles.begin(t + 1) - begin;
      with_count<Steps<float>::kMicroRows>(rows, [&](auto n) {
        constexpr int R = decltype(n)::value;
        for (int v = 0; v < kTileVectors; v += micro_vectors<float>(R))
          TileLoops<float>::score<R>(packed + size_t(begin) * sizes_.width, D, kv, 0, v, after, scores + begin * kTile);
      });
    }
  }

  // Scores of the first `seen` keys from `at` on for a query and group, by the products of its heads.
  void add(Choice& choice, const float* products, int token, int group, int at, int seen, int position) const {
    const int heads = a_.num_heads / a_.groups, first = group * heads;
    const float* weights = a_.weights ? a_.weights + size_t(token) * size_t(a_.num_heads) : nullptr;
    V total[kTileVectors];
    for (V& v : total) v = set1(0);
    for (int h = first; h < first + heads; ++h)
      for (int v = 0; v < kTileVectors; ++v) {
        V s = load(products + h * kTile + v * kLanes) * set1(a_.scale);
        if (a_.relu) s = max(s, set1(0));
        total[v] = weights ? fma(set1(weights[h]), s, total[v]) : total[v] + s;
      }
    alignas(64) float scores[kTile];
    for (int v = 0; v < kTileVectors; ++v) store(scores + v * kLanes, total[v]);
    if (a_.kv.every > 1 || a_.size == 1) {
      for (int i = 0; i < seen; ++i) choice.add(candidate(scores[i], at + i));
      return;
    }
    for (int i = 0; i < seen;) {
      const int pool = (at + i) / a_.size, end = min_of(seen, (pool + 1) * a_.size - at);
      float best = scores[i];
      for (++i; i < end; ++i) best = scores[i] > best || best != best ? scores[i] : best;
      add_pool(choice, pool, best, at + i, position);
    }
  }

  // Part of a pool's keys, up to `end`: what is kept of it grows until the pool, or what the query sees, ends.
  void add_pool(Choice& choice, int pool, float best, int end, int position) const {
    choice.best = choice.pool == pool && !(best > choice.best) ? choice.best : best;
    choice.pool = pool;
    if (end % a_.size && end != position + 1) return;
    const bool near = pool > position / a_.size - a_.local;
    choice.add(candidate(near ? __builtin_inff() : choice.best, pool));
    choice.pool = -1;
  }

  const ChooseArgs& a_;
  ChooseSizes sizes_;
  char* memory_;
};

}  // namespace quire::QUIRE_ISA
