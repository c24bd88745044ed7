// Elements of caches that are narrower than bfloat16's range or precision: float16, E4M3 and E5M2, one by one and 16 at a time.
#pragma once

#include "simd/simd_values.h"

namespace quire::QUIRE_ISA {

struct Half {
  uint16_t bits;
};
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

inline V load_kv(const Half* p) { return load_halves(p); }
inline V load_kv(const E4m3* p) { return low_half(e4m3_halves(shl<8>(load_bytes(p)))) * set1(kE4m3Scale); }
inline V load_kv(const E5m2* p) { return low_half(shl<8>(load_bytes(p))); }

template <class E>
inline float widened_one(E x) {
  alignas(64) E sixteen[kLanes] = {};
  sixteen[0] = x;
  alignas(64) float lanes[kLanes];
  store(lanes, load_kv(sixteen));
  return lanes[0];
}

// Rounds a magnitude to `mantissa` bits below its first, or below that of the least normal number, 2^least; ties to even.
// The result is exponent (from `bias` on) and mantissa as the bits of a number; a magnitude that rounds to above `most`
// gives `most`, and one that is not a number gives `none`.
inline uint32_t rounded_bits(float magnitude, int mantissa, int least, uint32_t most, uint32_t none) {
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  if (bits > 0x7f800000u) return none;
  const int exponent = int(bits >> 23) - 127;
  uint32_t found;
  if (exponent < least) {  // a multiple of the smallest number
    float scaled = magnitude;
    const uint32_t factor_bits = uint32_t(127 + mantissa - least) << 23;
    float factor;
    std::memcpy(&factor, &factor_bits, 4);
    scaled *= factor;
    found = uint32_t((scaled + 12582912.0f) - 12582912.0f);
  } else {
    const int cut = 23 - mantissa;
    const uint32_t even = (bits >> cut) & 1u;
    const uint32_t up = (bits + ((1u << (cut - 1)) - 1u) + even) >> cut;
    found = up - (uint32_t(127 + least - 1) << mantissa);
  }
  return found < most ? found : most;
}

inline float magnitude_of(float x, uint32_t& sign) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  sign = bits >> 31;
  bits &= 0x7fffffffu;
  float m;
  std::memcpy(&m, &bits, 4);
  return m;
}

// float16 as IEEE 754 has it; FP8 stays finite.
inline void narrowed(float x, Half* to) {
  uint32_t sign;
  const float m = magnitude_of(x, sign);
  to->bits = uint16_t(sign << 15 | rounded_bits(m, 10, -14, 0x7c00u, 0x7e00u));
}
inline void narrowed(float x, E4m3* to) {
  uint32_t sign;
  const float m = magnitude_of(x, sign);
  to->bits = uint8_t(sign << 7 | rounded_bits(m, 3, -6, 0x7eu, 0x7fu));
}
inline void narrowed(float x, E5m2* to) {
  uint32_t sign;
  const float m = magnitude_of(x, sign);
  to->bits = uint8_t(sign << 7 | rounded_bits(m, 2, -14, 0x7bu, 0x7fu));
}

}  // namespace quire::QUIRE_ISA
