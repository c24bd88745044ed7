// The products of one step of K: R rows times P panels, by type and packing of the weights. Knows registers; no loop.
#pragma once

#include "linear/compact.h"
#include "simd/simd.h"
#include "simd/simd_bytes.h"
#include "simd/simd_dots.h"
#include "simd/simd_int.h"
#include "simd/simd_values.h"

namespace quire::QUIRE_ISA {

// acc[r][first + n] += a[r] * w[n]. (A multiply-add that broadcasts an operand from memory runs at half the rate.)
template <int R, int N, int P>
inline void add_products(const float* a, const V (&w)[N], V (&acc)[R][P], int first = 0) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const V x = set1(a[r]);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][first + n] = fma(x, w[n], acc[r][first + n]);
  }
}

// The loop over steps (loops.h): on weights as packed, by groups of columns that share a scale, or expanded
// first.
enum class Loop { plain, groups, compact };

// The product of one step, `kStepK` columns of K: `kStepBytes` of a panel, and `kStepA` elements of 4 bytes per row of
// a tile.
struct FloatSums {
  using Sum = V;
  static constexpr bool kCrossed = false;  // whether activations are in crossed order (simd_values.h)
  static constexpr Loop kLoop = Loop::plain;
  static inline V begin(int32_t) { return set1(0); }
  static inline V load_sum(const float* p) { return load(p); }
  static inline void store_sum(float* p, V v) { store(p, v); }
};

struct DotF32 : FloatSums {
  using A = float;
  static constexpr int kStepK = 1, kStepBytes = 64, kStepA = 1;

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], V (&acc)[R][P]) {
    V w[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) w[p] = load(reinterpret_cast<const float*>(b[p]));
    add_products(a, w, acc);
  }
};

// The same for numbers in groups of columns, whose sums are scaled together.
struct DotSummed : DotF32 {
  static constexpr Loop kLoop = Loop::groups;
  static constexpr int kRun = 1;
  static inline V settled(V acc) { return acc; }
  static inline V scaled(V acc, V scale, V before) { return fma(scale, acc, before); }
  static inline V shift(V, V) { return set1(0); }  // such groups have no offsets
};

// float16 weights widened to float32, two columns per step; activations stay float32.
struct DotHalves : FloatSums {
  using A = float;
  static constexpr int kStepK = 2, kStepBytes = 64, kStepA = 2;

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], V (&acc)[R][P]) {
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      V w[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) w[p] = load_halves(b[p] + k * 32);
      add_products(a + k * R, w, acc);
    }
  }
};

// bfloat16 weights, two columns of K in each lane: `Dot::add` multiplies panels from `first` on.
template <class Dot, class Element>
struct PairSteps : FloatSums {
  using A = Element;
  static constexpr int kStepK = 2, kStepBytes = 64;

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], V (&acc)[R][P]) {
    I pairs[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) pairs[p] = iload(b[p]);
    Dot::add(a, pairs, acc, 0);
  }
};

// bfloat16 weights widened to float32 in registers; activations stay float32.
struct DotWide : PairSteps<DotWide, float> {
  static constexpr int kStepA = 2;

  template <int R, int N, int P>
  static inline void add(const A* a, const I (&pairs)[N], V (&acc)[R][P], int first) {
    V w[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) w[n] = pair_first(pairs[n]);
    add_products(a, w, acc, first);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) w[n] = pair_second(pairs[n]);
    add_products(a + R, w, acc, first);
  }
};

#if defined(QUIRE_BF16_DOT)
// bfloat16 weights times activations rounded to bfloat16, two columns of K per instruction.
struct DotPairs : PairSteps<DotPairs, uint32_t> {
  static constexpr int kStepA = 1;

  template <int R, int N, int P>
  static inline void add(const A* a, const I (&pairs)[N], V (&acc)[R][P], int first) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const I x = iset1(int32_t(a[r]));
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][first + n] = dot_pairs(acc[r][first + n], x, pairs[n]);
    }
  }
};
#endif

// bfloat16 in 12 bits: the products of `Dot` on the expanded pairs, a step of eight columns at a time.
template <class Dot>
struct Compact : Dot {
  using Pairs = Dot;
  static constexpr int kStepK = kCompactColumns, kStepBytes = int(kCompactBytes), kStepA = kCompactPairs * Dot::kStepA;
  static constexpr Loop kLoop = Loop::compact;
};

