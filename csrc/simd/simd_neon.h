// V on NEON: four registers. Part of simd.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace quire::QUIRE_ISA {

struct V {
  float32x4_t q[4];
};
struct M {
  uint32x4_t q[4];
};

// A T whose register i is f(i).
template <class T, class F>
inline T quarters(F&& f) {
  return {{f(0), f(1), f(2), f(3)}};
}
#define QUIRE_EACH(result, name, parameters, register_i)                        \
  inline result name parameters {                                                \
    return quarters<result>([&]([[maybe_unused]] int i) { return register_i; }); \
  }

QUIRE_EACH(V, set1, (float x), vdupq_n_f32(x))
QUIRE_EACH(V, load, (const float* p), vld1q_f32(p + 4 * i))
QUIRE_EACH(V, load_bf16, (const uint16_t* p), vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)))

inline void store(float* p, V v) {
  vst1q_f32(p, v.q[0]), vst1q_f32(p + 4, v.q[1]), vst1q_f32(p + 8, v.q[2]), vst1q_f32(p + 12, v.q[3]);
}
// Round to nearest even; NaN stays NaN.
inline void store_bf16(uint16_t* p, V v) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v.q[i]), top = bits >> 16;
    const uint32x4_t rounded = (bits + (top & 1) + 0x7fff) >> 16;
    vst1_u16(p + 4 * i, vmovn_u32(vbslq_u32(vceqq_f32(v.q[i], v.q[i]), rounded, top | 0x40)));
  }
}

QUIRE_EACH(V, operator+, (V a, V b), vaddq_f32(a.q[i], b.q[i]))
QUIRE_EACH(V, operator-, (V a, V b), vsubq_f32(a.q[i], b.q[i]))
QUIRE_EACH(V, operator*, (V a, V b), vmulq_f32(a.q[i], b.q[i]))
QUIRE_EACH(V, operator/, (V a, V b), vdivq_f32(a.q[i], b.q[i]))
QUIRE_EACH(V, fma, (V a, V b, V c), vfmaq_f32(c.q[i], a.q[i], b.q[i]))  // a * b + c, rounded once
QUIRE_EACH(V, select, (M m, V yes, V no), vbslq_f32(m.q[i], yes.q[i], no.q[i]))
QUIRE_EACH(M, less, (V a, V b), vcltq_f32(a.q[i], b.q[i]))
QUIRE_EACH(V, abs, (V a), vabsq_f32(a.q[i]))
QUIRE_EACH(V, sqrt, (V a), vsqrtq_f32(a.q[i]))
QUIRE_EACH(V, round_even, (V a), vrndnq_f32(a.q[i]))
// a * 2^n, n whole in [-126, 127]
QUIRE_EACH(V, scale, (V a, V n), a.q[i] * vreinterpretq_f32_s32((vcvtq_s32_f32(n.q[i]) + 127) << 23))
QUIRE_EACH(V, copysign, (V a, V sign), vbslq_f32(vdupq_n_u32(0x80000000u), sign.q[i], a.q[i]))
// As on x86: the second one if one is NaN.
inline V min(V a, V b) { return select(less(a, b), a, b); }
inline V max(V a, V b) { return select(less(b, a), a, b); }
inline M first_lanes(int n) {  // lanes 0..n-1
  constexpr int32x4_t lanes = {0, 1, 2, 3};
  return quarters<M>([&](int i) { return vcltq_s32(lanes, vdupq_n_s32(n - 4 * i)); });
}

}  // namespace quire::QUIRE_ISA
