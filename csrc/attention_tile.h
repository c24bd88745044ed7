// One tile of attention: scores, softmax and weighted values of a few query rows against 64 positions. Knows registers
// and pointers; knows no block table and no sequence.
//
// Order, which is the same however rows and tiles are grouped: a score is one chain of multiply-adds over head_dim; an
// output element one chain over positions; the sum of weights runs in 16 lanes (position mod 16), each lane adding the
// tile's four weights as (0 + 16) + (32 + 48). Where bfloat16 is multiplied in pairs, chains are of pairs: of elements
// 2 h and 2 h + 1, of positions 2 i and 2 i + 1, of which one that is not seen counts as 0.
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

constexpr uint32_t kBothHalves = 0xffffffff, kFirstHalves = 0x55555555, kSecondHalves = 0xaaaaaaaa;

// How keys and values that are held as T are multiplied: `kColumns` elements of a head, or positions, a step, with
// queries and weights as Left. At least kAheadBytes of keys, or values, are met while others come from memory: as many
// as were fastest.
struct SingleSteps {
  using Left = float;
  static constexpr int kColumns = 1;
  static constexpr size_t kAheadBytes = size_t{8} << 10;

  template <class T>
  static inline V load(const T* p, size_t, uint32_t) {
    return load_kv(p);
  }
  static inline V add(V sum, Left left, V right) { return fma(set1(left), right, sum); }
  static inline void store_left(float* to, int i, V v) { store(to + i, v); }
};

template <class T>
struct Steps : SingleSteps {};

#if defined(QUIRE_BF16_DOT)
// bfloat16, with queries and weights rounded to it: in the cache, where the second element of a pair is half a step
// after the first, or copied as pairs.
struct PairedSteps {
  using Left = uint32_t;
  static constexpr int kColumns = 2;
  static constexpr size_t kAheadBytes = size_t{4} << 10;

  static inline I load(const uint16_t* p, size_t step, uint32_t halves) { return load_pairs(p, p + step / 2, halves); }
  static inline I load(const uint32_t* p, size_t, uint32_t) { return iload(p); }
  static inline V add(V sum, Left left, I right) { return dot_pairs(sum, iset1(int32_t(left)), right); }
  static inline void store_left(float* to, int i, V v) { store_halves(reinterpret_cast<uint16_t*>(to) + i, v); }
};

template <>
struct Steps<uint16_t> : PairedSteps {};
template <>
struct Steps<uint32_t> : PairedSteps {};
#endif

// Elements of a head that a step of values meets.
template <class T>
constexpr size_t kValueStep = kLanes * Steps<T>::kColumns;

// Words of 4 bytes of a query that meets keys held as T.
template <class T>
constexpr int query_words(int head_dim) {
  return (head_dim + Steps<T>::kColumns - 1) / Steps<T>::kColumns;
}

// Vectors that a loop meets, N at each of `steps` steps: vector v of the first step is at from[v], those of the next
// `stride` elements on. Meanwhile what lies at later[v], and `later_stride` bytes on each, comes into L1.
template <int N, class T>
struct Vectors {
  const T* from[N];
  const char* later[N];
  size_t stride, later_stride;
  int steps;
  uint32_t halves = kBothHalves;  // of pairs, those which count
};

