// The values of blocks whose codes stand for floats: FP8, FP4, and codes into one table. Knows panels (layouts/blocks.h); knows
// no product.
//
// value = scale * number of the code, rounded once. Products with codes into a table scale the sums of a block instead.
#pragma once

#include <type_traits>

#include "linear/blocks/unpack.h"

namespace quire::QUIRE_ISA {

// A struct here holds a block: run(i, put) calls put(j, value) for the columns j = 0 to kRun - 1 of its i-th run, in order.
// With kNumbers true, those are numbers that `scale` does not multiply yet.

// Calls f(i) for N runs, in loops that are unrolled as far as code stays small.
#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
constexpr int kRunsAtOnce = 8;
#else
constexpr int kRunsAtOnce = 1;
#endif
template <int N, class F>
QUIRE_INLINE void for_runs(F&& f) {
  constexpr int at_once = N < kRunsAtOnce ? N : kRunsAtOnce;
  for (int first = 0; first < N; first += at_once)
#pragma GCC unroll 8
    for (int i = 0; i < at_once; ++i) f(first + i);
}

// FP8: words first, first + 1, ... of four columns each.
template <int first, bool e4m3>
struct Fp8Values {
  static constexpr int kRun = 4;
  PackedBlock b;
  V scale;

  QUIRE_INLINE Fp8Values(const PackedBlock& block, V by) : b(block), scale(e4m3 ? by * set1(kE4m3Scale) : by) {}
  template <class Put>
  QUIRE_INLINE void run(int i, Put&& put) const {
    auto halves = [](I top) QUIRE_INLINE_LAMBDA { return e4m3 ? e4m3_halves(top) : e5m2_halves(top); };
    const I w = b.word(first + i), even = halves(shl<8>(w)), odd = halves(w);
    put(0, low_half(even) * scale);
    put(1, low_half(odd) * scale);
    put(2, high_half(even) * scale);
    put(3, high_half(odd) * scale);
  }
};
QUIRE_INLINE V row_scale(const PackedBlock& b) { return load(reinterpret_cast<const float*>(b.row)); }
template <bool e4m3>
struct Fp8OfRow : Fp8Values<0, e4m3> {
  QUIRE_INLINE explicit Fp8OfRow(const PackedBlock& b) : Fp8Values<0, e4m3>(b, row_scale(b)) {}
};
template <bool e4m3>
struct Fp8OfBlock : Fp8Values<1, e4m3> {
  QUIRE_INLINE explicit Fp8OfBlock(const PackedBlock& b) : Fp8Values<1, e4m3>(b, float_of(b.word(0))) {}
};
struct Fp8OfPower : Fp8Values<0, true> {
  QUIRE_INLINE explicit Fp8OfPower(const PackedBlock& b) : Fp8Values(b, power_of_exponent<0>(load_bytes(b.head))) {}
};

// bitsandbytes' tables for four bits: NF4 (arXiv:2305.14314, appendix E), and its FP4, whose largest number is 1.
alignas(64) inline constexpr float kNf4[16] = {
    -1.0f,         -0.6961928009986877f,  -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f,  0.33791524171829224f,  0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f,
    1.0f};
alignas(64) inline constexpr float kFp4[16] = {
    0.0f, 0.0052083334885537624f, 0.6666666865348816f, 1.0f, 0.3333333432674408f, 0.5f, 0.1666666716337204f, 0.25f,
    0.0f, -0.0052083334885537624f, -0.6666666865348816f, -1.0f, -0.3333333432674408f, -0.5f, -0.1666666716337204f, -0.25f};

// A scale in float32, then codes: half byte i of a word is column i of its eight.
template <const float (&table)[16]>
struct TableValues {
  static constexpr int kRun = 8;
  static constexpr bool kNumbers = true;
  PackedBlock b;
  Table16 values;
  V scale;

  QUIRE_INLINE explicit TableValues(const PackedBlock& block)
      : b(block), values(table16(table)), scale(float_of(b.word(0))) {}
  template <class Put>
  QUIRE_INLINE void run(int i, Put&& put) const {
    const I w = b.word(1 + i);
    unrolled<8>([&](auto j) QUIRE_INLINE_LAMBDA { put(j.value, pick(values, shr<4 * j.value>(w))); });
  }
};

// Twice the numbers of FP4 (E2M1).
alignas(64) constexpr float kTwiceFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// mxfp4 as UnpackMxfp4 reads it: the low halves of the bytes hold the first 16 columns.
struct Mxfp4Values {
  static constexpr int kRun = 4;
  PackedBlock b;
  Table16 values;
  V scale;

  QUIRE_INLINE explicit Mxfp4Values(const PackedBlock& block)
      : b(block), values(table16(kTwiceFp4)), scale(power_of_exponent<1>(load_bytes(b.head))) {}
  template <class Put>
  QUIRE_INLINE void run(int i, Put&& put) const {
    const I all = b.word(i % 4), w = i < 4 ? all : shr<4>(all);
    unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA { put(j.value, pick(values, shr<8 * j.value>(w)) * scale); });
  }
};

