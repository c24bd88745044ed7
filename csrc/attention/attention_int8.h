// Attention over int8 keys and values. Queries, and softmax weights times the values' scales, are rounded to 16 bits,
// one row and one tile of positions at a time, and multiplied with exact sums. Knows bytes and scales; knows no softmax
// and no block table.
//
// 16 bits keep more of a query than bfloat16, and four products of bytes take one instruction where float32 needs
// twelve. Integer sums have no order; only the scaling of a tile's sums has one.
#pragma once

#include "attention/attention_int16.h"
#include "attention/attention_steps.h"

namespace quire::QUIRE_ISA {

// Keys are stored as bytes 128 above their values, in groups of four elements of a head; values as signed bytes, in
// groups of four positions (kv_cache.h).
template <>
struct Steps<int8_t> : SingleSteps {
  using Left = Int16::Left;
  using Sum = Int16::Sum;
  static constexpr int kColumns = 4, kTogether = 4;
  static constexpr int kHeaderWords = Int16::kHeader, kStepWords = 2;
#if defined(QUIRE_AVX512)
  static constexpr int kMicroRows = 6, kFourRows = 3;
#elif defined(QUIRE_AVX2)
  static constexpr int kMicroRows = 2, kFourRows = 1;
#else
  static constexpr int kMicroRows = 1, kFourRows = 0;
#endif

  static inline I load(const int8_t* p, size_t, uint32_t) { return iload(p); }
};

struct KeySteps : Steps<int8_t> {
  static inline Sum add(Sum sum, Left q, I keys) { return Int16::add_keys(sum, q, keys); }
};

struct ValueSteps : Steps<int8_t> {
  static inline Sum add(Sum sum, Left w, I values) { return Int16::add_values(sum, w, values); }
};

// Prefetches runs first..last-1 of a head into L2: runs 0..kTileVectors-1 are its keys, the next ones its values.
// L1, which is filled a few heads ahead, is too small to keep memory busy while weights are computed.
QUIRE_INLINE void fetch_runs(const TileKV<int8_t>& kv, int head, int head_dim, int first, int last) {
  constexpr int kIntoL2 = 2;
  for (int run = first; run < last; ++run) {
    const bool keys = run < kTileVectors;
    const int v = run % kTileVectors, steps = keys ? query_steps<int8_t>(head_dim) : head_dim / 4;
    const size_t stride = keys ? kv.key_stride : kValueStep<int8_t>;
    const int8_t* from = keys ? kv.keys[v] : kv.values[v];
    if (!from) continue;
    for (int i = 0; i < steps; ++i) __builtin_prefetch(of_head(kv, from, head) + size_t(i) * stride, 0, kIntoL2);
    __builtin_prefetch(of_head(kv, keys ? kv.key_scales[v] : kv.value_scales[v], head), 0, kIntoL2);
  }
}

// The unit of quantized weights.
struct PowerOfTwo {
  float value, inverse;
};

// From the bits of the largest magnitude, which becomes 16,384 to 32,768. NaN if it is not finite.
inline PowerOfTwo unit_of(int32_t greatest) {
  const int32_t exponent = greatest >> 23, least = 15;  // below this the inverse would overflow
  const int32_t bits[2] = {(exponent - 14) << 23, (254 - exponent + 14) << 23};
  PowerOfTwo unit;
  std::memcpy(&unit, bits, sizeof(unit));
  if (exponent < least) return {0, 0};
  return exponent < 255 ? unit : PowerOfTwo{__builtin_nanf(""), 0};
}

template <>
struct TileLoops<int8_t> {
  using Left = Steps<int8_t>::Left;

  static void pack_query(const float* x, int head_dim, float scale, float* to) {
    const int steps = query_steps<int8_t>(head_dim);
    const float most = greatest_magnitude(x, head_dim), most_rounded = float(Int16::most(head_dim));
    const float inverse = most >= kLeastMagnitude ? most_rounded / most : 0.0f;
    auto* words = reinterpret_cast<uint32_t*>(to);
    I parts = iset1(0), all = iset1(0);
    for (int h = 0; h < head_dim; h += kLanes) {
      const I q = to_int(load_first(x + h, min_of(kLanes, head_dim - h)) * set1(inverse));
      parts = parts + Int16::put_signed(words + Int16::kHeader, steps, h, q), all = all + q;
    }
    Int16::put_begin(words, reduce_add(parts), reduce_add(all));
    to[Int16::kHeader - 1] = scale * most * (1.0f / most_rounded);
  }

