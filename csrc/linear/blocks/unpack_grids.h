// Unpacks kinds whose codes are indices into grids of values, and ternary kinds, as unpack.h does for the others.
#pragma once

#include "linear/blocks/grids.h"
#include "linear/blocks/unpack.h"

namespace quire::QUIRE_ISA {

// Byte `j` of each integer.
template <int j>
inline I byte_of(I a) {
  return shr<8 * j>(a) & iset1(255);
}

// Eight sign bits from seven: the last one makes the parity even.
inline I eighth_sign(I seven) {
  I folded = seven ^ shr<4>(seven);
  folded = folded ^ shr<2>(folded);
  folded = folded ^ shr<1>(folded);
  return seven | shl<7>(folded & iset1(1));
}

// Codes of signed magnitudes: 64 + magnitude if the column's bit (0 to 3) is clear, else 64 - magnitude.
constexpr int kSignedZero = 64;
inline I with_signs(I magnitudes, I four) {
  const I bits = spread_bits(four & iset1(15)), mask = shl<8>(bits) - bits;  // 255 in the bytes whose sign is set
  const I middle = iset1(0x40404040);
  return ((middle - magnitudes) & mask) | ((middle + magnitudes) & (mask ^ iset1(-1)));
}

// Eight columns from one entry of a grid, which is a pair of words.
template <class Out, class Code>
QUIRE_INLINE void unpack_eight(const uint32_t (*grid)[2], I index, Out& out, int column, Code&& code) {
  const I at = shl<1>(index);
  out.codes(column, code(gather(grid[0], at), 0));
  out.codes(column + 4, code(gather(grid[0] + 1, at), 4));
}

template <class Out>
QUIRE_INLINE void unpack_signed(const uint32_t (*grid)[2], I index, I signs, Out& out, int column) {
  unpack_eight(grid, index, out, column, [&](I values, int first) QUIRE_INLINE_LAMBDA {
    return with_signs(values, first == 0 ? signs : shr<4>(signs));
  });
}

template <>
struct Unpack<BlockKind::iq2_xxs> {
  static constexpr CodeShape shape{32, 126, kSignedZero, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    const V quarter = b.scale() * set1(0.25f);
    for (int g = 0; g < 8; ++g) {
      const I indices = b.word(2 * g), rest = b.word(2 * g + 1);
      out.scale(g, quarter * (to_float(shr<28>(rest)) + set1(0.5f)));
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
        constexpr int at = decltype(j)::value;
        const I signs = eighth_sign(shr<7 * at>(rest) & iset1(127));
        unpack_signed(kBlockGrids.iq2_xxs, byte_of<at>(indices), signs, out, 32 * g + 8 * at);
      });
    }
  }
};

// One 4-bit scale for each 16 columns, in two words: (0.5 + scale) * factor.
template <class Out>
QUIRE_INLINE void unpack_half_scales(const PackedBlock& b, int first, Out& out) {
  const V quarter = b.scale() * set1(0.25f);
  for (int i = 0; i < 2; ++i) {
    const I scales = b.word(first + i);
    unrolled<8>([&](auto j) QUIRE_INLINE_LAMBDA {
      constexpr int at = decltype(j)::value;
      out.scale(8 * i + at, quarter * (to_float(shr<4 * at>(scales) & iset1(15)) + set1(0.5f)));
    });
  }
}

template <>
struct Unpack<BlockKind::iq2_xs> {
  static constexpr CodeShape shape{16, 126, kSignedZero, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    unpack_half_scales(b, 16, out);
    for (int i = 0; i < 16; ++i) {
      const I two = b.word(i);
      unrolled<2>([&](auto j) QUIRE_INLINE_LAMBDA {
        const I entry = shr<16 * decltype(j)::value>(two);
        unpack_signed(kBlockGrids.iq2_xs, entry & iset1(511), eighth_sign(shr<9>(entry) & iset1(127)), out,
                      16 * i + 8 * j.value);
      });
    }
  }
};

template <>
struct Unpack<BlockKind::iq2_s> {
  static constexpr CodeShape shape{16, 126, kSignedZero, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    unpack_half_scales(b, 18, out);
    for (int i = 0; i < 8; ++i) {
      const I low = b.word(i), signs = b.word(8 + i), high = shift_right(b.word(16 + i / 4), i % 4 * 8);
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
        constexpr int at = decltype(j)::value;
        const I index = byte_of<at>(low) | shl<8>(shr<2 * at>(high) & iset1(3));
        unpack_signed(kBlockGrids.iq2_s, index, byte_of<at>(signs), out, 32 * i + 8 * at);
      });
    }
  }
};

template <>
struct Unpack<BlockKind::iq3_xxs> {
  static constexpr CodeShape shape{32, 126, kSignedZero, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    const V half = b.scale() * set1(0.5f);
    for (int g = 0; g < 8; ++g) {
      const I rest = b.word(16 + g), first = b.word(2 * g), second = b.word(2 * g + 1);
      out.scale(g, half * (to_float(shr<28>(rest)) + set1(0.5f)));
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
        constexpr int at = decltype(j)::value;
        const I signs = eighth_sign(shr<7 * at>(rest) & iset1(127)), four = at < 2 ? first : second;
        const I index = byte_of<at % 2 * 2>(four), next = byte_of<at % 2 * 2 + 1>(four);
        out.codes(32 * g + 8 * at, with_signs(gather(kBlockGrids.iq3_xxs, index), signs));
        out.codes(32 * g + 8 * at + 4, with_signs(gather(kBlockGrids.iq3_xxs, next), shr<4>(signs)));
      });
    }
  }
};

