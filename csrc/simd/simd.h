// One vector type per instruction set: V is always 16 floats, so kernels and their orders of reduction read the same
// everywhere. Included only by files in kernels/, which are compiled once per set. Knows no kernel.
//
// Everything lives in quire::QUIRE_ISA. Do not call inline functions of the standard library from per-ISA code: the
// linker could keep the copy compiled with wide instructions for the whole library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(QUIRE_AVX512)
#include "simd/simd_avx512.h"
#elif defined(QUIRE_AVX2)
#include "simd/simd_avx2.h"
#elif defined(QUIRE_NEON)
#include "simd/simd_neon.h"
#else
#include "simd/simd_generic.h"
#endif

namespace quire::QUIRE_ISA {

constexpr int kLanes = 16;

template <class A>
inline A min_of(A a, A b) {
  return b < a ? b : a;
}
template <class A>
inline A max_of(A a, A b) {
  return a < b ? b : a;
}

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Splits rows into tiles of at most `most`, as equal as possible; the first ones are a row longer.
struct EqualTiles {
  int rows, count, size, longer;
  EqualTiles(int rows_, int most)
      : rows(rows_), count((rows_ + most - 1) / most), size(rows_ / max_of(count, 1)), longer(rows_ - size * count) {}
  int begin(int tile) const { return tile * size + min_of(tile, longer); }
};

inline float bf16_to_float(uint16_t h) {
  const uint32_t bits = uint32_t{h} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t float_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The first n of 16 lanes (0 <= n <= 16); the others read as zero and are not written.
#if defined(QUIRE_AVX512)
inline V load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n).m, p)}; }
inline void store_first(float* p, V v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n).m, v.r); }
#else
inline V load_first(const float* p, int n) {
  if (n == kLanes) return load(p);
  alignas(64) float lanes[kLanes] = {};
  std::memcpy(lanes, p, size_t(n) * 4);
  return load(lanes);
}
inline void store_first(float* p, V v, int n) {
  if (n == kLanes) return store(p, v);
  alignas(64) float lanes[kLanes];
  store(lanes, v);
  std::memcpy(p, lanes, size_t(n) * 4);
}
#endif

// y [columns][rows] = x [rows][columns], elements of 4 bytes.
template <class E>
inline void transpose(const E* x, size_t x_stride, int rows, int columns, E* y, size_t y_stride) {
  typedef E Quad __attribute__((vector_size(16), aligned(4)));
  int r = 0;
  for (; r + 4 <= rows; r += 4, x += 4 * x_stride) {
    E* to = y + r;
    int k = 0;
    for (; k + 4 <= columns; k += 4, to += 4 * y_stride) {
      Quad q[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&q[i], x + size_t(i) * x_stride + k, 16);
      const Quad a = __builtin_shufflevector(q[0], q[1], 0, 4, 1, 5);
      const Quad b = __builtin_shufflevector(q[2], q[3], 0, 4, 1, 5);
      const Quad c = __builtin_shufflevector(q[0], q[1], 2, 6, 3, 7);
      const Quad d = __builtin_shufflevector(q[2], q[3], 2, 6, 3, 7);
      const Quad t[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
                         __builtin_shufflevector(c, d, 0, 1, 4, 5), __builtin_shufflevector(c, d, 2, 3, 6, 7)};
      for (int i = 0; i < 4; ++i) std::memcpy(to + size_t(i) * y_stride, &t[i], 16);
    }
    for (; k < columns; ++k, to += y_stride)
      for (int i = 0; i < 4; ++i) to[i] = x[size_t(i) * x_stride + size_t(k)];
  }
  for (; r < rows; ++r, x += x_stride)
    for (int k = 0; k < columns; ++k) y[size_t(k) * y_stride + size_t(r)] = x[k];
}

// Fixed trees: lane i is added to lane i + 8, then i + 4, i + 2, i + 1.
#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
inline float reduce_add(V v) {
  const __m256 eight = add_halves(v);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#elif defined(QUIRE_NEON)
inline float reduce_add(V v) {
  const float32x4_t four = (v.q[0] + v.q[2]) + (v.q[1] + v.q[3]);
  const float32x2_t two = vget_low_f32(four) + vget_high_f32(four);
  return two[0] + two[1];
}
#else
inline float reduce_add(V v) {
  alignas(64) float a[kLanes];
  store(a, v);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a[i] = a[i] + a[i + half];
  return a[0];
}
#endif
// One bit per lane.
inline uint32_t lane_bits(M m) {
#if defined(QUIRE_AVX512)
  return m.m;
#elif defined(QUIRE_AVX2)
  return uint32_t(_mm256_movemask_ps(m.a)) | uint32_t(_mm256_movemask_ps(m.b)) << 8;
#elif defined(QUIRE_NEON)
  constexpr uint32x4_t bits = {1, 2, 4, 8};
  return vaddvq_u32((m.q[0] & bits) + (m.q[1] & bits << 4) + (m.q[2] & bits << 8) + (m.q[3] & bits << 12));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(m.m[i] & 1) << i;
  return bits;
#endif
}

// In any order: the result is undefined if a lane is NaN.
#if defined(QUIRE_AVX512)
inline float reduce_max(V v) { return _mm512_reduce_max_ps(v.r); }
#elif defined(QUIRE_NEON)
inline float reduce_max(V v) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(v.q[0], v.q[1]), vmaxq_f32(v.q[2], v.q[3])));
}
#else
inline float reduce_max(V v) {
  alignas(64) float a[kLanes];
  store(a, v);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a[i] = max_of(a[i], a[i + half]);
  return a[0];
}
#endif

// exp and exp_below: `Above` if x may be positive.
template <bool Above>
inline V exp_as(V x) {
  const V n = round_even(x * set1(1.44269504088896341f));
  V r = fma(n, set1(-0.693145751953125f), x);
  r = fma(n, set1(-1.42860682030941723e-6f), r);
  V p = set1(1.0f / 5040.0f);
  p = fma(p, r, set1(1.0f / 720.0f));
  p = fma(p, r, set1(1.0f / 120.0f));
  p = fma(p, r, set1(1.0f / 24.0f));
  p = fma(p, r, set1(1.0f / 6.0f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  // For x out of range n is clamped, and the selects return the limits.
  const V clamped = max(n, set1(-126.0f)), least = set1(-87.3f);
  if constexpr (!Above) return select(less(x, least), set1(0.0f), scale(p, clamped));
  const V y = scale(p, min(clamped, set1(127.0f)));
  const V finite = select(less(set1(127.0f), n), y + y, y);  // n is 128 for x of 88.4 and more
  return select(less(set1(88.7f), x), set1(__builtin_inff()), select(less(x, least), set1(0.0f), finite));
}

// e^x within 2 ulp; 0 below -87.3 (also for -inf), +inf above 88.7; NaN stays NaN.
inline V exp(V x) { return exp_as<true>(x); }
// The same for x <= 0 or NaN.
inline V exp_below(V x) { return exp_as<false>(x); }

}  // namespace quire::QUIRE_ISA
