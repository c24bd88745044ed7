// The best of many scores in bounded memory. Knows numbers; knows no key and no query.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd/simd.h"

namespace quire::QUIRE_ISA {

// A pool and its score in one number: the greater is the better one, and of equal scores the earlier pool. NaN is worst.
inline uint64_t candidate(float score, int number) {
  uint32_t bits = 0;
  score = score == score ? score + 0.0f : -__builtin_inff();  // -0 equals 0
  std::memcpy(&bits, &score, sizeof(bits));
  bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
  return uint64_t{bits} << 32 | uint32_t(~number);
}
inline int number_of(uint64_t candidate) { return int(~uint32_t(candidate)); }

// Moves the `keep` greatest of `count` different numbers to the front.
inline void select_greatest(uint64_t* x, int count, int keep) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    const uint64_t a = x[low], b = x[middle], c = x[high];
    const uint64_t pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
    int i = low, j = high;
    while (i <= j) {
      while (x[i] > pivot) ++i;
      while (x[j] < pivot) --j;
      if (i > j) break;
      const uint64_t held = x[i];
      x[i++] = x[j], x[j--] = held;
    }
    if (keep <= j) high = j;
    else if (keep > i) low = i;
    else return;
  }
}

// The best `most` of the candidates that come; `kept` has room for twice as many. `pool` is one of which more keys may come,
// or -1, and `best` its best score so far.
struct Choice {
  uint64_t* kept;
  int most, count, pool;
  float best;
  uint64_t least;  // no candidate up to this can be among the best

  void begin(uint64_t* memory, int most_) { kept = memory, most = most_, count = 0, pool = -1, best = 0, least = 0; }
  void add(uint64_t c) {
    if (c <= least) return;
    kept[count++] = c;
    if (count == 2 * most) close();
  }
  void close() {
    if (count <= most) return;
    select_greatest(kept, count, most);
    count = most;
    least = kept[0];
    for (int i = 1; i < most; ++i) least = kept[i] < least ? kept[i] : least;
  }
};

// Writes the numbers of candidates in ascending order, then `further` if it is not negative, then -1: `width` numbers in all.
// `bits` has room for one bit for each number up to the largest, which is below `end`.
inline void write_numbers(const uint64_t* c, int count, int end, int further, int width, uint64_t* bits, float* out) {
  std::memset(bits, 0, size_t(end + 63) / 64 * 8);
  for (int i = 0; i < count; ++i) bits[number_of(c[i]) / 64] |= uint64_t{1} << (number_of(c[i]) % 64);
  int at = 0;
  for (int word = 0; word < (end + 63) / 64; ++word)
    for (uint64_t rest = bits[word]; rest; rest &= rest - 1) out[at++] = float(word * 64 + __builtin_ctzll(rest));
  if (further >= 0) out[at++] = float(further);
  while (at < width) out[at++] = -1.0f;
}

}  // namespace quire::QUIRE_ISA
