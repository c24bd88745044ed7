// One tile of attention: scores, softmax and weighted values of a few query rows against 64 positions. Knows registers
// and pointers; knows no block table and no sequence.
//
// Order, which is the same however rows and tiles are grouped: a score is one chain of multiply-adds over head_dim; an
// output element one chain over positions; the sum of weights runs in 16 lanes (position mod 16), each lane adding the
// tile's four weights as (0 + 16) + (32 + 48).
#pragma once

#include "activation.h"
#include "simd.h"
#include "simd_int.h"

namespace quire::QUIRE_ISA {

constexpr int kTile = 64;                   // positions, aligned to absolute position 0
constexpr int kTileVectors = kTile / kLanes;

#if defined(QUIRE_AVX512)
constexpr int kMicroRows = 6, kMicroVectors = 4;  // 24 accumulators, 4 loads, 1 broadcast of 32 registers
#else
constexpr int kMicroRows = 2, kMicroVectors = 2;  // of 16 registers of half a V
#endif

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

// c[r][v] = sum over i of a[r][i] * b(i, v), starting from c[r][v] * keep[r] where Resume, else from 0.
template <int R, int N, bool Resume, class B>
inline __attribute__((always_inline)) void multiply(const float* a, size_t a_stride, int length, B b, float* c,
                                                    size_t c_stride, const float* keep) {
  V sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      if constexpr (Resume) sum[r][v] = load(c + size_t(r) * c_stride + size_t(v) * kLanes) * set1(keep[r]);
      else sum[r][v] = set1(0.0f);
    }
  for (int i = 0; i < length; ++i) {
    V right[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) right[v] = b(i, v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V left = set1(a[size_t(r) * a_stride + size_t(i)]);
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
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

// Keys: vector v holds positions 16 v .. 16 v + 15 at element h as keys[v] + h * stride. Null: no position is visible.
template <class T>
struct TileKV {
  const T* keys[kTileVectors];
  size_t key_stride;
  const T* values[kTile];  // rows of head_dim rounded up to 16; null where not visible
  const TileScales* scales = nullptr;  // of int8
};

// What a query row has gathered: greatest score, sum of weights by lane, weighted values. Not yet divided.
// `slope` and `position` are the row's own: what a score gains by distance, and where its query stands.
struct RowState {
  float best, slope;
  int position;
  alignas(64) float sum[kLanes];
};

template <int R, class T>
void score_rows(const float* q, int head_dim, const TileKV<T>& kv, float* scores) {
  for (int v = 0; v < kTileVectors;) {
    if (!kv.keys[v]) {
      ++v;
      continue;
    }
    bool full = v % kMicroVectors == 0;
    for (int i = 0; full && i < kMicroVectors; ++i) full = kv.keys[v + i] != nullptr;
    const size_t stride = kv.key_stride;
    if (full) {
      const T* keys[kMicroVectors];
      for (int i = 0; i < kMicroVectors; ++i) keys[i] = kv.keys[v + i];
      multiply<R, kMicroVectors, false>(
          q, size_t(head_dim), head_dim, [&](int h, int i) { return load_kv(keys[i] + size_t(h) * stride); },
          scores + v * kLanes, kTile, nullptr);
      v += kMicroVectors;
    } else {
      const T* keys = kv.keys[v];
      multiply<R, 1, false>(
          q, size_t(head_dim), head_dim, [&](int h, int) { return load_kv(keys + size_t(h) * stride); },
          scores + v * kLanes, kTile, nullptr);
      ++v;
    }
  }
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

// Scores of positions first..last of the tile become weights, 0 elsewhere; returns what the row keeps of its past.
inline float softmax_row(const TileShape& tile, float* scores, int first, int last, RowState& row) {
  if (first > last) {
    for (int v = 0; v < kTileVectors; ++v) store(scores + v * kLanes, set1(0.0f));
    return 1.0f;
  }
  const V none = set1(-__builtin_inff());
  V s[kTileVectors];
  for (int v = 0; v < kTileVectors; ++v) {
    const int low = first - v * kLanes, high = last + 1 - v * kLanes;  // visible lanes low..high-1
    s[v] = shape_scores(load(scores + v * kLanes), tile.cap, row.slope, tile.at + v * kLanes - row.position);
    if (low > 0 || high < kLanes) {
      s[v] = select(first_lanes(max_of(0, min_of(high, kLanes))), s[v], none);
      s[v] = select(first_lanes(max_of(0, min_of(low, kLanes))), none, s[v]);
    }
  }
  const float best = max_of(row.best, max_lane(max(max(s[0], s[1]), max(s[2], s[3]))));
  // All scores -inf: whatever the shift, every weight is 0.
  const float shift = best == -__builtin_inff() ? 0.0f : best;
  const V top = set1(shift);
  for (int v = 0; v < kTileVectors; ++v) {
    s[v] = exp(s[v] - top);
    store(scores + v * kLanes, s[v]);
  }
  alignas(64) float keep[kLanes];
  store(keep, exp(set1(row.best - shift)));
  row.best = best;
  store(row.sum, load(row.sum) * load(keep) + ((s[0] + s[1]) + (s[2] + s[3])));
  return keep[0];
}

template <int R, int N, class T>
inline void add_values(const float* weights, const T* const* values, int first, int last, int at, float* out,
                       size_t out_stride, const float* keep) {
  multiply<R, N, true>(
      weights + first, kTile, last + 1 - first,
      [&](int j, int v) { return load_kv(values[first + j] + at + v * kLanes); }, out + at, out_stride, keep);
}

// Adds the tile to R rows. Row r sees positions first[r]..last[r] of the tile; those of all rows lie in one range
// without holes.
template <int R, class T>
__attribute__((noinline)) void attend_rows(const TileShape& tile, const float* q, const TileKV<T>& kv, const int* first,
                                           const int* last, RowState* rows, float* out) {
  const int padded = tile.padded;
  alignas(64) float scores[R * kTile];
  float keep[R];
  score_rows<R>(q, tile.head_dim, kv, scores);
  if (kv.scales) scale_rows(scores, R, kv.scales->keys);
  int low = kTile, high = -1;
  for (int r = 0; r < R; ++r) {
    keep[r] = softmax_row(tile, scores + r * kTile, first[r], last[r], rows[r]);
    if (first[r] <= last[r]) low = min_of(low, first[r]), high = max_of(high, last[r]);
  }
  if (kv.scales) scale_rows(scores, R, kv.scales->values);
  int at = 0;
  for (; at + kMicroVectors * kLanes <= padded; at += kMicroVectors * kLanes)
    add_values<R, kMicroVectors>(scores, kv.values, low, high, at, out, size_t(padded), keep);
  for (; at < padded; at += kLanes) add_values<R, 1>(scores, kv.values, low, high, at, out, size_t(padded), keep);
}

template <class T>
void attend_tile(const TileShape& tile, const float* q, int count, const TileKV<T>& kv, const int* first,
                 const int* last, RowState* rows, float* out) {
  for (int r = 0; r < count;) {
    const int n = min_of(count - r, kMicroRows);
    const float* qr = q + size_t(r) * size_t(tile.head_dim);
    float* o = out + size_t(r) * size_t(tile.padded);
    auto call = [&](auto kernel) { kernel(tile, qr, kv, first + r, last + r, rows + r, o); };
    if constexpr (kMicroRows == 6) {
      if (n == 6) call(attend_rows<6, T>);
      if (n == 5) call(attend_rows<5, T>);
      if (n == 4) call(attend_rows<4, T>);
      if (n == 3) call(attend_rows<3, T>);
    }
    if (n == 2) call(attend_rows<2, T>);
    if (n == 1) call(attend_rows<1, T>);
    r += n;
  }
}

}  // namespace quire::QUIRE_ISA
