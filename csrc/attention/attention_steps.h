// The loops that multiply query rows with the keys and values of a tile. Knows registers and pointers; knows no softmax
// and no block table.
//
// The order is the same however rows and tiles are grouped: a score is one chain of multiply-adds over head_dim; an
// output element is one chain over positions. If bfloat16 is multiplied in pairs, chains run over pairs: of elements 2
// h and 2 h + 1, or positions 2 i and 2 i + 1, of which one that is not visible counts as 0. Sums of int8 are exact
// (attention_int8.h).
#pragma once

#include <type_traits>

#include "simd/simd.h"
#include "simd/simd_int.h"

namespace quire::QUIRE_ISA {

constexpr int kTile = 64;                   // positions, aligned to absolute position 0
constexpr int kTileVectors = kTile / kLanes;

inline V load_kv(const float* p) { return load(p); }
inline V load_kv(const uint16_t* p) { return load_bf16(p); }

constexpr uint32_t kBothHalves = 0xffffffff, kFirstHalves = 0x55555555, kSecondHalves = 0xaaaaaaaa;

// How keys and values of type T are multiplied. A step covers `kColumns` elements of a head, or positions; `kTogether`
// of them are neighbours in the cache, and queries and weights have type Left. Rows are processed in tiles of at most
// kMicroRows against four vectors of positions or values at a time, or two vectors if there are more than kFourRows
// rows: as many sums as there are registers. At least kAheadBytes of keys, or values, are processed while the next ones
// are prefetched; the value that was fastest.
struct SingleSteps {
  using Left = float;
  using Sum = V;
  static constexpr int kColumns = 1, kTogether = 1, kHeaderWords = 0, kStepWords = 1;
#if defined(QUIRE_AVX512)
  static constexpr int kMicroRows = 14, kFourRows = 6;
#else
  static constexpr int kMicroRows = 2, kFourRows = 0;
#endif
  static constexpr size_t kAheadBytes = size_t{8} << 10;

  template <class T>
  static inline V load(const T* p, size_t, uint32_t) {
    return load_kv(p);
  }
  static inline V add(V sum, Left left, V right) { return fma(set1(left), right, sum); }
  static inline void store_left(float* to, int i, V v) { store(to + i, v); }
};

// Query rows that read bfloat16 directly from the cache; more rows read a copy.
constexpr int kDirectRows = SingleSteps::kMicroRows < 8 ? SingleSteps::kMicroRows : 8;

template <class T>
struct Steps : SingleSteps {};

#if defined(QUIRE_BF16_DOT)
// bfloat16, with queries and weights rounded to it: in the cache, the second element of a pair is half a step after the
// first; copies hold pairs.
struct PairedSteps : SingleSteps {
  using Left = uint32_t;
  static constexpr int kColumns = 2;
  static constexpr size_t kAheadBytes = size_t{4} << 10;

