// Row primitives of sampling (sampler_table.h) on V, with the few steps for which V has no operation.
#pragma once

#include "sample/sampler_noise.h"
#include "sample/sampler_table.h"
#include "simd/simd.h"

namespace quire::QUIRE_ISA {

// Number of vectors whose long dependency chains are interleaved, to keep the core busy.
#if defined(QUIRE_AVX512)
constexpr int kChains = 8;
#else
constexpr int kChains = 2;
#endif

template <int N>
inline bool all_below(const V (&t)[N], float bound) {
  V top = t[0];
#pragma GCC unroll 8
  for (int k = 1; k < N; ++k) top = max(top, t[k]);
  return lane_bits(less(top, set1(bound))) == 0xffffu;
}

template <int N>
inline bool all_at_most(const V (&x)[N], V bound) {
  V top = x[0];
#pragma GCC unroll 8
  for (int k = 1; k < N; ++k) top = max(top, x[k]);
  return lane_bits(less(bound, top)) == 0;
}

// `exp_portable` of devices/reference/logits.py: no fused multiply-add. t <= 1, -inf included.
template <int N>
inline void exp_portable(V (&t)[N]) {
  constexpr float polynomial[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                  5.0000001201e-1f};
  V n[N], y[N];
#pragma GCC unroll 8
  for (int k = 0; k < N; ++k) t[k] = max(t[k], set1(-80.0f));
#pragma GCC unroll 8
  for (int k = 0; k < N; ++k) n[k] = round_even(t[k] * set1(1.44269504088896341f));
#pragma GCC unroll 8
  for (int k = 0; k < N; ++k) t[k] = t[k] - n[k] * set1(0.693359375f);
#pragma GCC unroll 8
  for (int k = 0; k < N; ++k) t[k] = t[k] - n[k] * set1(-2.12194440e-4f);
#pragma GCC unroll 8
  for (int k = 0; k < N; ++k) y[k] = set1(1.9875691500e-4f);
#pragma GCC unroll 8
  for (const float coefficient : polynomial) {
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) y[k] = y[k] * t[k] + set1(coefficient);
  }
#pragma GCC unroll 8
  for (int k = 0; k < N; ++k) y[k] = (y[k] * (t[k] * t[k]) + t[k]) + set1(1.0f);
#pragma GCC unroll 8
  for (int k = 0; k < N; ++k) t[k] = scale(y[k], n[k]);
}

constexpr int kLogitsAhead = 1024;  // a row of a large vocabulary is not in the nearest cache

// The largest of n values, and whether none is NaN or +inf. `Fetch` prefetches the values after them.
struct BlockMax {
  float value;
  bool sound;
};

template <bool Fetch>
inline BlockMax block_max(const float* x, int n) {
  const V inf = set1(__builtin_inff());
  V m[4], sound[4];
  for (int k = 0; k < 4; ++k) m[k] = set1(-__builtin_inff()), sound[k] = set1(0.0f);
  int i = 0;
  for (; i + 64 <= n; i += 64)
    for (int k = 0; k < 4; ++k) {
      if constexpr (Fetch) __builtin_prefetch(x + i + 16 * k + kLogitsAhead, 0, 3);
      const V v = load(x + i + 16 * k);
      m[k] = max(m[k], v);
      sound[k] = select(less(v, inf), sound[k], inf);  // false for NaN too
    }
  BlockMax best{reduce_max(max(max(m[0], m[1]), max(m[2], m[3]))),
                reduce_max(max(max(sound[0], sound[1]), max(sound[2], sound[3]))) == 0.0f};
  for (; i < n; ++i) {
    best.sound = best.sound && x[i] < __builtin_inff();
    best.value = x[i] > best.value ? x[i] : best.value;
  }
  return best;
}

