// One tile of attention: scores, softmax and weighted values of a few query rows against 64 positions. Knows rows;
// knows no block table and no sequence.
//
// Order, in addition to attention_steps.h: the sum of weights runs in 16 lanes (position mod 16); each lane adds the
// tile's four weights as (0 + 16) + (32 + 48).
#pragma once

#include "rowwise/activation.h"
#include "attention/attention_int8.h"
#include "attention/attention_steps.h"
#include "simd/simd.h"

namespace quire::QUIRE_ISA {

// A query row's state: largest score, sum of weights by lane, weighted values; not yet divided. `slope` (added per
// distance), `bias` (added by distance, [-reach, reach]; null: none), `added` (by position; null: none) and `position`
// are the row's own; it sees positions first..last.
struct RowState {
  float best, slope;
  int position, first, last;
  int reach;
  const float* bias;
  const float* added;
  alignas(64) float sum[kLanes];

  // The shift subtracted from scores. If all are -inf, so is the largest: whatever the shift, every weight is 0.
  float shift() const { return best == -__builtin_inff() ? 0.0f : best; }
};

// Shared by all rows of a tile: sizes (`padded` is the value's, rounded up to 16), its first position, soft-cap.
struct TileShape {
  int head_dim, padded, at;
  float cap;  // 0: none
};

alignas(64) constexpr float kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The row's bias of positions at distances `offset`.. from the query; beyond its reach, that of the last distance.
inline V bias_of(const RowState& row, int offset) {
  if (offset >= -row.reach && offset + kLanes - 1 <= row.reach) return load(row.bias + offset);
  alignas(64) float own[kLanes];
  for (int lane = 0; lane < kLanes; ++lane)
    own[lane] = row.bias[max_of(-row.reach, min_of(offset + lane, row.reach))];
  return load(own);
}

// A vector of scores with soft-cap, slope, bias and what is added; `offset` is the distance from the query to the first
// lane's position.
inline V shape_scores(V s, float cap, const RowState& row, int offset) {
  if (cap > 0) s = set1(cap) * tanh(s * set1(1.0f / cap));
  if (row.slope != 0) s = fma(set1(row.slope), set1(float(offset)) + load(kLaneNumbers), s);
  if (row.bias) s = s + bias_of(row, offset);
  return row.added ? s + load(row.added + row.position + offset) : s;
}

// Prepares scores for softmax: those of positions first..last are shaped, others become -inf. Updates the row's largest
// score and returns its change; exp of that is the factor that keeps the row's past.
inline float shape_row(const TileShape& tile, float* scores, int first, int last, RowState& row) {
  const V none = set1(-__builtin_inff());
  const bool plain = tile.cap == 0 && row.slope == 0 && !row.bias && !row.added && first == 0 && last == kTile - 1;
  V s[kTileVectors];
  for (int v = 0; v < kTileVectors; ++v) s[v] = load(scores + v * kLanes);
  if (!plain)
    for (int v = 0; v < kTileVectors; ++v) {
      const int low = first - v * kLanes, high = last + 1 - v * kLanes;  // visible lanes low..high-1
      s[v] = shape_scores(s[v], tile.cap, row, tile.at + v * kLanes - row.position);
      s[v] = select(first_lanes(max_of(0, min_of(high, kLanes))), s[v], none);
      s[v] = select(first_lanes(max_of(0, min_of(low, kLanes))), none, s[v]);
      store(scores + v * kLanes, s[v]);
    }
  const float before = row.best;
  row.best = max_of(before, reduce_max(max(max(s[0], s[1]), max(s[2], s[3]))));
  return before - row.shift();
}

// The scales of a head's int8 keys, or values.
struct HeadScales {
  const float* at[kTileVectors];  // null where no position is visible

  HeadScales(const TileKV<int8_t>& kv, const float* const (&scales)[kTileVectors], int head) {
    for (int v = 0; v < kTileVectors; ++v) at[v] = scales[v] ? of_head(kv, scales[v], head) : nullptr;
  }
};

// Multiplies scores [count][kTile] by the scales of a head's keys, if it has any.
template <class T>
inline void scale_scores(float* scores, int count, const TileKV<T>& kv, int head) {
  if constexpr (std::is_same_v<T, int8_t>) {
    const HeadScales scales(kv, kv.key_scales, head);
    for (int v = 0; v < kTileVectors; ++v)
      for (int r = 0; scales.at[v] && r < count; ++r) {
        float* p = scores + r * kTile + v * kLanes;
        store(p, load(p) * load(scales.at[v]));
      }
  }
}

// Turns shaped scores into weights.
template <class T>
inline void weigh_row(float* scores, float keep, RowState& row) {
  const V shift = set1(row.shift());
  V s[kTileVectors];
  for (int v = 0; v < kTileVectors; ++v) s[v] = exp_below(load(scores + v * kLanes) - shift);
  for (int v = 0; v < kTileVectors; ++v) Steps<T>::store_left(scores, v * kLanes, s[v]);
  store(row.sum, load(row.sum) * set1(keep) + ((s[0] + s[1]) + (s[2] + s[3])));
}

// Query rows of several heads against the same positions: `count` rows per head, the next head's `stride` rows on. q is
// packed in tiles of a head's rows; values are [..][padded].
struct HeadRows {
  const float* q;
  RowState* states;
  float* values;
  int count, stride;

