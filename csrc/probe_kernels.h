// Loops that do nothing but read, or nothing but multiply and add, as fast as this instruction set can.
#pragma once

#include <cstdint>

#include "simd.h"

namespace quire::QUIRE_ISA {

inline uint32_t probe_read(const char* data, size_t bytes) {
  const uint64_t* p = reinterpret_cast<const uint64_t*>(data);
  uint64_t sum = 0;
  // Eight 64-byte lines a turn, which the compiler turns into vectors.
  for (size_t i = 0; i + 64 <= bytes / 8; i += 64) {
    uint64_t lanes[8] = {};
    for (int line = 0; line < 8; ++line)
      for (int j = 0; j < 8; ++j) lanes[j] ^= p[i + size_t(line) * 8 + size_t(j)];
    for (int j = 0; j < 8; ++j) sum ^= lanes[j];
  }
  return uint32_t(sum ^ (sum >> 32));
}

// Enough chains in flight to hide the latency of a fused multiply-add on two ports.
#if defined(QUIRE_AVX512)
constexpr int kProbeChains = 12;
#else
constexpr int kProbeChains = 6;
#endif

// Operations per step; runs `steps` of them.
inline double probe_fp32(int64_t steps) {
  V acc[kProbeChains];
  for (int i = 0; i < kProbeChains; ++i) acc[i] = set1(float(i));
  const V x = set1(0.5f), y = set1(0.3f);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < kProbeChains; ++i) acc[i] = fma(x, acc[i], y);
  }
  V sum = acc[0];
  for (int i = 1; i < kProbeChains; ++i) sum = sum + acc[i];
  volatile float sink = reduce_add(sum);
  (void)sink;
  return double(kProbeChains) * 32;
}

#if defined(QUIRE_BF16_DOT) && !defined(QUIRE_BF16_DOT_EMULATED)
inline double probe_bf16(int64_t steps) {
  __m512 acc[kProbeChains];
  for (int i = 0; i < kProbeChains; ++i) acc[i] = _mm512_set1_ps(float(i));
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3c003c00), y = (__m512bh)_mm512_set1_epi32(0x3c013c00);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < kProbeChains; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], x, y);
  }
  V sum = {acc[0]};
  for (int i = 1; i < kProbeChains; ++i) sum = sum + V{acc[i]};
  volatile float sink = reduce_add(sum);
  (void)sink;
  return double(kProbeChains) * 64;
}
#else
inline double probe_bf16(int64_t) { return 0; }
#endif

}  // namespace quire::QUIRE_ISA