inline RowMax row_max(const float* x, int n) {
  RowMax best{-__builtin_inff(), 0, true};
  for (int start = 0; start < n; start += kRowBlock) {
    const BlockMax block = block_max<true>(x + start, min_of(n - start, kRowBlock));
    if (!block.sound) return {block.value, start, false};
    if (block.value > best.value) best.value = block.value, best.block = start;
  }
  return best;
}

// Lanes are summed in float over 256 values, then in double, lane by lane, then across lanes.
inline double exp_sum(const float* x, int n, float row_max) {
  const V top = set1(row_max);
  double lanes[kLanes] = {};
  alignas(64) float part[kLanes];
  for (int start = 0; start < n; start += 256) {
    const int stop = min_of(n, start + 256);
    V sum = set1(0.0f);
    int i = start;
    for (; i + kChains * kLanes <= stop; i += kChains * kLanes) {
      V e[kChains];
      for (int k = 0; k < kChains; ++k) e[k] = load(x + i + k * kLanes) - top;
      exp_portable(e);
      for (int k = 0; k < kChains; ++k) sum = sum + e[k];
    }
    for (; i < stop; i += kLanes) {
      const int rest = min_of(kLanes, stop - i);
      V e[1] = {load_first(x + i, rest) - top};
      exp_portable(e);
      sum = sum + select(first_lanes(rest), e[0], set1(0.0f));
    }
    store(part, sum);
    for (int k = 0; k < kLanes; ++k) lanes[k] += double(part[k]);
  }
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
}

constexpr float kNoWeight = -25.0f;  // e^-25 * 2^34 rounds to 0

// Whole numbers up to 2^34, so that any order of addition is exact.
template <int N>
inline void add_whole(const V (&w)[N], double* lanes) {
#if defined(QUIRE_AVX512)
  __m512d total = _mm512_loadu_pd(lanes);
#pragma GCC unroll 8
  for (int k = 0; k < N; ++k) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(w[k].r));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(w[k].r, 1));
    total = _mm512_add_pd(total, _mm512_add_pd(low, high));
  }
  _mm512_storeu_pd(lanes, total);
#else
  alignas(64) float part[kLanes];
  for (int k = 0; k < N; ++k) {
    store(part, w[k]);
    for (int i = 0; i < kLanes / 2; ++i) lanes[i] += double(part[i]) + double(part[i + 8]);
  }
#endif
}

inline double sum_lanes(const double* lanes) {
  double total = 0;
  for (int i = 0; i < kLanes / 2; ++i) total += lanes[i];
  return total;
}

// The weight of the kept tokens that equal the cut's value.
inline double ties(const WeighArgs& a, Cut cut) {
  const V value = set1(cut.value);
  const int stop = min_of(a.n, cut.last_id + 1);
  int count = 0, i = 0;
  for (; i + kLanes <= stop; i += kLanes) {
    const V x = load(a.x + i);
    count += __builtin_popcount(~(lane_bits(less(x, value)) | lane_bits(less(value, x))) & 0xffffu);
  }
  for (; i < stop; ++i) count += a.x[i] == cut.value;
  if (count == 0) return 0;
  V w[1] = {(value - set1(a.max)) * set1(a.inv_t)};
  exp_portable(w);
  alignas(64) float weights[kLanes];
  store(weights, round_even(w[0] * set1(float(a.unit))));
  return double(count) * double(weights[0]);
}

