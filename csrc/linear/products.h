// The products of each layout with float activations and with activations rounded to int8. Knows types only.
#pragma once

#include "linear/layouts.h"
#include "linear/linear_dots.h"

namespace quire::QUIRE_ISA {

#if defined(QUIRE_BF16_DOT)
using DotBf16 = DotPairs;
#else
using DotBf16 = DotWide;
#endif

// `Float` multiplies float activations (linear_as), `Int8` activations rounded to int8 (linear_quantized); void: none.
template <class L>
struct ProductsOf;

template <>
struct ProductsOf<Float32> {
  using Float = DotF32;
  using Int8 = void;
};
template <>
struct ProductsOf<Float16> {
  using Float = DotHalves;
  using Int8 = void;
};
template <>
struct ProductsOf<Bfloat16> {
  using Float = DotBf16;
  using Int8 = void;
};
template <>
struct ProductsOf<Bfloat16In12> {
  using Float = Compact<DotBf16>;
  using Int8 = void;
};
template <>
struct ProductsOf<quire::Int8> {
  using Float = DotI8Wide;
  using Int8 = DotI8;
};
// Blocks have loops of their own (linear_blocks.h).
template <>
struct ProductsOf<Blocks> {
  using Float = void;
  using Int8 = void;
};
template <>
struct ProductsOf<Int4> {
  using Float = DotI4Wide;
  using Int8 = DotI4;
};

}  // namespace quire::QUIRE_ISA
