// bfloat16 in 12 bits without loss. Knows bytes; knows no kernel.
//
// Weights of a trained model share few exponents (DFloat11, arXiv:2504.11651). A value is held as its low byte and a
// 4-bit index of its high byte (sign and seven bits of the exponent) into the panel's table of sixteen frequent ones.
// Values whose high byte is not in the table are escapes; a list behind the panel has them in order.
//
// A step is eight columns of a panel's sixteen lanes: codes [64], low bytes [2][64]. Half h of the low bytes, with the
// high bytes that the codes' half bytes h stand for, are columns 4 h to 4 h + 3, interleaved as `unpack` instructions
// do it: in each 16 bytes eight of the first pair of columns, then eight of the second.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/memory.h"

namespace quire {

constexpr int kCompactColumns = 8, kCompactPairs = kCompactColumns / 2;
constexpr int kCompactValues = kCompactColumns * 16;  // of a step
constexpr size_t kCompactBytes = 192;
constexpr int kCompactTable = 16;
constexpr uint32_t kNoEscape = ~uint32_t{0};

struct Escape {
  uint32_t at;    // column * 16 + lane, ascending; kNoEscape ends the list
  uint32_t bits;  // the value's
};

// The most escapes that a panel of so many columns may have; if one has more, the weight stays in 16 bits.
QUIRE_INLINE int max_escapes(int columns) { return columns / 32 + 12; }

// The bytes behind a panel's steps: the table, then max_escapes() escapes. Whatever they hold, reads stay within them.
QUIRE_INLINE size_t compact_tail_bytes(int columns) {
  return (size_t(kCompactTable) + size_t(max_escapes(columns)) * sizeof(Escape) + 63) / 64 * 64;
}

// The bits of a value of a step by the panel's table; those of an escape are meaningless.
QUIRE_INLINE uint16_t compact_bits(const char* step, const char* table, int column, int lane) {
  const int half = column / 4 % 2, element = lane * 2 + column % 2;
  const int place = element / 8 * 16 + column / 2 % 2 * 8 + element % 8;
  const int code = uint8_t(step[place]) >> (4 * half) & 15;
  return uint16_t(uint8_t(table[code]) << 8 | uint8_t(step[64 + 64 * half + place]));
}

// The i-th escape of a panel of so many columns; `tail` points behind its steps.
QUIRE_INLINE Escape compact_escape(const char* tail, int columns, int i) {
  Escape escape{kNoEscape, 0};
  if (i < max_escapes(columns))
    __builtin_memcpy(&escape, tail + kCompactTable + size_t(i) * sizeof(Escape), sizeof(Escape));
  return escape;
}

// Calls put(column, bits) for lane `lane` of a panel of `columns` columns, a multiple of kCompactColumns. Escapes are
// put twice: the second time with their true bits.
template <class Put>
QUIRE_INLINE void compact_lane(const char* panel, int columns, int lane, Put&& put) {
  const char* tail = panel + size_t(columns / kCompactColumns) * kCompactBytes;
  for (int k = 0; k < columns; ++k) {
    const char* step = panel + size_t(k / kCompactColumns) * kCompactBytes;
    put(k, compact_bits(step, tail, k, lane));
  }
  for (int i = 0; i < max_escapes(columns); ++i) {
    const Escape escape = compact_escape(tail, columns, i);
    if (escape.at % 16 == uint32_t(lane) && escape.at / 16 < uint32_t(columns))
      put(int(escape.at / 16), uint16_t(escape.bits));
  }
}

}  // namespace quire
