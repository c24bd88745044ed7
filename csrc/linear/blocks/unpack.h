// Unpacks blocks of a panel to codes of one byte with scales and minima, for each kind of block. Knows panels
// (layouts/blocks.h); knows no product.
//
// value = scale * (code - zero) - minimum, where zero is a constant of the kind. Scales are products of a float16 and a
// few bits, so they are exact.
#pragma once

#include "linear/layouts/blocks.h"
#include "simd/simd.h"
#include "simd/simd_bytes.h"
#include "simd/simd_values.h"

namespace quire::QUIRE_ISA {

// The form that a kind is unpacked to: `group` columns share a scale, codes are at most `top`, `zero` is as above.
struct CodeShape {
  int group, top, zero;
  bool minima;
};

// An unpacked group of a panel: scale [16], minimum [16], then codes [group / 4][16][4].
constexpr size_t kGroupHeader = 128;
QUIRE_INLINE constexpr size_t group_bytes(int group) { return kGroupHeader + size_t(group) * 16; }

// Whether blocks are prefetched into the second cache, not the first: with AVX2 that is quicker for all kinds, with AVX-512
// for those that take many lines. Zen 4 reads Q6_K from memory at half the speed otherwise.
QUIRE_INLINE constexpr bool prefetched_far([[maybe_unused]] BlockKind kind) {
#if defined(QUIRE_AVX2)
  return true;
#else
  return shape_of(kind).words() >= 36;
#endif
}
QUIRE_INLINE constexpr ptrdiff_t bytes_ahead(BlockKind kind) { return prefetched_far(kind) ? 8000 : 4096; }

// Keeps reads before it and behind it apart: a compiler that reads all of a block first lets prefetches hold up its loads.
QUIRE_INLINE void keep_order() { __asm__ volatile("" ::: "memory"); }

// A block of a panel, and the words of its rows. Reading a word prefetches a later one.
struct PackedBlock {
  const char *head, *words, *row;
  ptrdiff_t ahead;
  bool far;  // of the kind, so that the compiler knows it

  QUIRE_INLINE void prefetch(const char* line) const {
    if (far) __builtin_prefetch(line + ahead, 0, 2);
    else __builtin_prefetch(line + ahead, 0, 3);
  }
  QUIRE_INLINE I word(int i) const {
    prefetch(words + i * 64);
    return iload(words + i * 64);
  }
  QUIRE_INLINE V scale() const { return load_halves(head); }
  // The same block of a panel so many bytes on.
  QUIRE_INLINE PackedBlock after(size_t bytes) const { return {head + bytes, words + bytes, row + bytes, ahead, far}; }
};

// The destination of an unpacked block.
template <int group>
struct UnpackedBlock {
  char* out;

  QUIRE_INLINE void scale(int g, V v) const { store(reinterpret_cast<float*>(out + size_t(g) * group_bytes(group)), v); }
  QUIRE_INLINE void minimum(int g, V v) const {
    store(reinterpret_cast<float*>(out + size_t(g) * group_bytes(group)) + 16, v);
  }
  // Codes of the columns `column` to `column` + 3.
  QUIRE_INLINE void codes(int column, I v) const {
    istore(out + size_t(column / group) * group_bytes(group) + kGroupHeader + size_t(column % group) * 16, v);
  }
};

inline I low_nibbles(I w) { return w & iset1(0x0f0f0f0f); }
inline I high_nibbles(I w) { return shr<4>(w) & iset1(0x0f0f0f0f); }
template <int shift>
inline I crumbs(I w) {
  return shr<shift>(w) & iset1(0x03030303);
}
template <int shift>
inline I bits(I w) {
  return shr<shift>(w) & iset1(0x01010101);
}

template <BlockKind kind>
struct Unpack;

template <>
struct Unpack<BlockKind::q8_0> {
  static constexpr CodeShape shape{32, 255, 128, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    out.scale(0, b.scale());
    for (int i = 0; i < 8; ++i) out.codes(4 * i, b.word(i) ^ iset1(int32_t(0x80808080u)));
  }
};

// Half bytes: the low ones hold the first 16 columns, the high ones the last.
template <class Code, class Out>
QUIRE_INLINE void unpack_halves(const PackedBlock& b, int first, Out& out, int column, Code&& code) {
  unrolled<4>([&](auto at) QUIRE_INLINE_LAMBDA {
    constexpr int i = decltype(at)::value;
    const I w = b.word(first + i);
    out.codes(column + 4 * i, code(i, low_nibbles(w)));
    out.codes(column + 16 + 4 * i, code(4 + i, high_nibbles(w)));
  });
}
QUIRE_INLINE I plain_code(int, I code) { return code; }

// A scale and a negated minimum, both float16, in one word.
template <class Out>
QUIRE_INLINE void unpack_added(const PackedBlock& b, Out& out) {
  const I both = b.word(0);
  out.scale(0, low_half(both));
  out.minimum(0, negated(high_half(both)));
}

template <>
struct Unpack<BlockKind::q4_0> {
  static constexpr CodeShape shape{32, 15, 8, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    out.scale(0, b.scale());
    unpack_halves(b, 0, out, 0, plain_code);
  }
};

template <>
struct Unpack<BlockKind::q4_1> {
  static constexpr CodeShape shape{32, 15, 0, true};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    unpack_added(b, out);
    unpack_halves(b, 1, out, 0, plain_code);
  }
};

