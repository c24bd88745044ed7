// Rounds rows of activations as formats say, before they are multiplied with quantized weights. Knows numbers; no threads
// and no layout. The oracle is src/quire/weights/activations.py.
#pragma once

#include "linear/format.h"
#include "linear/source_rows.h"
#include "simd/simd.h"
#include "simd/simd_int.h"

namespace quire::QUIRE_ISA {

// Values within a number's range to the nearest one with `Mantissa` bits behind its first, whose least normal number is
// 2^Least; ties to even.
template <int Mantissa, int Least>
inline V rounded_to(V v) {
  const I exponent = magnitude_bits(v) & iset1(0x7f800000);
  const V power = float_of(max(exponent, iset1((127 + Least) << 23)));
  constexpr float steps = float(1 << Mantissa);
  return round_even(v / power * set1(steps)) * (power * set1(1.0f / steps));
}

inline V rounded_to(RoundedNumber number, V v) {
  if (number == RoundedNumber::e4m3) return rounded_to<3, -6>(max(min(v, set1(448.0f)), set1(-448.0f)));
  return rounded_to<1, 0>(max(min(v, set1(6.0f)), set1(-6.0f)));
}

inline float largest(RoundedNumber number) {
  return number == RoundedNumber::int8 ? 127.0f : number == RoundedNumber::e4m3 ? 448.0f : 6.0f;
}

// The scale of a group whose largest magnitude, which is finite, is `most`.
inline float group_scale(const InputRounding& r, float most) {
  switch (r.scales) {
    case RoundedScale::fixed:
      return r.outer;
    case RoundedScale::e4m3: {
      float lanes[kLanes];
      store(lanes, rounded_to(RoundedNumber::e4m3, set1(most / 6.0f * r.outer)));
      return lanes[0] / r.outer;
    }
    case RoundedScale::e8m0: {
      const bool fp4 = r.number == RoundedNumber::e2m1;
      const int exponent = int((quire::to_bits(most) + (fp4 ? 0x00200000u : 0u)) >> 23) - (fp4 ? 2 : 8);
      return quire::from_bits(uint32_t(max_of(exponent, 1)) << 23);
    }
    case RoundedScale::float32:
    case RoundedScale::powers:
      break;
  }
  const float bounded = max_of(r.most > 0 ? min_of(most, r.most) : most, kLeastMagnitude);
  const float scale = bounded / largest(r.number);
  return r.scales == RoundedScale::powers ? quire::from_bits((quire::to_bits(scale) + 0x007fffffu) & 0xff800000u) : scale;
}

// int8 codes less their zero, times the scale.
inline V spanned(V codes, float zero, V scale) {
  return (max(min(codes + set1(zero), set1(127.0f)), set1(-128.0f)) - set1(zero)) * scale;
}

// One group of columns; `to` may be x.
inline void round_group(const float* x, int n, const InputRounding& r, float* to) {
  const float most = greatest_magnitude(x, n);
  auto each = [&](auto&& f) {
    for (int k = 0; k < n; k += kLanes) store_first(to + k, f(load_first(x + k, min_of(kLanes, n - k))), min_of(kLanes, n - k));
  };
  if (!(most >= 0)) return each([&](V) { return set1(most); });  // not finite
  if (r.asymmetric) {
    float least = 0, top = 0;
    for (int k = 0; k < n; ++k) least = min_of(least, x[k]), top = max_of(top, x[k]);
    const float scale = max_of(top - least, kLeastMagnitude) / 255.0f;
    const float zero = -128.0f - __builtin_rintf(least / scale);
    return each([&](V v) { return spanned(round_even(v / set1(scale)), zero, set1(scale)); });
  }
  if (r.number == RoundedNumber::int8 && r.scales == RoundedScale::float32 && r.zero == 0) {  // as linear/rounded_rows.h
    const Int8Scale found = int8_scale(x, n);
    return each([&](V v) { return round_even(v * set1(found.inverse)) * set1(found.scale); });
  }
  const float scale = group_scale(r, most);
  if (!(scale > 0)) return each([&](V) { return set1(0.0f); });
  if (r.number == RoundedNumber::int8)
    return each([&](V v) { return spanned(round_even(v / set1(scale)), float(r.zero), set1(scale)); });
  each([&](V v) { return rounded_to(r.number, v / set1(scale)) * set1(scale); });
}

inline void round_row(const float* x, int width, const InputRounding& r, float* to) {
  const int size = r.columns > 0 ? r.columns : width;
  for (int k = 0; k < width; k += size) round_group(x + k, min_of(size, width - k), r, to + k);
}

}  // namespace quire::QUIRE_ISA
