// Attention over int8 keys and values: queries, and softmax weights times the values' scales, are rounded to 16 bits, a
// row at a time and a tile of positions at a time, and multiplied as two bytes with exact sums. Knows bytes and scales;
// knows no softmax and no block table.
//
// 16 bits keep more of a query than bfloat16 does, and the products of four bytes are one instruction where float32
// takes twelve. Integers have no order of summation: only the scaling of a tile's sums has one.
#pragma once

#include "attention_steps.h"

namespace quire::QUIRE_ISA {

// Keys are held as bytes 128 more than their values, four elements of a head side by side, values as signed bytes, four
// positions side by side (kv_cache.h).
template <>
struct Steps<int8_t> : SingleSteps {
  struct Left {
    uint32_t high, low;  // bytes of four numbers: a number is 256 times its high byte and its low byte
  };
  struct Sum {
    I high, low;
    V number() const { return fma(to_float(high), set1(256.0f), to_float(low)); }
  };
  static constexpr int kColumns = 4, kTogether = 4;
  // Of a packed query: where the sums of its high and its low bytes begin, and its scale; then its high, its low bytes.
  static constexpr int kHeaderWords = 3, kStepWords = 2;
#if defined(QUIRE_AVX512)
  static constexpr int kMicroRows = 6, kFourRows = 3;
#else
  static constexpr int kMicroRows = 1, kFourRows = 0;
#endif

  static inline I load(const int8_t* p, size_t, uint32_t) { return iload(p); }
};

struct KeySteps : Steps<int8_t> {  // queries are signed
  static inline Sum add(Sum sum, Left q, I keys) {
    return {dot_bytes(sum.high, keys, iset1(int32_t(q.high))), dot_bytes(sum.low, keys, iset1(int32_t(q.low)))};
  }
};

struct ValueSteps : Steps<int8_t> {  // weights are not
  static inline Sum add(Sum sum, Left w, I values) {
    return {dot_bytes(sum.high, iset1(int32_t(w.high)), values), dot_bytes(sum.low, iset1(int32_t(w.low)), values)};
  }
};

// Brings runs first..last-1 of a head into L2: its keys are runs 0..kTileVectors-1, its values those after them.
// L1, which is filled a few heads ahead, is too small for what memory could send while weights are made.
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

// What weights are multiples of.
struct PowerOfTwo {
  float value, inverse;
};

// By the bits of the greatest: it becomes 16,384 to 32,768. Not a number where that is not finite.
inline PowerOfTwo unit_of(int32_t greatest) {
  const int32_t exponent = greatest >> 23, least = 15;  // of a smaller one the inverse is no number
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
    constexpr float most_rounded = 127.0f * 256.0f;  // its high byte is one
    const int steps = query_steps<int8_t>(head_dim);
    const float most = greatest_magnitude(x, head_dim);
    const float inverse = most >= kLeastMagnitude ? most_rounded / most : 0.0f;
    auto *high = reinterpret_cast<int8_t*>(to + Steps<int8_t>::kHeaderWords), *low = high + steps * 4;
    I sum_high = iset1(0), sum = iset1(0);
    for (int h = 0; h < head_dim; h += kLanes) {
      const I q = to_int(load_first(x + h, min_of(kLanes, head_dim - h)) * set1(inverse));
      const I upper = shift_right(q + iset1(0x8080), 8) + iset1(-128);  // nearest, the rest is a signed byte
      sum_high = sum_high + upper, sum = sum + q;
      const int bytes = min_of(kLanes, steps * 4 - h);
      store_int8_first(high + h, upper, bytes);
      store_int8_first(low + h, q, bytes);
    }
    const int32_t high_total = reduce_add(sum_high), total = reduce_add(sum);
    const int32_t begin[2] = {-128 * high_total, -128 * (total - 256 * high_total)};
    std::memcpy(to, begin, sizeof(begin));
    to[2] = scale * most * (1.0f / most_rounded);
  }

  // As TileLoops<T>::score, without the keys' scales. q is packed [query_words][R].
  template <int R>
  static __attribute__((noinline)) void score(const float* q, int steps, const TileKV<int8_t>& kv, int head, int v,
                                              const Ahead& after, float* scores) {
    const auto* words = reinterpret_cast<const uint32_t*>(q);
    const auto *high = words + Steps<int8_t>::kHeaderWords * R, *low = high + steps * R;
    auto left_at = [&](int r, int i) { return Left{high[size_t(i) * R + size_t(r)], low[size_t(i) * R + size_t(r)]}; };
    for_keys<int8_t, micro_vectors<int8_t>(R)>(
        steps, kv, head, v, after, [&](auto count, int first, const auto& keys_at) {
          constexpr int N = decltype(count)::value;
          KeySteps::Sum sum[R][N];
          for_sums<R, N>([&](int r, int n) { sum[r][n] = {iset1(int32_t(words[r])), iset1(int32_t(words[R + r]))}; });
          multiply<R, N, KeySteps>(left_at, 0, steps, keys_at, sum);
          // Behind the elements that came into L1 meanwhile are their scales; those of the head's values come next.
          for (int n = 0; n < N; ++n) {
            __builtin_prefetch(after.at[first + n] + size_t(steps) * after.stride);
            __builtin_prefetch(of_head(kv, kv.value_scales[first + n], head));
          }
          for_sums<R, N>([&](int r, int n) {
            store(scores + r * kTile + (first + n) * kLanes, sum[r][n].number() * set1(q[2 * R + r]));
          });
        });
  }

  // Weights [kTile] of a row become, in their place, high bytes [kTile], low bytes [kTile], and what the sums of their
  // products are multiplied by. `scales` are those of a head's values, null where no position is visible.
  static void round_weights(float* row, const float* const (&scales)[kTileVectors]) {
    V w[kTileVectors];
    I top = iset1(0);
    for (int v = 0; v < kTileVectors; ++v) {
      // Where a weight is 0 the scale may be anything: nothing need have been stored there.
      const V p = load(row + v * kLanes), none = set1(0.0f);
      w[v] = scales[v] ? select(less(none, p), p * load(scales[v]), none) : none;
      top = max(top, magnitude_bits(w[v]));
    }
    const PowerOfTwo unit = unit_of(reduce_max(top));
    int8_t* bytes = reinterpret_cast<int8_t*>(row);
    for (int v = 0; v < kTileVectors; ++v) {
      const I q = to_int(w[v] * set1(unit.inverse));
      store_int8(bytes + v * kLanes, shift_right(q, 8));
      store_int8(bytes + kTile + v * kLanes, q);
    }
    row[kTile / 2] = unit.value;
  }

  // As TileLoops<T>::add_values; weights are rounded.
  template <int R>
  static __attribute__((noinline)) void add_values(const float* weights, const TileKV<int8_t>& kv, int head, int first,
                                                   int last, int v, int vectors, const Ahead& after, float* out,
                                                   const float* keep) {
    constexpr int run = kLanes / Steps<int8_t>::kColumns;
    const auto* words = reinterpret_cast<const uint32_t*>(weights);
    auto left_at = [&](int r, int i) { return Left{words[r * kTile + i], words[r * kTile + kTile / 4 + i]}; };
    with_count<micro_vectors<int8_t>(R)>(min_of(micro_vectors<int8_t>(R), vectors - v), [&](auto count) {
      constexpr int N = decltype(count)::value;
      ValueSteps::Sum sum[R][N];
      for_sums<R, N>([&](int r, int n) { sum[r][n] = {iset1(0), iset1(0)}; });
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