// Half bytes and a word with the fifth bit of each column.
template <class Out>
QUIRE_INLINE void unpack_fives(const PackedBlock& b, int first, Out& out) {
  const I fifth = b.word(first);
  unrolled<4>([&](auto i) QUIRE_INLINE_LAMBDA {
    constexpr int at = decltype(i)::value;
    const I w = b.word(first + 1 + at);
    out.codes(4 * at, low_nibbles(w) | shl<4>(spread_bits(shr<4 * at>(fifth) & iset1(15))));
    out.codes(16 + 4 * at, high_nibbles(w) | shl<4>(spread_bits(shr<16 + 4 * at>(fifth) & iset1(15))));
  });
}

template <>
struct Unpack<BlockKind::q5_0> {
  static constexpr CodeShape shape{32, 31, 16, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    out.scale(0, b.scale());
    unpack_fives(b, 0, out);
  }
};

template <>
struct Unpack<BlockKind::q5_1> {
  static constexpr CodeShape shape{32, 31, 0, true};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    unpack_added(b, out);
    unpack_fives(b, 1, out);
  }
};

// Codes of two bits in the words from `first` on, in two halves of 128 columns: put(column, shift, word, codes).
template <class Put>
QUIRE_INLINE void unpack_crumbs(const PackedBlock& b, int first, Put&& put) {
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 8; ++i) {
      const I w = b.word(first + half * 8 + i);
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
        constexpr int shift = decltype(j)::value;
        put(half * 128 + shift * 32 + i * 4, j, half, i, crumbs<2 * shift>(w));
      });
    }
}

template <>
struct Unpack<BlockKind::q2_k> {
  static constexpr CodeShape shape{16, 3, 0, true};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    const I both = b.word(20);
    const V d = low_half(both), dmin = high_half(both);
    for (int i = 0; i < 4; ++i) {
      const I scales = low_nibbles(b.word(i)), minima = high_nibbles(b.word(i));
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
        constexpr int at = decltype(j)::value;
        out.scale(4 * i + at, d * unsigned_byte<at>(scales));
        out.minimum(4 * i + at, dmin * unsigned_byte<at>(minima));
      });
    }
    unpack_crumbs(b, 4, [&](int column, auto, int, int, I code) QUIRE_INLINE_LAMBDA { out.codes(column, code); });
  }
};

template <>
struct Unpack<BlockKind::q3_k> {
  static constexpr CodeShape shape{16, 7, 4, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    const I first = b.word(24), second = b.word(25), tops = b.word(26);
    const I scales[4] = {low_nibbles(first) | shl<4>(crumbs<0>(tops)), low_nibbles(second) | shl<4>(crumbs<2>(tops)),
                         high_nibbles(first) | shl<4>(crumbs<4>(tops)),
                         high_nibbles(second) | shl<4>(crumbs<6>(tops))};
    const V d = b.scale();
    for (int i = 0; i < 4; ++i)
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
        constexpr int at = decltype(j)::value;
        out.scale(4 * i + at, d * (unsigned_byte<at>(scales[i]) - set1(32)));
      });
    for (int i = 0; i < 8; ++i) {
      const I high = b.word(i);
      unrolled<8>([&](auto j) QUIRE_INLINE_LAMBDA {
        constexpr int at = decltype(j)::value;
        out.codes(at * 32 + i * 4, crumbs<at % 4 * 2>(b.word(8 + at / 4 * 8 + i)) | shl<2>(bits<at>(high)));
      });
    }
  }
};