// int8 weights times activations rounded to int8, four columns of K per step. The weights' bytes are their values plus
// 128, so a row's sums begin at -128 times the sum of its activations. Sums are integers and stay so in the float rows
// between blocks of K.
struct DotI8 {
  using A = uint32_t;
  using Sum = I;
  static constexpr Loop kLoop = Loop::plain;
  static constexpr int kStepK = 4, kStepBytes = 64, kStepA = kDotElements, kHeldPlus = 128;
  static inline I begin(int32_t sum) { return iset1(sum); }
  static inline I load_sum(const float* p) { return iload(p); }
  static inline void store_sum(float* p, I v) { istore(p, v); }

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], I (&acc)[R][P]) {
    I w[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) w[p] = iload(b[p]);
    add_dots(a, w, acc);
  }
};

// int8 weights converted to float32, without their scale; activations stay float32.
struct DotI8Wide : FloatSums {
  using A = float;
  static constexpr int kStepK = 4, kStepBytes = 64, kStepA = 4;

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], V (&acc)[R][P]) {
    I w[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) w[p] = iload(b[p]) ^ iset1(int32_t(0x80808080u));
    column<0>(a, w, acc);
    column<1>(a + R, w, acc);
    column<2>(a + 2 * R, w, acc);
    column<3>(a + 3 * R, w, acc);
  }

 private:
  template <int j, int R, int P>
  static inline void column(const A* a, const I (&w)[P], V (&acc)[R][P]) {
    V v[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) v[p] = signed_byte<j>(w[p]);
    add_products(a, v, acc);
  }
};

// int4 weights by groups of columns, times activations rounded to int8: eight columns of K per step, as two times four
// bytes. A group's sums are integers; they are scaled and added to the float sums in the order of the groups.
struct DotI4 {
  using A = uint32_t;
  using Sum = SmallSum;
  static constexpr Loop kLoop = Loop::groups;
  static constexpr int kStepK = 8, kStepBytes = 64, kStepA = 2, kHeldPlus = 8, kRun = kSmallDots / 2;

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], Sum (&acc)[R][P]) {
    const I mask = iset1(0x0f0f0f0f);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      I w[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) w[p] = shift_right(iload(b[p]), half * 4) & mask;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const I x = iset1(int32_t(a[half * R + r]));
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) acc[r][p] = add_small(acc[r][p], w[p], x);
      }
    }
  }
  // After every kRun steps.
  static inline Sum settled(Sum acc) { return gather(acc); }

  // A group's sums begin at -8 times the sum of its activations, or at zero with offsets.
  static inline Sum begin(int32_t sum) { return small_sum(sum); }
  static inline V scaled(Sum acc, V scale, V before) { return fma(scale, to_float(whole(acc)), before); }
  static inline V shift(V, V offset) { return set1(0) - offset; }  // times the float sum of the activations
};

// int4 weights converted to floats. Without offsets a group's sums are scaled together.
struct FloatsOfI4 {
  using Sum = V;
  static constexpr Loop kLoop = Loop::groups;
  static constexpr int kStepK = 8, kStepBytes = 64, kRun = 1;
  static constexpr bool kCrossed = false;

  static inline V settled(V acc) { return acc; }

  // As in DotI4, but weights are already q - 8 here, so with offsets 8 scales are added back.
  static inline V begin(int32_t) { return set1(0); }
  static inline V scaled(V acc, V scale, V before) { return fma(scale, acc, before); }
  static inline V shift(V scale, V offset) { return fma(set1(8), scale, set1(0) - offset); }
};

// float32; activations stay float32.
struct DotI4Wide : FloatsOfI4 {
  using A = float;
  static constexpr int kStepA = 8;

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], V (&acc)[R][P]) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      V w[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) w[p] = nibble_less_8(shift_right(iload(b[p]), k % 4 * 8 + k / 4 * 4));
      add_products(a + k * R, w, acc);
    }
  }
};

#if defined(QUIRE_BF16_DOT)
// bfloat16, which holds q - 8; activations are rounded to it.
struct DotI4Pairs : FloatsOfI4 {
  using A = uint32_t;
  static constexpr int kStepA = 4;
  static constexpr bool kCrossed = true;

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], V (&acc)[R][P]) {
    static constexpr uint16_t values[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                            0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const PairTable table = pair_table(values);
    unrolled<4>([&](auto k) QUIRE_INLINE_LAMBDA {
      I pairs[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) pairs[p] = pick_pairs(table, crossed_half<k.value>(iload(b[p])));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const I x = iset1(int32_t(a[k.value * R + r]));
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) acc[r][p] = dot_pairs(acc[r][p], x, pairs[p]);
      }
    });
  }
};
#endif

}  // namespace quire::QUIRE_ISA
