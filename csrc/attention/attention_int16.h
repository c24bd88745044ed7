// Rows of 16-bit integers times bytes of keys and values, with exact sums. By instruction set, an integer is multiplied
// as two bytes, four at a time, or as it is, two at a time. Knows registers and the packing of a row; knows no scale.
#pragma once

#include "simd/simd_dots.h"

namespace quire::QUIRE_ISA {

#if defined(QUIRE_WORD_DOTS)
// Packed words: of each four integers, the first and third, then the second and fourth. They follow `kHeader` elements
// of 4 bytes: the start value of a sum, and a scale.
struct Int16 {
  struct Left {
    uint32_t even, odd;
  };
  struct Sum {
    I total;
    V number() const { return to_float(total); }
  };
  static constexpr int kHeader = 2;

  // The largest magnitude of an integer: the sum of that many products with a byte of 127 fits into 32 bits.
  static int most(int count) { return min_of(127 * 256, 0x7fffffff / (127 * count)); }
  // Packs 16 integers, from `first` on, of 4 * steps; returns their part of the total that `put_begin` takes.
  static I put_signed(uint32_t* to, int, int first, I q) {
    store_word_pairs(to + first / 2, q);
    return q;
  }
  static void put_unsigned(uint32_t* to, int, int first, I q) { store_word_pairs(to + first / 2, q); }
  // The start value of sums with keys, whose bytes are 128 above their values.
  static void put_begin(uint32_t* header, int32_t, int32_t total) { header[0] = uint32_t(total) * -128u; }

  static Sum zero() { return {iset1(0)}; }
  static Sum begin(const uint32_t* header, size_t) { return {iset1(int32_t(header[0]))}; }
  // Integers 4 i to 4 i + 3 of 4 * steps; elements of a row are `stride` apart.
  static Left left(const uint32_t* packed, int, size_t stride, int i) {
    return {packed[size_t(2 * i) * stride], packed[size_t(2 * i + 1) * stride]};
  }
  static Sum add_keys(Sum sum, Left q, I keys) {
    const I even = dot_words(sum.total, even_bytes(keys), iset1(int32_t(q.even)));
    return {dot_words(even, odd_bytes(keys), iset1(int32_t(q.odd)))};
  }
  static Sum add_values(Sum sum, Left w, I values) {
    const I even = dot_words(sum.total, even_signed_bytes(values), iset1(int32_t(w.even)));
    return {dot_words(even, odd_signed_bytes(values), iset1(int32_t(w.odd)))};
  }
};
#else
// Packed are the high bytes of all integers, then the low bytes. They follow `kHeader` elements of 4 bytes: the start
// values of the sums of high and of low bytes, and a scale.
struct Int16 {
  struct Left {
    uint32_t high, low;
  };
  struct Sum {
    I high, low;
    V number() const { return fma(to_float(high), set1(256.0f), to_float(low)); }
  };
  static constexpr int kHeader = 3;

  static int most(int) { return 127 * 256; }  // the high byte must fit
  static I put_signed(uint32_t* to, int steps, int first, I q) {
    const int count = min_of(kLanes, steps * 4 - first);
    const I high = shift_right(q + iset1(0x8080), 8) + iset1(-128);  // rounded, so that the rest is a signed byte
    auto* bytes = reinterpret_cast<int8_t*>(to);
    store_int8_first(bytes + first, high, count);
    store_int8_first(bytes + steps * 4 + first, q, count);
    return high;
  }
  static void put_unsigned(uint32_t* to, int steps, int first, I q) {
    auto* bytes = reinterpret_cast<int8_t*>(to);
    store_int8(bytes + first, shift_right(q, 8));
    store_int8(bytes + steps * 4 + first, q);
  }
  static void put_begin(uint32_t* header, int32_t high, int32_t total) {
    header[0] = uint32_t(-128 * high), header[1] = uint32_t(-128 * (total - 256 * high));
  }

  static Sum zero() { return {iset1(0), iset1(0)}; }
  static Sum begin(const uint32_t* header, size_t stride) {
    return {iset1(int32_t(header[0])), iset1(int32_t(header[stride]))};
  }
  static Left left(const uint32_t* packed, int steps, size_t stride, int i) {
    return {packed[size_t(i) * stride], packed[size_t(steps + i) * stride]};
  }
  static Sum add_keys(Sum sum, Left q, I keys) {
    return {dot_bytes(sum.high, keys, iset1(int32_t(q.high))), dot_bytes(sum.low, keys, iset1(int32_t(q.low)))};
  }
  static Sum add_values(Sum sum, Left w, I values) {
    return {dot_bytes(sum.high, iset1(int32_t(w.high)), values), dot_bytes(sum.low, iset1(int32_t(w.low)), values)};
  }
};
#endif

}  // namespace quire::QUIRE_ISA