// The eight 6-bit scales and minima of q4_k and q5_k, in three words from `first` on.
template <class Out>
QUIRE_INLINE void unpack_sixes(const PackedBlock& b, Out& out) {
  const I both = b.word(0), first = b.word(1), second = b.word(2), rest = b.word(3), top = iset1(0x30303030);
  const I six = iset1(0x3f3f3f3f);
  const I scales[2] = {first & six, low_nibbles(rest) | (shr<2>(first) & top)};
  const I minima[2] = {second & six, high_nibbles(rest) | (shr<2>(second) & top)};
  const V d = low_half(both), dmin = high_half(both);
  for (int i = 0; i < 2; ++i)
    unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
      constexpr int at = decltype(j)::value;
      out.scale(4 * i + at, d * unsigned_byte<at>(scales[i]));
      out.minimum(4 * i + at, dmin * unsigned_byte<at>(minima[i]));
    });
}

template <>
struct Unpack<BlockKind::q4_k> {
  static constexpr CodeShape shape{32, 15, 0, true};
  template <class Out>
  QUIRE_INLINE static void scales(const PackedBlock& b, Out&& out) {
    unpack_sixes(b, out);
  }
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    scales(b, out);
    unrolled<32>([&](auto at) QUIRE_INLINE_LAMBDA {
      constexpr int pair = decltype(at)::value / 8, i = decltype(at)::value % 8;
      const I w = b.word(4 + pair * 8 + i);
      out.codes(pair * 64 + i * 4, low_nibbles(w));
      out.codes(pair * 64 + 32 + i * 4, high_nibbles(w));
    });
  }
};

template <>
struct Unpack<BlockKind::q5_k> {
  static constexpr CodeShape shape{32, 31, 0, true};
  template <class Out>
  QUIRE_INLINE static void scales(const PackedBlock& b, Out&& out) {
    unpack_sixes(b, out);
  }
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    scales(b, out);
    // Pair by pair: the sums of few groups are open at a time.
    unrolled<32>([&](auto each) QUIRE_INLINE_LAMBDA {
      constexpr int at = decltype(each)::value / 8, i = decltype(each)::value % 8;
      const I high = b.word(4 + i), w = b.word(12 + at * 8 + i);
      out.codes(at * 64 + i * 4, low_nibbles(w) | shl<4>(bits<2 * at>(high)));
      out.codes(at * 64 + 32 + i * 4, high_nibbles(w) | shl<4>(bits<2 * at + 1>(high)));
    });
  }
};

template <>
struct Unpack<BlockKind::q6_k> {
  static constexpr CodeShape shape{16, 63, 32, false};
  template <class Out>
  QUIRE_INLINE static void scales(const PackedBlock& b, Out&& out) {
    const V d = b.scale();
    for (int i = 0; i < 4; ++i) {
      const I scales = b.word(48 + i);
      unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA {
        constexpr int at = decltype(j)::value;
        out.scale(4 * i + at, d * signed_byte<at>(scales));
      });
    }
  }
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    scales(b, out);
    unrolled<16>([&](auto at) QUIRE_INLINE_LAMBDA {
      constexpr int half = decltype(at)::value / 8, i = decltype(at)::value % 8, column = half * 128 + i * 4;
      const I first = b.word(half * 16 + i), second = b.word(half * 16 + 8 + i), high = b.word(32 + half * 8 + i);
      out.codes(column, low_nibbles(first) | shl<4>(crumbs<0>(high)));
      out.codes(column + 32, low_nibbles(second) | shl<4>(crumbs<2>(high)));
      out.codes(column + 64, high_nibbles(first) | shl<4>(crumbs<4>(high)));
      out.codes(column + 96, high_nibbles(second) | shl<4>(crumbs<6>(high)));
    });
  }
};

