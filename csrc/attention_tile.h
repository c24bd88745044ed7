// One tile of attention: scores, softmax and weighted values of a few query rows against 64 positions. Knows registers
// and pointers; knows no block table and no sequence.
//
// Order, which is the same however rows and tiles are grouped: a score is one chain of multiply-adds over head_dim; an
// output element one chain over positions; the sum of weights runs in 16 lanes (position mod 16), each lane adding the
// tile's four weights as (0 + 16) + (32 + 48).
#pragma once

#include <type_traits>

#include "activation.h"
#include "simd.h"
#include "simd_int.h"

namespace quire::QUIRE_ISA {

constexpr int kTile = 64;                   // positions, aligned to absolute position 0
constexpr int kTileVectors = kTile / kLanes;

// Query rows are worked on in tiles of at most kMicroRows, which meet micro_vectors() vectors of positions or values
// at a time: as many sums as there are registers.
#if defined(QUIRE_AVX512)
constexpr int kMicroRows = 14;
constexpr int micro_vectors(int rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int kMicroRows = 2;
constexpr int micro_vectors(int) { return 2; }
#endif
// Rows that meet keys and values where they lie in the cache; for more of them small types are widened once.
constexpr int kDirectRows = kMicroRows < 8 ? kMicroRows : 8;

inline V load_kv(const float* p) { return load(p); }
inline V load_kv(const uint16_t* p) { return load_bf16(p); }
inline V load_kv(const int8_t* p) { return load_int8(p); }

inline float max_lane(V v) {
#if defined(QUIRE_AVX512)
  return _mm512_reduce_max_ps(v.r);
#else
  return reduce_max(v);
#endif
}

// c[r][v] = sum over i of left(r, i) * right(i, v), starting from c[r][v] * keep[r] where Resume, else from 0.
// Where Fetch, what is at later(i, v) comes into L2 meanwhile. (The prefetch stands here: gcc takes a function of nothing
// else for one without effect.)
template <int R, int N, bool Resume, bool Fetch, class Left, class Right, class Later>
inline __attribute__((always_inline)) void multiply(Left left, int length, Right right, Later later, float* c,
                                                    size_t c_stride, const float* keep) {
  V sum[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      if constexpr (Resume) sum[r][v] = load(c + size_t(r) * c_stride + size_t(v) * kLanes) * set1(keep[r]);
      else sum[r][v] = set1(0.0f);
    }
  for (int i = 0; i < length; ++i) {
    V shared[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      shared[v] = right(i, v);
      if constexpr (Fetch) __builtin_prefetch(later(i, v), 0, 2);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const V own = set1(left(r, i));
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sum[r][v] = fma(own, shared[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) store(c + size_t(r) * c_stride + size_t(v) * kLanes, sum[r][v]);
}

// Of int8 keys and values: a scale for each position, 0 where not visible. Scores and weights are multiplied by them.
struct TileScales {
  alignas(64) float keys[kTile];
  alignas(64) float values[kTile];
};

inline void scale_rows(float* rows, int count, const float* scales) {
  for (int r = 0; r < count; ++r)
    for (int i = 0; i < kTile; i += kLanes) store(rows + r * kTile + i, load(rows + r * kTile + i) * load(scales + i));
}

// Vector v of the keys holds positions 16 v .. 16 v + 15, element h at keys[v] + h * key_stride; null: none is visible.
// Vector v of position i's values is at values[i] + v * value_stride; null where i is not visible.
template <class T>
struct TileKV {
  const T* keys[kTileVectors];
  size_t key_stride;
  const T* values[kTile];
  size_t value_stride;
  const TileScales* scales = nullptr;  // of int8
  const TileKV* next = nullptr;        // which comes into L2 meanwhile

  // Small types are read where they lie in the cache, floats most often from copies.
  static constexpr bool kFetch = !std::is_same_v<T, float>;
};

// What a query row has gathered: greatest score, sum of weights by lane, weighted values. Not yet divided.
// `slope` and `position` are the row's own: what a score gains by distance, and where its query stands; it sees positions
// first..last.
struct RowState {
  float best, slope;
  int position, first, last;
  alignas(64) float sum[kLanes];
};

// Calls f with `n`, 1..Most, as a constant.
template <int Most, class F>
inline __attribute__((always_inline)) void with_count(int n, F&& f) {
  if constexpr (Most > 1)
    if (n < Most) return with_count<Most - 1>(n, f);
  f(std::integral_constant<int, Most>{});
}

// Scores [R][kTile] of the tile's vectors from v on, micro_vectors(R) of them. q is packed [head_dim][R].
template <int R, class T>
__attribute__((noinline)) void score_rows(const float* q, int head_dim, const TileKV<T>& kv, int v, float* scores) {
  constexpr int N = micro_vectors(R);
  const size_t stride = kv.key_stride;
  auto row = [&](int r, int h) { return q[size_t(h) * R + size_t(r)]; };
  int end = v + N;
  while (v < end && !kv.keys[v]) ++v;
  while (v < end && !kv.keys[end - 1]) --end;
  if (v == end) return;
  with_count<N>(end - v, [&](auto count) {
    constexpr int C = decltype(count)::value;
    const T *keys[C], *next[C];
    for (int i = 0; i < C; ++i) keys[i] = kv.keys[v + i], next[i] = kv.next ? kv.next->keys[v + i] : keys[i];
    auto key = [&](int h, int i) { return load_kv(keys[i] + size_t(h) * stride); };
    auto later = [&](int h, int i) { return next[i] + size_t(h) * stride; };
    multiply<R, C, false, TileKV<T>::kFetch>(row, head_dim, key, later, scores + v * kLanes, kTile, nullptr);
  });
}

// What all rows of a tile share: sizes (`padded` is the value's, rounded up to 16), the tile's first position, soft-cap.
struct TileShape {
  int head_dim, padded, at;
  float cap;  // 0: none
};

alignas(64) constexpr float kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// A vector of scores with soft-cap and slope; `offset` is the distance from the query to the first lane's position.
inline V shape_scores(V s, float cap, float slope, int offset) {
  if (cap > 0) s = set1(cap) * tanh(s * set1(1.0f / cap));
  if (slope != 0) s = fma(set1(slope), set1(float(offset)) + load(kLaneNumbers), s);
  return s;
}

// Scores of positions first..last become what softmax is taken of, others -inf; returns the greatest.
inline float shape_row(const TileShape& tile, float* scores, int first, int last, const RowState& row) {
  const V none = set1(-__builtin_inff());
  const bool plain = tile.cap == 0 && row.slope == 0 && first == 0 && last == kTile - 1;
  V s[kTileVectors];
  for (int v = 0; v < kTileVectors; ++v) s[v] = load(scores + v * kLanes);
  if (!plain)
    for (int v = 0; v < kTileVectors; ++v) {
      const int low = first - v * kLanes, high = last + 1 - v * kLanes;  // visible lanes low..high-1
      s[v] = shape_scores(s[v], tile.cap, row.slope, tile.at + v * kLanes - row.position);
      s[v] = select(first_lanes(max_of(0, min_of(high, kLanes))), s[v], none);
      s[v] = select(first_lanes(max_of(0, min_of(low, kLanes))), none, s[v]);
      store(scores + v * kLanes, s[v]);
    }
  return max_lane(max(max(s[0], s[1]), max(s[2], s[3])));
}

// Shaped scores, the greatest of which is given, become weights; returns what the row keeps of its past.
inline float weigh_row(float* scores, float greatest, RowState& row) {
  const float best = max_of(row.best, greatest);
  // All scores -inf: whatever the shift, every weight is 0.
  const float shift = best == -__builtin_inff() ? 0.0f : best;
  const V top = set1(shift);
  V s[kTileVectors];
  for (int v = 0; v < kTileVectors; ++v) {
    s[v] = exp(load(scores + v * kLanes) - top);
    store(scores + v * kLanes, s[v]);
  }
  const V sum = (s[0] + s[1]) + (s[2] + s[3]);
  if (row.best == best) {  // most often: the past keeps all it has
    store(row.sum, load(row.sum) + sum);
    return 1.0f;
  }
  alignas(64) float keep[kLanes];
  store(keep, exp(set1(row.best - shift)));
  row.best = best;
  store(row.sum, load(row.sum) * load(keep) + sum);
  return keep[0];
}

// Adds the values of positions first..last times the rows' weights [R][kTile] to out [R][padded], vectors from v on:
// micro_vectors(R), or what is left of `vectors`.
template <int R, class T>
__attribute__((noinline)) void add_values(const float* weights, const TileKV<T>& kv, int first, int last, int v,
                                          int vectors, float* out, const float* keep) {
  constexpr int N = micro_vectors(R);
  const size_t out_stride = size_t(vectors) * kLanes, stride = kv.value_stride;
  auto weight = [&](int r, int i) { return weights[r * kTile + first + i]; };
  const T *const *values = kv.values + first, *const *next = (kv.next ? kv.next : &kv)->values + first;
  const size_t offset = size_t(v) * stride;
  auto value = [&](int i, int n) { return load_kv(values[i] + offset + size_t(n) * stride); };
  with_count<N>(min_of(N, vectors - v), [&](auto count) {
    auto later = [&](int i, int n) { return next[i] + offset + size_t(n) * stride; };
    multiply<R, decltype(count)::value, true, TileKV<T>::kFetch>(weight, last + 1 - first, value, later, out + v * kLanes,
                                                                 out_stride, keep);
  });
}

// Of a job's query rows.
struct RowTiles : EqualTiles {
  explicit RowTiles(int count_) : EqualTiles(count_, kMicroRows) {}
};

// Adds a tile of positions to all rows. Row r sees positions first[r]..last[r] of it; those of all rows lie in one
// range without holes. q is packed by tiles of rows; scores [rows][kTile] and keep [rows] are scratch. All rows meet
// one or two vectors of keys, or of values, before the next: those stay in L1.
template <class T>
void attend_tile(const TileShape& shape, const float* q, const RowTiles& tiles, const TileKV<T>& kv, const int* first,
                 const int* last, RowState* rows, float* scores, float* keep, float* out) {
  const int vectors = micro_vectors(tiles.begin(1)), value_vectors = shape.padded / kLanes;
  // f(rows, first row, first position, last position) for each tile of rows that sees positions.
  auto for_tiles = [&](auto&& f) {
    for (int t = 0; t < tiles.count; ++t) {
      const int begin = tiles.begin(t), end = tiles.begin(t + 1);
      int low = kTile, high = -1;
      for (int r = begin; r < end; ++r)
        if (first[r] <= last[r]) low = min_of(low, first[r]), high = max_of(high, last[r]);
      if (low <= high) with_count<kMicroRows>(end - begin, [&](auto n) { f(n, begin, low, high); });
    }
  };
  for (int v = 0; v < kTileVectors; v += vectors)
    for_tiles([&](auto n, int begin, int low, int high) {
      if (high < v * kLanes || low >= (v + vectors) * kLanes) return;
      score_rows<decltype(n)::value>(q + size_t(begin) * size_t(shape.head_dim), shape.head_dim, kv, v,
                                     scores + begin * kTile);
    });
  if (kv.scales) scale_rows(scores, tiles.rows, kv.scales->keys);
  // In two passes, so that rows overlap: a row's weights wait for its greatest score.
  for (int r = 0; r < tiles.rows; ++r) keep[r] = shape_row(shape, scores + r * kTile, first[r], last[r], rows[r]);
  for (int r = 0; r < tiles.rows; ++r) keep[r] = weigh_row(scores + r * kTile, keep[r], rows[r]);
  if (kv.scales) scale_rows(scores, tiles.rows, kv.scales->values);
  for (int v = 0; v < value_vectors; v += vectors)
    for_tiles([&](auto n, int begin, int low, int high) {
      add_values<decltype(n)::value>(scores + begin * kTile, kv, low, high, v, value_vectors,
                                     out + size_t(begin) * size_t(shape.padded), keep + begin);
    });
}

}  // namespace quire::QUIRE_ISA