// c[r][v] = sum over steps begin..end-1 of left [R][.] at (r, i) * vector v of step i, starting from c[r][v] * keep[r]
// where Resume, else from 0. vectors_at(i) are those of step i and after. (The prefetch stands here: gcc takes a
// function of nothing else for one without effect.)
template <int R, int N, bool Resume, class T, class LeftAt, class VectorsAt>
inline __attribute__((always_inline)) void multiply(LeftAt left, int begin, int end, VectorsAt vectors_at, float* c,
                                                    size_t c_stride, const float* keep) {
  V sum[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      if constexpr (Resume) sum[r][v] = load(c + size_t(r) * c_stride + size_t(v) * kLanes) * set1(keep[r]);
      else sum[r][v] = set1(0.0f);
    }
  for (int i = begin; i < end;) {
    const Vectors<N, T>& vectors = vectors_at(i);
    const int stop = min_of(end, i + vectors.steps);
    for (size_t at = 0, later = 0; i < stop; ++i, at += vectors.stride, later += vectors.later_stride) {
      decltype(Steps<T>::load(vectors.from[0], 0, 0)) shared[N];
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        shared[v] = Steps<T>::load(vectors.from[v] + at, vectors.stride, vectors.halves);
        __builtin_prefetch(vectors.later[v] + later);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto own = left(r, i);
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) sum[r][v] = Steps<T>::add(sum[r][v], own, shared[v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) store(c + size_t(r) * c_stride + size_t(v) * kLanes, sum[r][v]);
}

// What is met after some keys or values, and comes into L1 while they are met: of run v step i at[v] + i * stride.
struct Ahead {
  const char* at[kTileVectors];
  size_t stride;  // bytes
};

// Keys and values of a tile, of one head or of some whose blocks lie side by side: the next head's are `head_stride`
// elements on. Positions 16 v .. 16 v + 15 are a run; where none of them is visible, its pointers are null. Of run v
// step h of the keys is at keys[v] + h * key_stride, vector w of step i of the values at
// values[v] + i * row_stride + w * value_stride.
template <class T>
struct TileKV {
  const T *keys[kTileVectors], *values[kTileVectors];
  size_t key_stride, row_stride, value_stride, head_stride;
  int heads = 1;
  bool scaled = false;  // of int8: scores and weights are multiplied by scales, by position
  const float *key_scales[kTileVectors], *value_scales[kTileVectors];
  Ahead after_keys, after_values;  // what is met after the last head's keys, and after its values
};

inline const char* bytes(const void* p) { return static_cast<const char*>(p); }

// Pointer `p` of the first head for head `head`.
template <class T, class P>
inline const P* of_head(const TileKV<T>& kv, const P* p, int head) {
  return reinterpret_cast<const P*>(reinterpret_cast<const T*>(p) + size_t(head) * kv.head_stride);
}

// What is met some heads after the keys, or the values, of a head: a later head's, `stride` elements apart, or those of
// a head of what comes after the last one.
template <class T>
inline Ahead after_head(const TileKV<T>& kv, const T* const (&own)[kTileVectors], size_t stride, int head_dim, int head,
                        const Ahead& last) {
  const size_t head_bytes = size_t(kTile) * size_t(head_dim) * sizeof(T);
  const int later = head + int((Steps<T>::kAheadBytes + head_bytes - 1) / head_bytes), over = later - kv.heads;
  Ahead result = last;
  if (over >= 0) {
    for (const char*& at : result.at) at += size_t(min_of(over, kv.heads - 1)) * kv.head_stride * sizeof(T);
    return result;
  }
  for (int v = 0; v < kTileVectors; ++v) result.at[v] = own[v] ? bytes(of_head(kv, own[v], later)) : nullptr;
  result.stride = stride * sizeof(T);
  return result;
}

// What a query row has gathered: greatest score, sum of weights by lane, weighted values. Not yet divided.
// `slope` and `position` are the row's own: what a score gains by distance, and where its query stands; it sees
// positions first..last.
struct RowState {
  float best, slope;
  int position, first, last;
  alignas(64) float sum[kLanes];

  // What is taken off scores. Where all are -inf, so is the greatest: whatever the shift, every weight is 0.
  float shift() const { return best == -__builtin_inff() ? 0.0f : best; }
};

// Calls f with `n`, 1..Most, as a constant.
template <int Most, class F>
inline __attribute__((always_inline)) void with_count(int n, F&& f) {
  if constexpr (Most > 1)
    if (n < Most) return with_count<Most - 1>(n, f);
  f(std::integral_constant<int, Most>{});
}

// Scores [R][kTile] of a head and the tile's vectors from v on, micro_vectors(R) of them. q is packed [steps][R].
template <int R, class T>
__attribute__((noinline)) void score_rows(const float* q, int steps, const TileKV<T>& kv, int head, int v,
                                          const Ahead& after, float* scores) {
  int end = v + micro_vectors(R);
  while (v < end && !kv.keys[v]) ++v;
  while (v < end && !kv.keys[end - 1]) --end;
  if (v == end) return;
  const auto* left = reinterpret_cast<const typename Steps<T>::Left*>(q);
  auto left_at = [&](int r, int h) { return left[size_t(h) * R + size_t(r)]; };
  with_count<micro_vectors(R)>(end - v, [&](auto count) {
    constexpr int C = decltype(count)::value;
    Vectors<C, T> keys;
    for (int i = 0; i < C; ++i) keys.from[i] = of_head(kv, kv.keys[v + i], head), keys.later[i] = after.at[v + i];
    keys.stride = kv.key_stride, keys.later_stride = after.stride, keys.steps = steps;
    auto keys_at = [&](int) -> const auto& { return keys; };
    multiply<R, C, false, T>(left_at, 0, steps, keys_at, scores + v * kLanes, kTile, nullptr);
  });
}

// What all rows of a tile share: sizes (`padded` is the value's, rounded up to 16), its first position, soft-cap.
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

// Scores of positions first..last become what softmax is taken of, others -inf. The row's greatest score is brought up
// to date; returns the difference from what it was, of which exp is what the row keeps of its past.
inline float shape_row(const TileShape& tile, float* scores, int first, int last, RowState& row) {
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
  const float before = row.best;
  row.best = max_of(before, reduce_max(max(max(s[0], s[1]), max(s[2], s[3]))));
  return before - row.shift();
}

// Shaped scores become weights, as keys and values of type T meet them.
template <class T>
inline void weigh_row(float* scores, float keep, RowState& row) {
  const V shift = set1(row.shift());
  V s[kTileVectors];
  for (int v = 0; v < kTileVectors; ++v) s[v] = exp_below(load(scores + v * kLanes) - shift);
  for (int v = 0; v < kTileVectors; ++v) Steps<T>::store_left(scores, v * kLanes, s[v]);
  store(row.sum, load(row.sum) * set1(keep) + ((s[0] + s[1]) + (s[2] + s[3])));
}

// Adds a head's values of positions first..last times the rows' weights [R][kTile] to out [R][padded], vectors from v
// on: micro_vectors(R), or what is left of `vectors`.
template <int R, class T>
__attribute__((noinline)) void add_values(const float* weights, const TileKV<T>& kv, int head, int first, int last,
                                          int v, int vectors, const Ahead& after, float* out, const float* keep) {
  constexpr int columns = Steps<T>::kColumns, run = kLanes / columns;
  const auto* left = reinterpret_cast<const typename Steps<T>::Left*>(weights);
  auto left_at = [&](int r, int i) { return left[r * kTile + i]; };
  with_count<micro_vectors(R)>(min_of(micro_vectors(R), vectors - v), [&](auto count) {
    constexpr int C = decltype(count)::value;
    auto values_at = [&](int step) {
      const int k = step / run, i = step % run;
      Vectors<C, T> values;
      for (int c = 0; c < C; ++c) {
        values.from[c] = of_head(kv, kv.values[k], head) + size_t(v + c) * kv.value_stride + size_t(i) * kv.row_stride;
        values.later[c] = after.at[k] + (size_t(v + c) + size_t(i * vectors)) * after.stride;
      }
      values.stride = kv.row_stride, values.later_stride = size_t(vectors) * after.stride, values.steps = run - i;
      if constexpr (columns == 2) {
        // A pair at the edge, of which one position is not seen, is a run by itself.
        const bool second = 2 * step < first, only_first = 2 * step == last;
        if (second) values.halves = kSecondHalves;
        if (only_first) values.halves = kFirstHalves;
        values.steps = second || only_first ? 1 : min_of(run - i, (last + 1) / 2 - step);
      }
      return values;
    };
    multiply<R, C, true, T>(left_at, first / columns, last / columns + 1, values_at, out + v * kLanes,
                            size_t(vectors) * kLanes, keep);
  });
}

// Rows [count][kTile] times a head's scales. The next head's come into L2 meanwhile.
template <class T>
void scale_rows(float* rows, int count, const TileKV<T>& kv, const float* const (&scales)[kTileVectors], int head) {
  for (int v = 0; v < kTileVectors; ++v) {
    if (!scales[v]) continue;
    const V scale = load(of_head(kv, scales[v], head));
    __builtin_prefetch(of_head(kv, scales[v], head + 1), 0, 2);
    for (int r = 0; r < count; ++r) {
      float* p = rows + r * kTile + v * kLanes;
      store(p, load(p) * scale);
    }
  }
}

// Query rows of some heads that meet the same positions: `count` of each, `stride` rows from one head's first to the
// next's. q is packed by tiles of a head's rows; values [..][padded].
struct HeadRows {
  const float* q;
  RowState* states;
  float* values;
  int count, stride;

  int at(int head, int row) const { return head * stride + row; }
};

// A head's rows are worked on in such tiles.
struct RowTiles : EqualTiles {
  explicit RowTiles(int count_) : EqualTiles(count_, kMicroRows) {}
};

// Rows begin..begin+rows-1 of a head, some of which see positions low..high of a tile; none where high < low.
struct RowTile {
  int begin, rows, low, high;
};

// Adds a tile of positions to all rows. Row r of a head sees positions first[r]..last[r] of it; those of all rows lie
// in one range without holes. `tiles` are the rows of each head, `scores` is scratch, kTile + 1 a row. A head's rows
// meet one or two vectors of keys, or of values, before the next: those stay in L1.
template <class T>
void attend_tile(const TileShape& shape, const HeadRows& rows, const TileKV<T>& kv, const RowTile* tiles,
                 int tile_count, const int* first, const int* last, float* scores) {
  const int all = kv.heads * rows.count, vectors = micro_vectors(tiles[0].rows), value_vectors = shape.padded / kLanes;
  const int query_steps = query_words<T>(shape.head_dim);
  float* keep = scores + all * kTile;
  auto for_tiles = [&](auto&& f) {
    for (int t = 0; t < tile_count; ++t)
      if (tiles[t].low <= tiles[t].high) with_count<kMicroRows>(tiles[t].rows, [&](auto n) { f(n, tiles[t]); });
  };
  for (int head = 0; head < kv.heads; ++head) {
    const float* q = rows.q + size_t(rows.at(head, 0)) * size_t(query_steps);
    float* own = scores + head * rows.count * kTile;
    const Ahead after = after_head(kv, kv.keys, kv.key_stride, shape.head_dim, head, kv.after_keys);
    for (int v = 0; v < kTileVectors; v += vectors)
      for_tiles([&](auto n, const RowTile& t) {
        if (t.high < v * kLanes || t.low >= (v + vectors) * kLanes) return;
        score_rows<decltype(n)::value>(q + size_t(t.begin) * size_t(query_steps), query_steps, kv, head, v, after,
                                       own + t.begin * kTile);
      });
    if (kv.scaled) scale_rows(own, rows.count, kv, kv.key_scales, head);
  }
  // In three passes, so that rows overlap: a row's weights wait for its greatest score.
  auto for_rows = [&](auto&& f) {
    for (int head = 0; head < kv.heads; ++head)
      for (int t = 0; t < tile_count; ++t)
        if (tiles[t].low <= tiles[t].high)
          for (int r = tiles[t].begin; r < tiles[t].begin + tiles[t].rows; ++r)
            f(head * rows.count + r, r, rows.states[rows.at(head, r)]);
  };
  for_rows([&](int i, int r, RowState& row) {
    keep[i] = shape_row(shape, scores + i * kTile, first[r], last[r], row);
  });
  for (int i = 0; i < all; i += kLanes) store(keep + i, exp_below(load(keep + i)));
  for_rows([&](int i, int, RowState& row) { weigh_row<T>(scores + i * kTile, keep[i], row); });
  for (int head = 0; head < kv.heads; ++head) {
    float* out = rows.values + size_t(rows.at(head, 0)) * size_t(shape.padded);
    float *own = scores + head * rows.count * kTile, *kept = keep + head * rows.count;
    const Ahead after = after_head(kv, kv.values, kValueStep<T>, shape.head_dim, head, kv.after_values);
    if (kv.scaled) scale_rows(own, rows.count, kv, kv.value_scales, head);
    for (int v = 0; v < value_vectors; v += vectors)
      for_tiles([&](auto n, const RowTile& t) {
        add_values<decltype(n)::value>(own + t.begin * kTile, kv, head, t.low, t.high, v, value_vectors, after,
                                       out + size_t(t.begin) * size_t(shape.padded), kept + t.begin);
      });
  }
}

}  // namespace quire::QUIRE_ISA
