// Loops that only read, or only multiply and add, as fast as this instruction set can.
#pragma once

#include <cstdint>

#include "simd/simd.h"
#include "simd/simd_dots.h"

namespace quire::QUIRE_ISA {

// Four streams a quarter of the buffer apart, each prefetched: the most that a core can read.
inline uint32_t probe_read(const char* data, size_t bytes) {
  constexpr int streams = 4;
  constexpr size_t ahead = 1536;
  const size_t quarter = bytes / streams / 64 * 64;
  V sum[streams];
  for (int s = 0; s < streams; ++s) sum[s] = set1(0);
  for (size_t i = 0; i < quarter; i += 64)
#pragma GCC unroll 4
    for (int s = 0; s < streams; ++s) {
      const char* p = data + quarter * size_t(s) + i;
      __builtin_prefetch(p + ahead, 0, 3);
      sum[s] = sum[s] + load(reinterpret_cast<const float*>(p));
    }
  const float total = reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
  uint32_t bits;
  std::memcpy(&bits, &total, 4);
  return bits;
}

// Enough chains in flight to hide the latency of a fused multiply-add on two ports.
#if defined(QUIRE_AVX512)
constexpr int kProbeChains = 12;
#else
constexpr int kProbeChains = 6;
#endif

// Lanes that differ: the compiler would compute equal registers of a vector once.
constexpr int32_t kProbeLanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Operations per step; runs `steps` of them.
inline double probe_fp32(int64_t steps) {
  V acc[kProbeChains];
#pragma GCC unroll 16
  for (int i = 0; i < kProbeChains; ++i) acc[i] = to_float(iload(kProbeLanes) + iset1(i));
  const V x = set1(0.5f), y = set1(0.3f);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < kProbeChains; ++i) acc[i] = fma(x, acc[i], y);
  }
  V sum = acc[0];
#pragma GCC unroll 16
  for (int i = 1; i < kProbeChains; ++i) sum = sum + acc[i];
  volatile float sink = reduce_add(sum);
  (void)sink;
  return double(kProbeChains) * 32;
}

#if defined(QUIRE_BF16_DOT) && !defined(QUIRE_BF16_DOT_EMULATED)
inline double probe_bf16(int64_t steps) {
  V acc[kProbeChains];
#pragma GCC unroll 16
  for (int i = 0; i < kProbeChains; ++i) acc[i] = to_float(iload(kProbeLanes) + iset1(i));
  const I x = iset1(0x3c003c00), y = iset1(0x3c013c00);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < kProbeChains; ++i) acc[i] = dot_pairs(acc[i], x, y);
  }
  V sum = acc[0];
#pragma GCC unroll 16
  for (int i = 1; i < kProbeChains; ++i) sum = sum + acc[i];
  volatile float sink = reduce_add(sum);
  (void)sink;
  return double(kProbeChains) * 64;
}
#else
inline double probe_bf16(int64_t) { return 0; }
#endif

// The instruction of products of int8.
#if defined(QUIRE_WORD_DOTS)
constexpr int kProbeDots = 64;
inline I probe_dots(I sum, I x, I y) { return dot_words(sum, x, y); }
#else
constexpr int kProbeDots = 128;
inline I probe_dots(I sum, I x, I y) { return dot_bytes(sum, x, y); }
#endif

inline double probe_int8(int64_t steps) {
  I acc[kProbeChains];
#pragma GCC unroll 16
  for (int i = 0; i < kProbeChains; ++i) acc[i] = iload(kProbeLanes) + iset1(i);
  const I x = iset1(0x01020304), y = iset1(0x02030101);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < kProbeChains; ++i) acc[i] = probe_dots(acc[i], x, y);
  }
  I sum = acc[0];  // the sum of all chains, because the compiler drops an unused one
#pragma GCC unroll 16
  for (int i = 1; i < kProbeChains; ++i) sum = sum + acc[i];
  volatile float sink = reduce_add(to_float(sum));
  (void)sink;
  return double(kProbeChains) * kProbeDots;
}

}  // namespace quire::QUIRE_ISA