// The values of iq4_nl and iq4_xs plus 128. They are spaced like weights: closer around zero.
alignas(16) constexpr uint8_t kNonlinear[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
// Twice the values of FP4 (E2M1), plus 12.
alignas(16) constexpr uint8_t kDoubledFp4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <>
struct Unpack<BlockKind::iq4_nl> {
  static constexpr CodeShape shape{32, 255, 128, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    const I table = repeat16(kNonlinear);
    out.scale(0, b.scale());
    unpack_halves(b, 0, out, 0, [&](int, I code) QUIRE_INLINE_LAMBDA { return lookup(table, code); });
  }
};

template <>
struct Unpack<BlockKind::iq4_xs> {
  static constexpr CodeShape shape{32, 255, 128, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    const I table = repeat16(kNonlinear), first = b.word(0), low = b.word(1);
    const V d = low_half(first);
    unrolled<8>([&](auto g) QUIRE_INLINE_LAMBDA {
      constexpr int at = decltype(g)::value;
      const I six = (shr<4 * at>(low) & iset1(15)) | shl<4>(shr<16 + 2 * at>(first) & iset1(3));
      out.scale(at, d * (to_float(six) - set1(32)));
      unpack_halves(b, 2 + 4 * at, out, 32 * at, [&](int, I code) QUIRE_INLINE_LAMBDA { return lookup(table, code); });
    });
  }
};

// A scale in float32, then codes of one byte, each 128 more than its value.
template <int columns>
struct UnpackInt8 {
  static constexpr CodeShape shape{columns, 255, 128, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    out.scale(0, float_of(b.word(0)));
    for (int i = 0; i < columns / 4; ++i) out.codes(4 * i, b.word(1 + i));
  }
};
template <>
struct Unpack<BlockKind::int8_32> : UnpackInt8<32> {};
template <>
struct Unpack<BlockKind::int8_128> : UnpackInt8<128> {};

// Half the scale of nvfp4: E4M3 in the low byte, times or divided by the scale of the row.
template <bool divides>
QUIRE_INLINE V nvfp4_scale(I byte, V outer) {
  const V inner = e4m3_byte<0>(byte) * set1(kE4m3Scale);
  return (divides ? inner / outer : inner * outer) * set1(0.5f);
}

// A word of four scales in E4M3, one for each 16 columns, which a scale of the whole row multiplies or divides; then
// codes in FP4: of each four bytes the low halves are four columns, the high halves the next four.
template <bool divides>
struct UnpackNvfp4 {
  static constexpr CodeShape shape{16, 24, 12, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    const I scales = b.word(0), table = repeat16(kDoubledFp4);
    const V outer = load(reinterpret_cast<const float*>(b.row));
    unrolled<4>([&](auto g) QUIRE_INLINE_LAMBDA {
      constexpr int at = decltype(g)::value;
      out.scale(at, nvfp4_scale<divides>(shr<8 * at>(scales), outer));
      for (int i = 0; i < 2; ++i) {
        const I w = b.word(1 + 2 * at + i);
        out.codes(16 * at + 8 * i, lookup(table, low_nibbles(w)));
        out.codes(16 * at + 8 * i + 4, lookup(table, high_nibbles(w)));
      }
    });
  }
};
template <>
struct Unpack<BlockKind::nvfp4> : UnpackNvfp4<false> {};
template <>
struct Unpack<BlockKind::nvfp4_div> : UnpackNvfp4<true> {};

// 2^(exponent - 127 - less), less 0 or 1: the bits of a float. Those of the smallest exponents are a denormal number, and
// more than what the formula for the others gives.
template <int less>
inline V power_of_exponent(I exponent) {
  const I denormal = less ? shl<21>(exponent + iset1(1)) : iset1(1 << 22);
  return float_of(max(shl<23>(exponent - iset1(less)), denormal));
}

template <>
struct Unpack<BlockKind::mxfp4> {
  static constexpr CodeShape shape{32, 24, 12, false};
  template <class Out>
  QUIRE_INLINE static void block(const PackedBlock& b, Out&& out) {
    out.scale(0, power_of_exponent<1>(load_bytes(b.head)));
    const I table = repeat16(kDoubledFp4);
    unpack_halves(b, 0, out, 0, [&](int, I code) QUIRE_INLINE_LAMBDA { return lookup(table, code); });
  }
};

}  // namespace quire::QUIRE_ISA
