// V in plain C++ with the compiler's vector extension: any CPU. Part of simd.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace quire::QUIRE_ISA {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

struct V {
  Floats r;
};
struct M {
  Ints m;
};

inline Bits to_bits(V v) {
  Bits b;
  std::memcpy(&b, &v.r, sizeof(b));
  return b;
}
inline V from_bits(Bits b) {
  V v;
  std::memcpy(&v.r, &b, sizeof(b));
  return v;
}
inline V set1(float x) { return {Floats{} + x}; }
inline V load(const float* p) {
  V v;
  std::memcpy(&v.r, p, sizeof(v.r));
  return v;
}
inline void store(float* p, V v) { std::memcpy(p, &v.r, sizeof(v.r)); }
inline V load_bf16(const uint16_t* p) {
  Bits b;
  for (int i = 0; i < 16; ++i) b[i] = uint32_t{p[i]} << 16;
  return from_bits(b);
}
// Round to nearest even; NaN stays NaN.
inline void store_bf16(uint16_t* p, V v) {
  const Bits bits = to_bits(v);
  for (int i = 0; i < 16; ++i) {
    const uint32_t b = bits[i];
    p[i] = (b & 0x7fffffffu) > 0x7f800000u ? uint16_t((b >> 16) | 0x40u)
                                           : uint16_t((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
  }
}

inline V operator+(V a, V b) { return {a.r + b.r}; }
inline V operator-(V a, V b) { return {a.r - b.r}; }
inline V operator*(V a, V b) { return {a.r * b.r}; }
inline V operator/(V a, V b) { return {a.r / b.r}; }
#if defined(__aarch64__)
inline V fma(V a, V b, V c) {  // a * b + c, rounded once
  V v;
  for (int i = 0; i < 16; ++i) v.r[i] = __builtin_fmaf(a.r[i], b.r[i], c.r[i]);
  return v;
}
#else
// Rounded twice, because without the instruction a fused multiply-add is a slow library call. It is always so, so
// results are still exact (docs/architecture.md, "Exactness").
inline V fma(V a, V b, V c) { return {a.r * b.r + c.r}; }
#endif
inline V select(M m, V yes, V no) { return {m.m ? yes.r : no.r}; }
inline M less(V a, V b) { return {a.r < b.r}; }
inline V min(V a, V b) { return {a.r < b.r ? a.r : b.r}; }
inline V max(V a, V b) { return {a.r > b.r ? a.r : b.r}; }
inline V abs(V a) { return from_bits(to_bits(a) & 0x7fffffffu); }
inline V sqrt(V a) {
  V v;
  for (int i = 0; i < 16; ++i) v.r[i] = __builtin_sqrtf(a.r[i]);
  return v;
}
// Adding and subtracting 1.5 * 2^23 rounds to an integer; larger magnitudes are integers already.
inline V round_even(V a) {
  const V magic = set1(12582912.0f);
  const V rounded = (a + magic) - magic;
  return select(less(abs(a), set1(4194304.0f)), rounded, a);
}
inline V scale(V a, V n) {  // a * 2^n, n whole in [-126, 127]; any other n is taken for the nearer end
  const V most = set1(127.0f), least = set1(-126.0f);
  n = max(select(less(n, most), n, most), least);
  Bits b;
  for (int i = 0; i < 16; ++i) b[i] = uint32_t(int32_t(n.r[i]) + 127) << 23;
  return a * from_bits(b);
}
inline V copysign(V a, V sign) { return from_bits((to_bits(a) & 0x7fffffffu) | (to_bits(sign) & 0x80000000u)); }
inline M first_lanes(int n) {  // lanes 0..n-1
  M m;
  for (int i = 0; i < 16; ++i) m.m[i] = i < n ? -1 : 0;
  return m;
}

}  // namespace quire::QUIRE_ISA