  int at(int head, int row) const { return head * stride + row; }
};

// The tiles in which a head's rows are processed.
template <class T>
struct RowTiles : EqualTiles {
  explicit RowTiles(int count_) : EqualTiles(count_, Steps<T>::kMicroRows) {}
};

// Rows begin..begin+rows-1 of a head; some see positions low..high of a tile, none if high < low.
struct RowTile {
  int begin, rows, low, high;
};

// Adds a tile of positions to all rows. Row r of a head sees its positions first[r]..last[r]; together they form one
// range without holes. `tiles` are the rows of each head, `scores` is scratch of kTile + 1 per row. A head's rows are
// multiplied with one or two vectors of keys, or values, before the next, so that those stay in L1.
template <class T>
void attend_tile(const TileShape& shape, const HeadRows& rows, const TileKV<T>& kv, const RowTile* tiles,
                 int tile_count, const int* first, const int* last, float* scores) {
  using Loops = TileLoops<T>;
  const int all = kv.heads * rows.count, vectors = micro_vectors<T>(tiles[0].rows);
  const int value_vectors = shape.padded / kLanes, steps = query_steps<T>(shape.head_dim);
  const size_t words = size_t(query_words<T>(shape.head_dim));
  float* keep = scores + all * kTile;
  // Tiles for vectors from v on: smaller tiles than the first may take more vectors at once.
  auto for_tiles = [&](int v, auto&& f) {
    for (const RowTile* t = tiles; t < tiles + tile_count; ++t)
      if (t->low <= t->high)
        with_count<Steps<T>::kMicroRows>(t->rows, [&](auto n) {
          if (v % micro_vectors<T>(n) == 0) f(n, *t);
        });
  };
  // A quarter of the next tile's runs is prefetched with a head's scores, half with its weights, the rest with its
  // values.
  constexpr int kRuns = 2 * kTileVectors, kWithScores = kRuns / 4, kWithWeights = kRuns * 3 / 4;
  auto fetch_next = [&](int head, int first_run, int last_run) __attribute__((always_inline)) {  // else gcc drops it
    if constexpr (std::is_same_v<T, int8_t>)
      if (kv.next && head < kv.next->heads) fetch_runs(*kv.next, head, shape.head_dim, first_run, last_run);
  };
  for (int head = 0; head < kv.heads; ++head) {
    const float* q = rows.q + size_t(rows.at(head, 0)) * words;
    float* own = scores + head * rows.count * kTile;
    const Ahead after = after_head(kv, kv.keys, kv.key_stride, shape.head_dim, head, kv.after_keys);
    for (int v = 0; v < kTileVectors; v += vectors)
      for_tiles(v, [&](auto n, const RowTile& t) {
        if (t.high < v * kLanes || t.low >= (v + micro_vectors<T>(n)) * kLanes) return;
        Loops::template score<decltype(n)::value>(q + size_t(t.begin) * words, steps, kv, head, v, after,
                                                  own + t.begin * kTile);
      });
    scale_scores(own, rows.count, kv, head);
    fetch_next(head, 0, kWithScores);
  }
  // In passes, so that rows overlap: a row's weights depend on its largest score.
  auto for_rows = [&](auto&& f) {
    for (int head = 0; head < kv.heads; ++head)
      for (int t = 0; t < tile_count; ++t)
        if (tiles[t].low <= tiles[t].high)
          for (int r = tiles[t].begin; r < tiles[t].begin + tiles[t].rows; ++r)
            f(head * rows.count + r, head, r, rows.states[rows.at(head, r)]);
  };
  for_rows([&](int i, int, int r, RowState& row) {
    keep[i] = shape_row(shape, scores + i * kTile, first[r], last[r], row);
  });
  for (int i = 0; i < all; i += kLanes) store(keep + i, exp_below(load(keep + i)));
  for_rows([&](int i, int head, int r, RowState& row) {
    if (r == 0) fetch_next(head, kWithScores, kWithWeights);
    weigh_row<T>(scores + i * kTile, keep[i], row);
  });
  if constexpr (std::is_same_v<T, int8_t>)
    for_rows([&](int i, int head, int, RowState&) {
      TileLoops<T>::round_weights(scores + i * kTile, HeadScales(kv, kv.value_scales, head).at);
    });
  for (int head = 0; head < kv.heads; ++head) {
    float* out = rows.values + size_t(rows.at(head, 0)) * size_t(shape.padded);
    float *own = scores + head * rows.count * kTile, *kept = keep + head * rows.count;
    const Ahead after = after_head(kv, kv.values, kValueStep<T>, shape.head_dim, head, kv.after_values);
    for (int v = 0; v < value_vectors; v += vectors)
      for_tiles(v, [&](auto n, const RowTile& t) {
        Loops::template add_values<decltype(n)::value>(own + t.begin * kTile, kv, head, t.low, t.high, v, value_vectors,
                                                       after, out + size_t(t.begin) * size_t(shape.padded),
                                                       kept + t.begin);
      });
    fetch_next(head, kWithWeights, kRuns);
  }
}

// Caches in other types are copied to float: compiled once, in kernels/float/attention.cpp.
extern template void attend_tile(const TileShape&, const HeadRows&, const TileKV<float>&, const RowTile*, int, const int*,
                                 const int*, float*);

}  // namespace quire::QUIRE_ISA
