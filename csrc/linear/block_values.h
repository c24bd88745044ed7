// What the fields of blocks mean whose codes stand for floats: FP8, and codes into tables. Knows panels (layouts/blocks.h);
// knows no product.
//
// value = scale * number of the code, rounded once.
#pragma once

#include "linear/block_unpack.h"

namespace quire::QUIRE_ISA {

// Writes the values [columns][16] of a block.
template <BlockKind kind>
struct Values;

// FP8: words first, first + 1, ... of four columns each.
template <int columns, bool e4m3>
QUIRE_INLINE void fp8_values(const PackedBlock& b, int first, V scale, float* out) {
  if constexpr (e4m3) scale = scale * set1(kE4m3Scale);
  auto halves = [](I top) QUIRE_INLINE_LAMBDA { return e4m3 ? e4m3_halves(top) : e5m2_halves(top); };
  for (int i = 0; i < columns / 4; ++i, out += 64) {
    const I w = b.word(first + i), even = halves(shl<8>(w)), odd = halves(w);
    store(out, low_half(even) * scale);
    store(out + 16, low_half(odd) * scale);
    store(out + 32, high_half(even) * scale);
    store(out + 48, high_half(odd) * scale);
  }
}

template <bool e4m3>
struct Fp8OfRow {  // one scale for each row
  QUIRE_INLINE static void block(const PackedBlock& b, float* out) {
    fp8_values<32, e4m3>(b, 0, load(reinterpret_cast<const float*>(b.row)), out);
  }
};
template <int columns, bool e4m3>
struct Fp8OfBlock {
  QUIRE_INLINE static void block(const PackedBlock& b, float* out) {
    fp8_values<columns, e4m3>(b, 1, float_of(b.word(0)), out);
  }
};
template <>
struct Values<BlockKind::e4m3> : Fp8OfRow<true> {};
template <>
struct Values<BlockKind::e5m2> : Fp8OfRow<false> {};
template <>
struct Values<BlockKind::e4m3_32> : Fp8OfBlock<32, true> {};
template <>
struct Values<BlockKind::e4m3_128> : Fp8OfBlock<128, true> {};
template <>
struct Values<BlockKind::e5m2_32> : Fp8OfBlock<32, false> {};
template <>
struct Values<BlockKind::e5m2_128> : Fp8OfBlock<128, false> {};

template <>
struct Values<BlockKind::mxfp8> {
  QUIRE_INLINE static void block(const PackedBlock& b, float* out) {
    fp8_values<32, true>(b, 0, power_of_exponent<0>(load_bytes(b.head)), out);
  }
};

// bitsandbytes' tables for four bits: NF4 (arXiv:2305.14314, appendix E), and its FP4, whose largest number is 1.
alignas(64) constexpr float kNf4[16] = {
    -1.0f,         -0.6961928009986877f,  -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f,  0.33791524171829224f,  0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f,
    1.0f};
alignas(64) constexpr float kFp4[16] = {
    0.0f, 0.0052083334885537624f, 0.6666666865348816f, 1.0f, 0.3333333432674408f, 0.5f, 0.1666666716337204f, 0.25f,
    0.0f, -0.0052083334885537624f, -0.6666666865348816f, -1.0f, -0.3333333432674408f, -0.5f, -0.1666666716337204f, -0.25f};

// A scale in float32, then codes: half byte i of a word is column i of its eight.
QUIRE_INLINE void table_values(const PackedBlock& b, const float* values, float* out) {
  const Table16 table = table16(values);
  const V scale = float_of(b.word(0));
  for (int i = 0; i < 8; ++i, out += 128) {
    const I w = b.word(1 + i);
    unrolled<8>([&](auto j) QUIRE_INLINE_LAMBDA { store(out + j.value * 16, pick(table, shr<4 * j.value>(w)) * scale); });
  }
}
template <>
struct Values<BlockKind::nf4> {
  QUIRE_INLINE static void block(const PackedBlock& b, float* out) { table_values(b, kNf4, out); }
};
template <>
struct Values<BlockKind::fp4> {
  QUIRE_INLINE static void block(const PackedBlock& b, float* out) { table_values(b, kFp4, out); }
};

// scale * (code - zero): a scale and a zero point in float32, then codes of four bits (half byte i of a word is column i of
// its eight) or of one byte.
template <int columns>
struct Affine4 {
  QUIRE_INLINE static void block(const PackedBlock& b, float* out) {
    const V scale = float_of(b.word(0)), zero = float_of(b.word(1));
    for (int i = 0; i < columns / 8; ++i, out += 128) {
      const I w = b.word(2 + i);
      unrolled<8>([&](auto j) QUIRE_INLINE_LAMBDA {
        store(out + j.value * 16, (to_float(shr<4 * j.value>(w) & iset1(15)) - zero) * scale);
      });
    }
  }
};
template <int columns>
struct Affine8 {
  QUIRE_INLINE static void block(const PackedBlock& b, float* out) {
    const V scale = float_of(b.word(0)), zero = float_of(b.word(1));
    for (int i = 0; i < columns / 4; ++i, out += 64) {
      const I w = b.word(2 + i);
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA { store(out + j.value * 16, (unsigned_byte<j.value>(w) - zero) * scale); });
    }
  }
};
template <>
struct Values<BlockKind::affine4_32> : Affine4<32> {};
template <>
struct Values<BlockKind::affine4_64> : Affine4<64> {};
template <>
struct Values<BlockKind::affine8_32> : Affine8<32> {};
template <>
struct Values<BlockKind::affine8_128> : Affine8<128> {};

// Each row has a table; codes are a stream of bits, low ones first.
template <>
struct Values<BlockKind::lut4> {
  QUIRE_INLINE static void block(const PackedBlock& b, float* out) {
    const float* tables = reinterpret_cast<const float*>(b.row);
    for (int i = 0; i < 4; ++i, out += 128) {
      const I w = b.word(i);
      unrolled<8>([&](auto j) QUIRE_INLINE_LAMBDA { store(out + j.value * 16, pick_own<4>(tables, shr<4 * j.value>(w))); });
    }
  }
};
template <>
struct Values<BlockKind::lut3> {
  QUIRE_INLINE static void block(const PackedBlock& b, float* out) {
    const float* tables = reinterpret_cast<const float*>(b.row);
    const I words[3] = {b.word(0), b.word(1), b.word(2)};
    unrolled<32>([&](auto j) QUIRE_INLINE_LAMBDA {
      constexpr int bit = 3 * decltype(j)::value, word = bit / 32, at = bit % 32;
      I code = shr<at>(words[word]);
      if constexpr (at > 29) code = code | shl<32 - at>(words[word + 1]);
      store(out + j.value * 16, pick_own<3>(tables, code));
    });
  }
};

}  // namespace quire::QUIRE_ISA
