// The dots that multiply weights of each float layout with float activations. Knows types only.
#pragma once

#include "linear/layouts.h"
#include "linear/micro/dots.h"

namespace quire::QUIRE_ISA {

#if defined(QUIRE_BF16_DOT)
using DotBf16 = DotPairs;
#else
using DotBf16 = DotWide;
#endif

template <class Layout>
struct DotOf;

template <>
struct DotOf<Float32> {
  using type = DotF32;
};
template <>
struct DotOf<Float16> {
  using type = DotHalves;
};
template <>
struct DotOf<Bfloat16> {
  using type = DotBf16;
};
template <>
struct DotOf<Bfloat16In12> {
  using type = Compact<DotBf16>;
};

}  // namespace quire::QUIRE_ISA