  static inline I load(const uint16_t* p, size_t step, uint32_t halves) { return load_pairs(p, p + step / 2, halves); }
  static inline I load(const uint32_t* p, size_t, uint32_t) { return iload(p); }
  static inline V add(V sum, Left left, I right) { return dot_pairs(sum, iset1(int32_t(left)), right); }
  static inline void store_left(float* to, int i, V v) { store_halves(reinterpret_cast<uint16_t*>(to) + i, v); }
};

template <>
struct Steps<uint32_t> : PairedSteps {};
using Bf16Steps = PairedSteps;
#else
using Bf16Steps = SingleSteps;
#endif

template <>
struct Steps<uint16_t> : Bf16Steps {
  static constexpr int kMicroRows = kDirectRows;
};

template <class T>
constexpr int micro_vectors(int rows) {
  return rows <= Steps<T>::kFourRows ? 4 : 2;
}

// Elements of a head per step of values.
template <class T>
constexpr size_t kValueStep = kLanes * Steps<T>::kColumns;

// Steps of a query against keys of type T, and its number of packed 4-byte words.
template <class T>
constexpr int query_steps(int head_dim) {
  return (head_dim + Steps<T>::kColumns - 1) / Steps<T>::kColumns;
}
template <class T>
constexpr int query_words(int head_dim) {
  return Steps<T>::kHeaderWords + Steps<T>::kStepWords * query_steps<T>(head_dim);
}

// The vectors of a loop, N per step for `steps` steps: vector v of the first step is at from[v]; each further step is
// `stride` elements on. Meanwhile the data at later[v], with `later_stride` bytes per step, is prefetched into L1.
template <int N, class T>
struct Vectors {
  const T* from[N];
  const char* later[N];
  size_t stride, later_stride;
  int steps;
  uint32_t halves = kBothHalves;  // which elements of pairs count
};

// sum[r][v] += over steps begin..end-1 left [R][.] at (r, i) * vector v of step i, multiplied by Dot. vectors_at(i) are
// the vectors from step i on. (The prefetch is inline here because gcc drops a function that only prefetches.)
template <int R, int N, class Dot, class LeftAt, class VectorsAt>
inline __attribute__((always_inline)) void multiply(LeftAt left, int begin, int end, VectorsAt vectors_at,
                                                    typename Dot::Sum (&sum)[R][N]) {
  for (int i = begin; i < end;) {
    const auto& vectors = vectors_at(i);
    const int stop = min_of(end, i + vectors.steps);
    for (size_t at = 0, later = 0; i < stop; ++i, at += vectors.stride, later += vectors.later_stride) {
      decltype(Dot::load(vectors.from[0], 0, 0)) shared[N];
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        shared[v] = Dot::load(vectors.from[v] + at, vectors.stride, vectors.halves);
        __builtin_prefetch(vectors.later[v] + later);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto own = left(r, i);
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) sum[r][v] = Dot::add(sum[r][v], own, shared[v]);
      }
    }
  }
}

// Calls f(r, v); both are constants once the surrounding loops are unrolled.
template <int R, int N, class F>
inline __attribute__((always_inline)) void for_sums(F&& f) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) f(r, v);
}

// Data to prefetch into L1 during some keys or values: step i of run v is at at[v] + i * stride.
struct Ahead {
  const char* at[kTileVectors];
  size_t stride;  // bytes
};

// Keys and values of a tile, for one head or for several with neighbouring blocks: the next head's are `head_stride`
// elements on. Positions 16 v .. 16 v + 15 form run v; its pointers are null if none is visible. Step h of the keys is
// at keys[v] + h * key_stride; vector w of step i of the values is at values[v] + i * row_stride + w * value_stride.
template <class T>
struct TileKV {
  const T *keys[kTileVectors], *values[kTileVectors];
  size_t key_stride, row_stride, value_stride, head_stride;
  int heads = 1;
  const float *key_scales[kTileVectors], *value_scales[kTileVectors];  // for int8: by position
  Ahead after_keys, after_values;  // the data after the last head's keys, and after its values
  const TileKV* next = nullptr;    // the next tile, if known
};

inline const char* bytes(const void* p) { return static_cast<const char*>(p); }

// Pointer `p` of the first head, moved to head `head`.
template <class T, class P>
inline const P* of_head(const TileKV<T>& kv, const P* p, int head) {
  return reinterpret_cast<const P*>(reinterpret_cast<const T*>(p) + size_t(head) * kv.head_stride);
}

// The data some heads after the keys, or values, of a head: a later head's, `stride` elements apart, or that of a head
// after the last one.
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

// Calls f with `n`, 1..Most, as a constant.
template <int Most, class F>
inline __attribute__((always_inline)) void with_count(int n, F&& f) {
  if constexpr (Most > 1)
    if (n < Most) return with_count<Most - 1>(n, f);
  f(std::integral_constant<int, Most>{});
}

// Calls f with the number (at most Most) of visible vectors of keys from v on, the first of them, and their source.
template <class T, int Most, class F>
inline __attribute__((always_inline)) void for_keys(int steps, const TileKV<T>& kv, int head, int v, const Ahead& after,
                                                    F&& f) {
  int end = v + Most;
  while (v < end && !kv.keys[v]) ++v;
  while (v < end && !kv.keys[end - 1]) --end;
  if (v == end) return;
  with_count<Most>(end - v, [&](auto count) {
    constexpr int N = decltype(count)::value;
    Vectors<N, T> keys;
    for (int i = 0; i < N; ++i) keys.from[i] = of_head(kv, kv.keys[v + i], head), keys.later[i] = after.at[v + i];
    keys.stride = kv.key_stride, keys.later_stride = after.stride, keys.steps = steps;
    f(count, v, [&](int) -> const auto& { return keys; });
  });
}