// Sums over the tokens above each cut's value; the few equal to it are added afterwards.
inline Weights weigh(const WeighArgs& a) {
  const V top = set1(a.max), inv = set1(a.inv_t), zero = set1(0.0f), unit = set1(float(a.unit));
  const V low = set1(a.kept.value), high = set1(a.better.value);
  alignas(64) double kept[kLanes / 2] = {}, better[kLanes / 2] = {};
  auto add = [&](auto& x, auto& w) {
    constexpr int N = sizeof(x) / sizeof(V);
    exp_portable(w);
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) w[k] = select(less(low, x[k]), round_even(w[k] * unit), zero);
    add_whole(w, kept);
    if (all_at_most(x, high)) return;
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) w[k] = select(less(high, x[k]), w[k], zero);
    add_whole(w, better);
  };
  int i = 0;
  for (; i + kChains * kLanes <= a.n; i += kChains * kLanes) {
    V x[kChains], w[kChains];
    for (int k = 0; k < kChains; ++k) x[k] = load(a.x + i + k * kLanes), w[k] = (x[k] - top) * inv;
    if (all_at_most(x, low) || all_below(w, kNoWeight)) continue;
    add(x, w);
  }
  for (; i < a.n; i += kLanes) {
    const int rest = min_of(kLanes, a.n - i);
    V x[1] = {select(first_lanes(rest), load_first(a.x + i, rest), set1(-__builtin_inff()))};
    V w[1] = {(x[0] - top) * inv};
    add(x, w);
  }
  return {sum_lanes(kept) + ties(a, a.kept), sum_lanes(better) + ties(a, a.better)};
}

// e^t for t <= 1 in four multiply-adds, at most 0.01% off where t > -80 (a minimax cubic of 2^f over [-1/2, 1/2]).
inline V rough_exp(V t) {
  const V y = max(t, set1(-80.0f)) * set1(1.44269504f), n = round_even(y), f = y - n;
  const V p = fma(fma(fma(set1(0.05517154f), f, set1(0.24261111f)), f, set1(0.69326101f)), f, set1(0.99992807f));
  return scale(p, n);
}

inline RoughWeights weigh_roughly(const WeighArgs& a) {
  constexpr int N = 4;  // sums side by side
  const V top = set1(a.max), inv = set1(a.inv_t), zero = set1(0.0f);
  const V low = set1(a.kept.value), value = set1(a.better.value);
  V kept[N], above[N], not_below[N];
  for (int k = 0; k < N; ++k) kept[k] = above[k] = not_below[k] = zero;
  auto add = [&](V x, int k) {
    const V w = rough_exp((x - top) * inv);
    kept[k] = kept[k] + select(less(x, low), zero, w);
    above[k] = above[k] + select(less(value, x), w, zero);
    not_below[k] = not_below[k] + select(less(x, value), zero, w);
  };
  int i = 0;
  for (; i + N * kLanes <= a.n; i += N * kLanes)
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) add(load(a.x + i + k * kLanes), k);
  for (; i < a.n; i += kLanes) {
    const int rest = min_of(kLanes, a.n - i);
    add(select(first_lanes(rest), load_first(a.x + i, rest), set1(-__builtin_inff())), 0);
  }
  auto sum = [](const V(&v)[N]) { return double(reduce_add((v[0] + v[1]) + (v[2] + v[3]))); };
  return {sum(kept), sum(above), sum(not_below)};
}

inline int count_above(const float* x, int n, float value) {
  int count = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) count += __builtin_popcount(lane_bits(less(set1(value), load(x + i))));
  for (; i < n; ++i) count += x[i] > value;
  return count;
}

inline size_t keep_range(const float* x, size_t n, float low, float high, float* out) {
  size_t kept = 0, i = 0;
#if defined(QUIRE_AVX512)
  const __m512 lo = _mm512_set1_ps(low), hi = _mm512_set1_ps(high);
  for (; i + kLanes <= n; i += kLanes) {
    const __m512 v = _mm512_loadu_ps(x + i);
    const __mmask16 in = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(v, lo, _CMP_GE_OQ), v, hi, _CMP_LT_OQ);
    _mm512_storeu_ps(out + kept, _mm512_maskz_compress_ps(in, v));
    kept += size_t(__builtin_popcount(in));
  }
#endif
  for (; i < n; ++i) {
    const float v = x[i];
    out[kept] = v;
    kept += size_t((v >= low) & (v < high));
  }
  return kept;
}

