// The noise of sampling, and its portable exp and log. Knows no row and no slot.
//
// One IEEE operation at a time (contraction is off), in the order of devices/reference/logits.py and sampler.py, so
// that every instruction set gives the bits of the numpy oracle.
#pragma once

#include <cstdint>

namespace quire::QUIRE_ISA {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr int kPhiloxRounds = 10;

struct PhiloxKeys {
  uint32_t k0[kPhiloxRounds], k1[kPhiloxRounds];

  explicit PhiloxKeys(uint64_t seed) {
    uint32_t a = uint32_t(seed), b = uint32_t(seed >> 32);
    for (int i = 0; i < kPhiloxRounds; ++i, a += 0x9E3779B9u, b += 0xBB67AE85u) k0[i] = a, k1[i] = b;
  }
};

// Philox4x32-10 (Salmon et al. 2011) at counter (token / 4, position, part): the word of token % 4.
inline uint32_t philox_word(const PhiloxKeys& keys, uint64_t position, uint32_t token, uint32_t part) {
  uint32_t c[4] = {token / 4, uint32_t(position), uint32_t(position >> 32), part};
  for (int i = 0; i < kPhiloxRounds; ++i) {
    const uint64_t p0 = uint64_t{c[0]} * kPhiloxM0, p1 = uint64_t{c[2]} * kPhiloxM1;
    c[0] = uint32_t(p1 >> 32) ^ c[1] ^ keys.k0[i];
    c[2] = uint32_t(p0 >> 32) ^ c[3] ^ keys.k1[i];
    c[1] = uint32_t(p1);
    c[3] = uint32_t(p0);
  }
  return c[token % 4];
}

// ln x for normal x > 0.
inline double log_portable(double x) {
  int e;
  double m = __builtin_frexp(x, &e);
  if (m < 0.70710678118654752) m = m * 2.0, e -= 1;
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double series = 1.0 / 23.0;
  for (int n = 21; n > 0; n -= 2) series = series * z + 1.0 / n;
  return e * 0.69314718055994531 + (s * series) * 2.0;
}

// -ln(-ln u), u in (0, 1) from the upper 52 of 64 bits.
inline double gumbel(uint32_t high, uint32_t low) {
  const uint64_t k = ((uint64_t{high} << 32) | low) >> 12;
  const double u = (double(k) * 2.0 + 1.0) * 0x1p-53;
  return -log_portable(-log_portable(u));
}

}  // namespace quire::QUIRE_ISA