  // As TileLoops<T>::score, without the keys' scales. q is packed [query_words][R].
  template <int R>
  static __attribute__((noinline)) void score(const float* q, int steps, const TileKV<int8_t>& kv, int head, int v,
                                              const Ahead& after, float* scores) {
    const auto* words = reinterpret_cast<const uint32_t*>(q);
    auto left_at = [&](int r, int i) { return Int16::left(words + Int16::kHeader * R + r, steps, R, i); };
    for_keys<int8_t, micro_vectors<int8_t>(R)>(
        steps, kv, head, v, after, [&](auto count, int first, const auto& keys_at) {
          constexpr int N = decltype(count)::value;
          KeySteps::Sum sum[R][N];
          for_sums<R, N>([&](int r, int n) { sum[r][n] = Int16::begin(words + r, R); });
          multiply<R, N, KeySteps>(left_at, 0, steps, keys_at, sum);
          // The scales of keys follow the prefetched elements; those of the head's values come next.
          for (int n = 0; n < N; ++n) {
            __builtin_prefetch(after.at[first + n] + size_t(steps) * after.stride);
            __builtin_prefetch(of_head(kv, kv.value_scales[first + n], head));
          }
          for_sums<R, N>([&](int r, int n) {
            const V scale = set1(q[(Int16::kHeader - 1) * R + r]);
            store(scores + r * kTile + (first + n) * kLanes, sum[r][n].number() * scale);
          });
        });
  }

  // Turns a row's weights [kTile] into integers [kTile] in place, and gives the factor for sums of their products.
  // `scales` belong to a head's values; null where no position is visible.
  static void round_weights(float* row, const float* const (&scales)[kTileVectors]) {
    V w[kTileVectors];
    I top = iset1(0);
    for (int v = 0; v < kTileVectors; ++v) {
      // If a weight is 0, the scale may be garbage: that position may never have been stored.
      const V p = load(row + v * kLanes), none = set1(0.0f);
      w[v] = scales[v] ? select(less(none, p), p * load(scales[v]), none) : none;
      top = max(top, magnitude_bits(w[v]));
    }
    const PowerOfTwo unit = unit_of(reduce_max(top));
    auto* words = reinterpret_cast<uint32_t*>(row);
    for (int v = 0; v < kTileVectors; ++v)
      Int16::put_unsigned(words, kTile / 4, v * kLanes, to_int(w[v] * set1(unit.inverse)));
    row[kTile / 2] = unit.value;
  }

  // As TileLoops<T>::add_values, with rounded weights.
  template <int R>
  static __attribute__((noinline)) void add_values(const float* weights, const TileKV<int8_t>& kv, int head, int first,
                                                   int last, int v, int vectors, const Ahead& after, float* out,
                                                   const float* keep) {
    constexpr int run = kLanes / Steps<int8_t>::kColumns;
    const auto* words = reinterpret_cast<const uint32_t*>(weights);
    auto left_at = [&](int r, int i) { return Int16::left(words + r * kTile, kTile / 4, 1, i); };
    with_count<micro_vectors<int8_t>(R)>(min_of(micro_vectors<int8_t>(R), vectors - v), [&](auto count) {
      constexpr int N = decltype(count)::value;
      ValueSteps::Sum sum[R][N];
      for_sums<R, N>([&](int r, int n) { sum[r][n] = Int16::zero(); });
      auto values_at = [&](int step) { return values_of<N>(kv, head, v, vectors, after, step); };
      multiply<R, N, ValueSteps>(left_at, first / kLanes * run, (last / kLanes + 1) * run, values_at, sum);
      for_sums<R, N>([&](int r, int n) {
        float* at = out + (r * vectors + v + n) * kLanes;
        store(at, fma(sum[r][n].number(), set1(weights[r * kTile + kTile / 2]), load(at) * set1(keep[r])));
      });
    });
  }
};

}  // namespace quire::QUIRE_ISA