inline int collect(const float* x, int n, Cut cut, int limit, int* ids) {
  int kept = 0;
  const V value = set1(cut.value);
  for (int i = 0; i < n; i += kLanes) {
    uint32_t in;
    if (i + kLanes <= n) in = ~lane_bits(less(load(x + i), value)) & 0xffffu;
    else in = ~lane_bits(less(load_first(x + i, n - i), value)) & ((1u << (n - i)) - 1u);
    for (; in != 0; in &= in - 1) {
      const int id = i + __builtin_ctz(in);
      if (x[id] == cut.value && id > cut.last_id) continue;
      if (kept == limit) return -1;
      ids[kept++] = id;
    }
  }
  return kept;
}

constexpr int kDrawBlock = 128;  // tokens

#if defined(QUIRE_AVX512)
// Philox on 8 counters in 64-bit lanes: words 0..3 of the counters from c0 on. The upper halves of the second and
// fourth word hold garbage that the multiplication ignores and the end masks off. Four at once.
inline void philox_words(const PhiloxKeys& keys, uint64_t position, uint32_t token, uint32_t* words) {
  constexpr int N = kDrawBlock / 32;
  const __m512i m0 = _mm512_set1_epi64(kPhiloxM0), m1 = _mm512_set1_epi64(kPhiloxM1);
  const __m512i step = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  __m512i c0[N], c1[N], c2[N], c3[N];
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    c0[k] = _mm512_add_epi64(_mm512_set1_epi64(token / 4 + uint32_t(8 * k)), step);
    c1[k] = _mm512_set1_epi64(uint32_t(position));
    c2[k] = _mm512_set1_epi64(int64_t(position >> 32));
    c3[k] = _mm512_setzero_si512();
  }
  for (int i = 0; i < kPhiloxRounds; ++i) {
    const __m512i k0 = _mm512_set1_epi64(keys.k0[i]), k1 = _mm512_set1_epi64(keys.k1[i]);
#pragma GCC unroll 4
    for (int k = 0; k < N; ++k) {
      const __m512i p0 = _mm512_mul_epu32(c0[k], m0), p1 = _mm512_mul_epu32(c2[k], m1);
      c0[k] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1[k], k0, 0x96);
      c2[k] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3[k], k1, 0x96);
      c1[k] = p1;
      c3[k] = p0;
    }
  }
  const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    const __m512i a = _mm512_mask_blend_epi32(0xaaaa, c0[k], _mm512_slli_epi64(c1[k], 32));
    const __m512i b = _mm512_mask_blend_epi32(0xaaaa, c2[k], _mm512_slli_epi64(c3[k], 32));
    _mm512_storeu_si512(words + 32 * k, _mm512_permutex2var_epi64(a, first, b));
    _mm512_storeu_si512(words + 32 * k + 16, _mm512_permutex2var_epi64(a, second, b));
  }
}
#elif defined(QUIRE_AVX2)
inline void philox_words(const PhiloxKeys& keys, uint64_t position, uint32_t token, uint32_t* words) {
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxM0), m1 = _mm256_set1_epi64x(kPhiloxM1);
  for (int k = 0; k < kDrawBlock / 16; ++k) {
    __m256i c0 = _mm256_add_epi64(_mm256_set1_epi64x(token / 4 + uint32_t(4 * k)), _mm256_setr_epi64x(0, 1, 2, 3));
    __m256i c1 = _mm256_set1_epi64x(uint32_t(position)), c2 = _mm256_set1_epi64x(int64_t(position >> 32));
    __m256i c3 = _mm256_setzero_si256();
    for (int i = 0; i < kPhiloxRounds; ++i) {
      const __m256i p0 = _mm256_mul_epu32(c0, m0), p1 = _mm256_mul_epu32(c2, m1);
      const __m256i k0 = _mm256_set1_epi64x(keys.k0[i]), k1 = _mm256_set1_epi64x(keys.k1[i]);
      c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), k0);
      c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), k1);
      c1 = p1;
      c3 = p0;
    }
    const __m256i a = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xaa);
    const __m256i b = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xaa);
    const __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
    __m256i* out = reinterpret_cast<__m256i*>(words + 16 * k);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
  }
}
#else
inline void philox_words(const PhiloxKeys& keys, uint64_t position, uint32_t token, uint32_t* words) {
  for (uint32_t i = 0; i < kDrawBlock; ++i) words[i] = philox_word(keys, position, token + i, 0);
}
#endif

