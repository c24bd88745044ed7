// Activation functions on V. Knows numbers only. The polynomials are minimax fits, weighted for relative error.
#pragma once

#include "kernels/kernels.h"
#include "simd/simd.h"

namespace quire::QUIRE_ISA {

template <int N>
inline V polynomial(const float (&c)[N], V x) {  // c[0] + c[1] x + ... by Horner
  V p = set1(c[N - 1]);
  for (int i = N - 2; i >= 0; --i) p = fma(p, x, set1(c[i]));
  return p;
}

inline V sigmoid(V x) { return set1(1.0f) / (set1(1.0f) + exp(set1(0.0f) - x)); }

inline V tanh(V x) {
  // Near zero x + x^3 P(x^2); else 1 - 2 / (e^2|x| + 1), where nothing cancels.
  constexpr float near[] = {-0.33333334f, 0.13333313f, -0.053961772f, 0.021790003f, -0.0084153516f, 0.0023765927f};
  const V a = abs(x), s = x * x;
  const V small = fma(polynomial(near, s) * s, x, x);
  const V large = set1(1.0f) - set1(2.0f) / (exp(a + a) + set1(1.0f));
  return select(less(a, set1(0.6f)), small, copysign(large, x));
}

inline V erf(V x) {
  // |x| < 1: x + x P(x^2); up to 4: 1 - e^-Q(|x|); beyond, 1 in float32.
  constexpr float near[] = {0.12837917f, -0.37612626f, 0.112836f, -0.026854444f, 0.0051895352f, -0.00080208411f,
                            7.8891193e-05f};
  constexpr float far[] = {0.00034151258f, 1.1270893f, 0.63814473f, 0.10310682f, -0.021838097f, 0.0029476667f,
                           -0.00018638009f};
  const V a = min(set1(4.0f), abs(x));  // this order keeps NaN
  const V small = fma(polynomial(near, x * x), x, x);
  const V large = set1(1.0f) - exp(set1(0.0f) - polynomial(far, a));
  return select(less(abs(x), set1(1.0f)), small, copysign(large, x));
}

// log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|, and log(1 + u) = 2 atanh(u / (2 + u)) by its series.
inline V softplus(V x) {
  constexpr float series[] = {1.0f, 1.0f / 3, 1.0f / 5, 1.0f / 7, 1.0f / 9, 1.0f / 11, 1.0f / 13};
  const V u = exp_below(set1(0.0f) - abs(x)), s = u / (u + set1(2.0f));
  return max(set1(0.0f), x) + polynomial(series, s * s) * (s + s);  // this order keeps NaN
}

inline V activate(Activation kind, V x) {
  switch (kind) {
    case Activation::silu:
    case Activation::clamped_silu:  // gates only
      return x * sigmoid(x);
    case Activation::gelu:
      return x * set1(0.5f) * (set1(1.0f) + erf(x * set1(0.70710678f)));
    case Activation::gelu_tanh: {
      const V inner = set1(0.7978845608f) * fma(set1(0.044715f) * x * x, x, x);
      return x * set1(0.5f) * (set1(1.0f) + tanh(inner));
    }
    case Activation::relu:
      return max(set1(0.0f), x);  // this order keeps NaN
    case Activation::relu2: {
      const V positive = max(set1(0.0f), x);
      return positive * positive;
    }
    case Activation::sigmoid:
      return sigmoid(x);
    case Activation::softplus:
      return softplus(x);
    case Activation::clamped_swiglu:  // gates only
    case Activation::none:
      break;
  }
  return x;
}

// activation(gate) * up; with a limit > 0 the first is at most that, the second within it both ways. gpt-oss clamps both
// before, to 7 without a limit, and multiplies with up + 1 (arXiv:2508.10925). clamped_silu clamps before, and no more.
inline V gate(Activation kind, V g, V up, float most) {
  if (kind == Activation::clamped_silu && most > 0) {
    const V low = min(set1(most), g);
    return low * sigmoid(low) * max(set1(-most), min(set1(most), up));
  }
  if (kind != Activation::clamped_swiglu) {
    const V v = activate(kind, g);
    if (most <= 0) return v * up;
    return min(set1(most), v) * max(set1(-most), min(set1(most), up));
  }
  const float bound = most > 0 ? most : 7.0f;
  const V limit = set1(bound), low = min(limit, g);
  const V u = max(set1(-bound), min(limit, up));
  return low * sigmoid(low * set1(1.702f)) * (u + set1(1.0f));
}

}  // namespace quire::QUIRE_ISA
