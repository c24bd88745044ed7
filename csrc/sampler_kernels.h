// Row primitives of sampling (sampler_table.h) on V, with the few steps that V lacks per instruction set.
#pragma once

#include "sampler_noise.h"
#include "sampler_table.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// One bit per lane.
inline uint32_t lane_bits(M m) {
#if defined(QUIRE_AVX512)
  return m.m;
#elif defined(QUIRE_AVX2)
  return uint32_t(_mm256_movemask_ps(m.a)) | uint32_t(_mm256_movemask_ps(m.b)) << 8;
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(m.m[i] & 1) << i;
  return bits;
#endif
}

// `exp_portable` of runtime/logits.py: no fused multiply-add. x <= 0, -inf included.
inline V exp_portable(V t) {
  t = max(t, set1(-80.0f));
  const V n = round_even(t * set1(1.44269504088896341f));
  const V r = (t - n * set1(0.693359375f)) - n * set1(-2.12194440e-4f);
  V y = set1(1.9875691500e-4f);
  y = y * r + set1(1.3981999507e-3f);
  y = y * r + set1(8.3334519073e-3f);
  y = y * r + set1(4.1665795894e-2f);
  y = y * r + set1(1.6666665459e-1f);
  y = y * r + set1(5.0000001201e-1f);
  y = (y * (r * r) + r) + set1(1.0f);
  return scale(y, n);
}

inline RowMax row_max(const float* x, int n) {
  const V inf = set1(__builtin_inff());
  RowMax best{-__builtin_inff(), 0, true};
  for (int start = 0; start < n; start += kRowBlock) {
    const int stop = min_of(n, start + kRowBlock);
    V m[4], sound[4];
    for (int k = 0; k < 4; ++k) m[k] = set1(-__builtin_inff()), sound[k] = set1(0.0f);
    int i = start;
    for (; i + 64 <= stop; i += 64)
      for (int k = 0; k < 4; ++k) {
        const V v = load(x + i + 16 * k);
        m[k] = max(m[k], v);
        sound[k] = select(less(v, inf), sound[k], inf);  // false for NaN too
      }
    float top = reduce_max(max(max(m[0], m[1]), max(m[2], m[3])));
    bool good = reduce_max(max(max(sound[0], sound[1]), max(sound[2], sound[3]))) == 0.0f;
    for (; i < stop; ++i) {
      good = good && x[i] < __builtin_inff();
      top = x[i] > top ? x[i] : top;
    }
    if (!good) return {top, start, false};
    if (top > best.value) best.value = top, best.block = start;
  }
  return best;
}

// Lanes are summed in float for 256 values, then in double lane by lane, then across.
inline double exp_sum(const float* x, int n, float row_max) {
  const V top = set1(row_max);
  double lanes[kLanes] = {};
  alignas(64) float part[kLanes];
  for (int start = 0; start < n; start += 256) {
    const int stop = min_of(n, start + 256);
    V sum = set1(0.0f);
    for (int i = start; i < stop; i += kLanes) {
      if (i + kLanes <= stop) sum = sum + exp_portable(load(x + i) - top);
      else sum = sum + select(first_lanes(stop - i), exp_portable(load_first(x + i, stop - i) - top), set1(0.0f));
    }
    store(part, sum);
    for (int k = 0; k < kLanes; ++k) lanes[k] += double(part[k]);
  }
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
}

// Whole numbers below 2^34, so that any order of adding them is exact. 1.5 * 2^52 rounds to even.
inline void add_weights(V w, double unit, double* lanes) {
  constexpr double magic = 6755399441055744.0;
#if defined(QUIRE_AVX512)
  const __m512d u = _mm512_set1_pd(unit), m = _mm512_set1_pd(magic);
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(w.r));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(w.r, 1));
  const __m512d a = _mm512_sub_pd(_mm512_add_pd(_mm512_mul_pd(low, u), m), m);
  const __m512d b = _mm512_sub_pd(_mm512_add_pd(_mm512_mul_pd(high, u), m), m);
  _mm512_storeu_pd(lanes, _mm512_add_pd(_mm512_loadu_pd(lanes), _mm512_add_pd(a, b)));