// 1 - u is slightly above miss(word): 31 bits of the noise's first word.
inline V miss(const uint32_t* words) {
#if defined(QUIRE_AVX512)
  const __m512i w = _mm512_srli_epi32(_mm512_xor_si512(_mm512_loadu_si512(words), _mm512_set1_epi32(-1)), 1);
  return V{_mm512_cvtepi32_ps(w)} * set1(0x1p-31f);
#else
  alignas(64) float v[kLanes];
  for (int k = 0; k < kLanes; ++k) v[k] = float(int32_t(~words[k] >> 1));
  return load(v) * set1(0x1p-31f);
#endif
}

// Keeps the best candidate so far; compares exactly.
struct Race {
  const DrawArgs& d;
  PhiloxKeys keys;
  double best = -__builtin_inf();
  int token = -1;

  explicit Race(const DrawArgs& args) : d(args), keys(args.seed) {}

  void enter(int id, uint32_t high) {
    const float x = d.x[id];
    if (x < d.cut.value || (x == d.cut.value && id > d.cut.last_id)) return;
    const uint32_t low = philox_word(keys, d.position, uint32_t(id), 1);
    const double score = (double(x) - double(d.max)) * d.inv_temperature + gumbel(high, low);
    if (score > best || (score == best && id < token)) best = score, token = id;
  }
  void enter(int id) { enter(id, philox_word(keys, d.position, uint32_t(id), 0)); }
};

constexpr float kMostNoise = -37.0f;  // the noise is at most 53 ln 2 = 36.74

// Above e^t by 0.1% to 6.2%, for t from -80 to 1: the chord of 2^f over [-1/2, 1/2], plus a margin for rounding.
inline V above_exp(V t) {
  const V y = max(t, set1(-80.0f)) * set1(1.44269504f), n = round_even(y);
  return scale(fma(y - n, set1(0.7079f), set1(1.0618f)), n);
}

// A token beats the best score s only if -ln u < e^(z - s), and 1 - u < -ln u: one comparison with half of the noise's
// bits rules out nearly all tokens, without a logarithm and with a bound on the exponential.
inline int draw(const DrawArgs& d) {
  constexpr int kFew = 1024;
  Race race(d);
  race.enter(d.argmax);
  int ids[kFew + 16];
  const int few = collect(d.x, d.n, d.cut, kFew, ids);
  if (few >= 0) {
    for (int i = 0; i < few; ++i) race.enter(ids[i]);
    return race.token;
  }
  const V top = set1(d.max), inv = set1(float(d.inv_temperature));
  alignas(64) uint32_t words[kDrawBlock];
  int start = 0;
  for (; start + kDrawBlock <= d.n; start += kDrawBlock) {
    const V best = set1(float(race.best));
    bool hashed = false;
    for (int at = 0; at < kDrawBlock; at += kChains * kLanes) {
      V bound[kChains];
      for (int k = 0; k < kChains; ++k)
        bound[k] = min((load(d.x + start + at + k * kLanes) - top) * inv - best, set1(1.0f));
      if (all_below(bound, kMostNoise)) continue;
      if (!hashed) philox_words(race.keys, d.position, uint32_t(start), words);
      hashed = true;
      for (int k = 0; k < kChains; ++k) {
        const int place = at + k * kLanes;
        uint32_t in = ~lane_bits(less(above_exp(bound[k]), miss(words + place))) & 0xffffu;
        for (; in != 0; in &= in - 1) {
          const int i = place + __builtin_ctz(in);
          race.enter(start + i, words[i]);
        }
      }
    }
  }
  for (; start < d.n; ++start) race.enter(start);
  return race.token;
}

}  // namespace quire::QUIRE_ISA