// nvfp4 as UnpackNvfp4 reads it: 16 columns share a scale.
template <bool divides>
struct Nvfp4Values {
  static constexpr int kRun = 16;
  PackedBlock b;
  Table16 values;
  I scales;
  V outer;

  QUIRE_INLINE explicit Nvfp4Values(const PackedBlock& block)
      : b(block), values(table16(kTwiceFp4)), scales(b.word(0)), outer(row_scale(b)) {}
  template <class Put>
  QUIRE_INLINE void run(int i, Put&& put) const {
    const V scale = nvfp4_scale<divides>(shift_right(scales, 8 * i), outer);
    unrolled<16>([&](auto j) QUIRE_INLINE_LAMBDA {
      constexpr int at = decltype(j)::value % 8, shift = at % 4 * 8 + at / 4 * 4;
      put(j.value, pick(values, shr<shift>(b.word(1 + 2 * i + decltype(j)::value / 8))) * scale);
    });
  }
};

// A scale in float32, then codes of one byte, each 128 more than its value.
struct Int8Values {
  static constexpr int kRun = 4;
  PackedBlock b;
  V scale;

  QUIRE_INLINE explicit Int8Values(const PackedBlock& block) : b(block), scale(float_of(b.word(0))) {}
  template <class Put>
  QUIRE_INLINE void run(int i, Put&& put) const {
    const I w = b.word(1 + i) ^ iset1(int32_t(0x80808080u));
    unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA { put(j.value, signed_byte<j.value>(w) * scale); });
  }
};

// scale * (code - zero): a scale and a zero point in float32, then codes of four bits (half byte i of a word is column i of
// its eight) or of one byte.
struct AffineValues {
  PackedBlock b;
  V scale, zero;
  QUIRE_INLINE explicit AffineValues(const PackedBlock& block)
      : b(block), scale(float_of(b.word(0))), zero(float_of(b.word(1))) {}
};
struct Affine4Values : AffineValues {
  static constexpr int kRun = 8;
  using AffineValues::AffineValues;
  template <class Put>
  QUIRE_INLINE void run(int i, Put&& put) const {
    const I w = b.word(2 + i);
    unrolled<8>([&](auto j) QUIRE_INLINE_LAMBDA {
      put(j.value, (to_float(shr<4 * j.value>(w) & iset1(15)) - zero) * scale);
    });
  }
};
struct Affine8Values : AffineValues {
  static constexpr int kRun = 4;
  using AffineValues::AffineValues;
  template <class Put>
  QUIRE_INLINE void run(int i, Put&& put) const {
    const I w = b.word(2 + i);
    unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA { put(j.value, (unsigned_byte<j.value>(w) - zero) * scale); });
  }
};

// The values of each kind; void: its codes are unpacked first (unpack.h), or lie row by row (tables.h).
template <BlockKind kind>
struct ValuesOf {
  using type = void;
};
#define QUIRE_VALUES(name, ...)       \
  template <>                         \
  struct ValuesOf<BlockKind::name> {  \
    using type = __VA_ARGS__;         \
  };
QUIRE_VALUES(e4m3, Fp8OfRow<true>)
QUIRE_VALUES(e4m3_32, Fp8OfBlock<true>)
QUIRE_VALUES(e4m3_128, Fp8OfBlock<true>)
QUIRE_VALUES(e5m2, Fp8OfRow<false>)
QUIRE_VALUES(e5m2_32, Fp8OfBlock<false>)
QUIRE_VALUES(e5m2_128, Fp8OfBlock<false>)
QUIRE_VALUES(mxfp8, Fp8OfPower)
QUIRE_VALUES(nf4, TableValues<kNf4>)
QUIRE_VALUES(fp4, TableValues<kFp4>)
QUIRE_VALUES(mxfp4, Mxfp4Values)
QUIRE_VALUES(nvfp4, Nvfp4Values<false>)
QUIRE_VALUES(nvfp4_div, Nvfp4Values<true>)
QUIRE_VALUES(int8_32, Int8Values)
QUIRE_VALUES(int8_128, Int8Values)
QUIRE_VALUES(affine4_32, Affine4Values)
QUIRE_VALUES(affine4_64, Affine4Values)
QUIRE_VALUES(affine8_32, Affine8Values)
QUIRE_VALUES(affine8_128, Affine8Values)
#undef QUIRE_VALUES

template <BlockKind kind>
using Values = typename ValuesOf<kind>::type;
template <BlockKind kind>
constexpr bool kHasValues = !std::is_void_v<Values<kind>>;
template <class Block>
constexpr bool kNumbersOf = requires { Block::kNumbers; };
// The columns of a kind whose products are summed before they are scaled; 0: values are scaled.
template <BlockKind kind>
constexpr int sum_columns() {
  if constexpr (kHasValues<kind>) return kNumbersOf<Values<kind>> ? shape_of(kind).columns : 0;
  else return 0;
}

}  // namespace quire::QUIRE_ISA