#else
  alignas(64) float part[kLanes];
  store(part, w);
  for (int k = 0; k < kLanes / 2; ++k) {
    const double a = (double(part[k]) * unit + magic) - magic;
    const double b = (double(part[k + 8]) * unit + magic) - magic;
    lanes[k] += a + b;
  }
#endif
}

inline double weight_sum(const float* x, size_t n, float row_max, float inv_t, double unit) {
  const V top = set1(row_max), inv = set1(inv_t);
  alignas(64) double lanes[kLanes / 2] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add_weights(exp_portable((load(x + i) - top) * inv), unit, lanes);
  if (i < n) {
    const int rest = int(n - i);
    const V w = exp_portable((load_first(x + i, rest) - top) * inv);
    add_weights(select(first_lanes(rest), w, set1(0.0f)), unit, lanes);
  }
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
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

// First words of the noise of tokens 16 i .. 16 i + 15 of a block of 32, i = 0, 1; `token` is a multiple of 32.
inline void philox_words(const PhiloxKeys& keys, uint64_t position, uint32_t token, uint32_t* words) {
#if defined(QUIRE_AVX512)
  const __m512i m0 = _mm512_set1_epi64(kPhiloxM0), m1 = _mm512_set1_epi64(kPhiloxM1);
  __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(token / 4), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  __m512i c1 = _mm512_set1_epi64(uint32_t(position)), c2 = _mm512_set1_epi64(int64_t(position >> 32));
  __m512i c3 = _mm512_setzero_si512();
  // The upper halves of c1 and c3 carry rubbish that neither the multiplication nor the end looks at.
  for (int i = 0; i < kPhiloxRounds; ++i) {
    const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
    const __m512i k0 = _mm512_set1_epi64(keys.k0[i]), k1 = _mm512_set1_epi64(keys.k1[i]);
    c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1, k0, 0x96);
    c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3, k1, 0x96);
    c1 = p1;
    c3 = p0;
  }
  const __mmask16 odd = 0xaaaa;
  const __m512i a = _mm512_mask_blend_epi32(odd, c0, _mm512_slli_epi64(c1, 32));
  const __m512i b = _mm512_mask_blend_epi32(odd, c2, _mm512_slli_epi64(c3, 32));
  const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  _mm512_storeu_si512(words, _mm512_permutex2var_epi64(a, first, b));
  _mm512_storeu_si512(words + 16, _mm512_permutex2var_epi64(a, second, b));
#elif defined(QUIRE_AVX2)
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxM0), m1 = _mm256_set1_epi64x(kPhiloxM1);
  for (int half = 0; half < 2; ++half) {
    __m256i c0 = _mm256_add_epi64(_mm256_set1_epi64x(token / 4 + 4 * half), _mm256_setr_epi64x(0, 1, 2, 3));
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
    __m256i* out = reinterpret_cast<__m256i*>(words + 16 * half);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
  }
#else
  for (uint32_t i = 0; i < 32; ++i) words[i] = philox_word(keys, position, token + i, 0);
#endif
}

// 1 - u is above miss(word), and at most a little: 31 bits of the noise's first word.
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

// A token beats the best score s only if -ln u < e^(z - s), and 1 - u < -ln u: one comparison with half the noise's
// bits rules out nearly all, without a logarithm. The margin covers the float arithmetic.
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
  const V top = set1(d.max), inv = set1(float(d.inv_temperature)), margin = set1(1.001f);
  alignas(64) uint32_t words[32];
  int start = 0;
  for (; start + 32 <= d.n; start += 32) {
    philox_words(race.keys, d.position, uint32_t(start), words);
    const V best = set1(float(race.best));
    for (int half = 0; half < 2; ++half) {
      const V bound = exp((load(d.x + start + 16 * half) - top) * inv - best) * margin;
      uint32_t out = lane_bits(less(bound, miss(words + 16 * half)));
      for (uint32_t in = ~out & 0xffffu; in != 0; in &= in - 1) {
        const int k = 16 * half + __builtin_ctz(in);
        race.enter(start + k, words[k]);
      }
    }
  }
  for (; start < d.n; ++start) race.enter(start);
  return race.token;
}

inline constexpr SamplerKernels sampler_kernels = {row_max,    exp_sum, weight_sum, count_above,
                                                   keep_range, collect, draw};

}  // namespace quire::QUIRE_ISA