template <>
struct Unpack<BlockKind::iq3_s> {
  static constexpr CodeShape shape{32, 126, kSignedZero, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    const V d = b.scale();
    const I scales = b.word(26);
    unrolled<8>([&](auto g) QUIRE_INLINE_LAMBDA {
      out.scale(g.value, d * to_float(shl<1>(shr<4 * decltype(g)::value>(scales) & iset1(15)) + iset1(1)));
    });
    for (int i = 0; i < 16; ++i) {  // four entries of four columns; half of a word has their signs
      const I low = b.word(i), high = shift_right(b.word(16 + i / 8), i % 8 * 4);
      const I signs = shift_right(b.word(18 + i / 2), i % 2 * 16);
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
        constexpr int at = decltype(j)::value;
        const I index = byte_of<at>(low) | shl<8>(shr<at>(high) & iset1(1));
        out.codes(16 * i + 4 * at, with_signs(gather(kBlockGrids.iq3_s, index), shr<4 * at>(signs)));
      });
    }
  }
};

// Ternary codes of iq1: 8 * (-1, 0 or 1) plus or minus 1; scales are divided by eight in exchange.
constexpr int kDeltaZero = 9;
template <class Out>
QUIRE_INLINE void unpack_delta(I index, I minus, Out& out, int column) {
  const I more = shl<1>((minus ^ iset1(1)) * iset1(0x01010101));
  unpack_eight(kBlockGrids.iq1, index, out, column, [&](I values, int) QUIRE_INLINE_LAMBDA { return values + more; });
}

template <>
struct Unpack<BlockKind::iq1_s> {
  static constexpr CodeShape shape{32, 18, kDeltaZero, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    const V eighth = b.scale() * set1(0.125f);
    for (int g = 0; g < 8; ++g) {
      const I low = b.word(g), high = shift_right(b.word(8 + g / 2), g % 2 * 16);
      out.scale(g, eighth * to_float(shl<1>(shr<12>(high) & iset1(7)) + iset1(1)));
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
        constexpr int at = decltype(j)::value;
        const I index = byte_of<at>(low) | shl<8>(shr<3 * at>(high) & iset1(7));
        unpack_delta(index, shr<15>(high) & iset1(1), out, 32 * g + 8 * at);
      });
    }
  }
};

template <>
struct Unpack<BlockKind::iq1_m> {
  static constexpr CodeShape shape{16, 18, kDeltaZero, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    const I first = b.word(12), second = b.word(13), top = iset1(15);
    // The float16 scale is spread over the top four bits of four fields.
    const I half = (shr<12>(first) & top) | shl<4>(shr<28>(first)) | shl<8>(shr<12>(second) & top) | shl<12>(shr<28>(second));
    const V eighth = low_half(half) * set1(0.125f);
    unrolled<8>([&](auto i) QUIRE_INLINE_LAMBDA {  // two fields of 12 bits in a word
      constexpr int at = decltype(i)::value, shift = at / 4 * 16 + at % 4 * 3;
      out.scale(at, eighth * to_float(shl<1>(shr<shift>(first) & iset1(7)) + iset1(1)));
      out.scale(8 + at, eighth * to_float(shl<1>(shr<shift>(second) & iset1(7)) + iset1(1)));
    });
    for (int i = 0; i < 8; ++i) {
      const I low = b.word(i), high = shift_right(b.word(8 + i / 2), i % 2 * 16);
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
        constexpr int at = decltype(j)::value;
        const I four = shr<4 * at>(high);
        unpack_delta(byte_of<at>(low) | shl<8>(four & iset1(7)), shr<3>(four) & iset1(1), out, 32 * i + 8 * at);
      });
    }
  }
};

// Ternary kinds have one scale for all groups.
template <class Out>
QUIRE_INLINE void unpack_one_scale(const PackedBlock& b, Out& out) {
  const V d = b.scale();
  for (int g = 0; g < 8; ++g) out.scale(g, d);
}

template <>
struct Unpack<BlockKind::tq2_0> {
  static constexpr CodeShape shape{32, 3, 1, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    unpack_one_scale(b, out);
    unpack_crumbs(b, 0, [&](int column, auto, int, int, I code) QUIRE_INLINE_LAMBDA { out.codes(column, code); });
  }
};

// Base-3 digits of a number below 1, in 256ths: each digit is the integer part of three times the rest.
template <int digits, class Out>
QUIRE_INLINE void unpack_digits(I bytes, int column, int apart, Out& out) {
  const I mask = iset1(0x00ff00ff);
  I even = bytes & mask, odd = shr<8>(bytes) & mask;
  for (int n = 0; n < digits; ++n) {
    even = even + even + even, odd = odd + odd + odd;
    out.codes(column + n * apart, (shr<8>(even) & mask) | (odd & iset1(int32_t(0xff00ff00u))));
    even = even & mask, odd = odd & mask;
  }
}

template <>
struct Unpack<BlockKind::tq1_0> {
  static constexpr CodeShape shape{32, 3, 1, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    unpack_one_scale(b, out);
    for (int i = 0; i < 8; ++i) unpack_digits<5>(b.word(i), 4 * i, 32, out);
    for (int i = 0; i < 4; ++i) unpack_digits<5>(b.word(8 + i), 160 + 4 * i, 16, out);
    unpack_digits<4>(b.word(12), 240, 4, out);
  }
};

}  // namespace quire::QUIRE_ISA