// N vectors of values from v on, at `step` and later steps of its run.
template <int N, class T>
inline __attribute__((always_inline)) Vectors<N, T> values_of(const TileKV<T>& kv, int head, int v, int vectors,
                                                              const Ahead& after, int step) {
  constexpr int run = kLanes / Steps<T>::kColumns;
  const int k = step / run, i = step % run;
  Vectors<N, T> values;
  for (int n = 0; n < N; ++n) {
    values.from[n] = of_head(kv, kv.values[k], head) + size_t(v + n) * kv.value_stride + size_t(i) * kv.row_stride;
    values.later[n] = after.at[k] + (size_t(v + n) + size_t(i * vectors)) * after.stride;
  }
  values.stride = kv.row_stride, values.later_stride = size_t(vectors) * after.stride, values.steps = run - i;
  return values;
}

// The loops of a tile of rows over keys and values of type T. (A struct, because int8 has its own loops.)
template <class T>
struct TileLoops {
  using Left = typename Steps<T>::Left;

  // Multiplies a query by `scale` while packing it.
  static void pack_query(const float* x, int head_dim, float scale, float* to) {
    for (int h = 0; h < head_dim; h += kLanes)
      Steps<T>::store_left(to, h, load_first(x + h, min_of(kLanes, head_dim - h)) * set1(scale));
  }

  // Scores [R][kTile] of a head against micro_vectors(R) vectors of the tile from v on. q is packed [steps][R].
  template <int R>
  static __attribute__((noinline)) void score(const float* q, int steps, const TileKV<T>& kv, int head, int v,
                                              const Ahead& after, float* scores) {
    const auto* left = reinterpret_cast<const Left*>(q);
    auto left_at = [&](int r, int h) { return left[size_t(h) * R + size_t(r)]; };
    for_keys<T, micro_vectors<T>(R)>(steps, kv, head, v, after, [&](auto count, int first, const auto& keys_at) {
      constexpr int N = decltype(count)::value;
      V sum[R][N];
      for_sums<R, N>([&](int r, int n) { sum[r][n] = set1(0.0f); });
      multiply<R, N, Steps<T>>(left_at, 0, steps, keys_at, sum);
      for_sums<R, N>([&](int r, int n) { store(scores + r * kTile + (first + n) * kLanes, sum[r][n]); });
    });
  }

  // out [R][padded] = out * keep + weights [R][kTile] times a head's values at positions first..last, for
  // micro_vectors(R) vectors from v on, or the rest of `vectors`.
  template <int R>
  static __attribute__((noinline)) void add_values(const float* weights, const TileKV<T>& kv, int head, int first,
                                                   int last, int v, int vectors, const Ahead& after, float* out,
                                                   const float* keep) {
    constexpr int columns = Steps<T>::kColumns;
    const auto* left = reinterpret_cast<const Left*>(weights);
    auto left_at = [&](int r, int i) { return left[r * kTile + i]; };
    with_count<micro_vectors<T>(R)>(min_of(micro_vectors<T>(R), vectors - v), [&](auto count) {
      constexpr int N = decltype(count)::value;
      auto values_at = [&](int step) {
        auto values = values_of<N>(kv, head, v, vectors, after, step);
        if constexpr (columns == 2) {
          // A pair at the edge with one invisible position is a run of its own.
          const bool second = 2 * step < first, only_first = 2 * step == last;
          if (second) values.halves = kSecondHalves;
          if (only_first) values.halves = kFirstHalves;
          values.steps = second || only_first ? 1 : min_of(values.steps, (last + 1) / 2 - step);
        }
        return values;
      };
      auto at = [&](int r, int n) { return out + (r * vectors + v + n) * kLanes; };
      V sum[R][N];
      for_sums<R, N>([&](int r, int n) { sum[r][n] = load(at(r, n)) * set1(keep[r]); });
      multiply<R, N, Steps<T>>(left_at, first / columns, last / columns + 1, values_at, sum);
      for_sums<R, N>([&](int r, int n) { store(at(r, n), sum[r][n]); });
    });
  }
};

}  // namespace quire::QUIRE_ISA
