// The inner loop of a product with blocks: R rows of activations in int8 times P unpacked panels, with the sums of a
// group in registers. Knows unpacked operands; knows no threads.
//
// Activations are rounded in blocks of 32 or 256 columns, one scale per block, as llama.cpp does. Each block adds
//   x_scale * sum over its groups of (scale * (integer sum of codes - zero) - minimum * (sum of the activations))
// to an output, in the order of groups and blocks. No tile shape changes that order.
#pragma once

#include "linear/blocks/columns.h"
#include "linear/micro/loops.h"
#include "simd/simd_dots.h"

namespace quire::QUIRE_ISA {

// The rows and panels of a tile for which all sums of a group stay in registers.
#if defined(QUIRE_AVX512)
constexpr int kBlockTileRows = 6;
constexpr int block_panels(int rows) { return rows == 1 ? 1 : rows <= 3 ? 4 : 2; }
#elif defined(QUIRE_AVX2)
constexpr int kBlockTileRows = 6;
constexpr int block_panels(int rows) { return rows == 2 || rows == 3 ? 2 : 1; }
#else
constexpr int kBlockTileRows = 3;
constexpr int block_panels(int) { return 1; }
#endif

// Columns [k, k + columns) of a tile times P panels.
struct BlockArgs {
  const uint32_t* a;        // [columns / 4][elements][R]
  const char* b;            // first panel, unpacked
  size_t panel_bytes;       // from panel to panel
  int groups, steps, run;   // of `steps` times four columns; products that fit in 16 bits, in steps
  int groups_per_scale;     // of the activations
  bool minima;
  const float* x_scale;     // [groups / groups_per_scale][R]
  const int32_t* sums;      // [groups][R]: initial values of a group's sums; with minima, floats that multiply them
  float* c;                 // [R][c_stride], continued
  size_t c_stride;
};

#if defined(QUIRE_WORD_DOTS)
// For codes so small that sums of a few products fit in 16 bits.
struct SmallCodes {
  static constexpr int kElements = 1;

  template <int R, int P>
  QUIRE_INLINE static void group(const uint32_t* a, const char* const (&b)[P], const BlockArgs& m, I (&acc)[R][P]) {
    const char* at[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) at[p] = b[p];
    for (int s = 0; s < m.steps; s += m.run) {
      I words[R][P];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) words[r][p] = iset1(0);
      int i = 0;
      do {
        I w[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) w[p] = iload(at[p]), at[p] += 64;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const I x = iset1(int32_t(a[r]));
#pragma GCC unroll 8
          for (int p = 0; p < P; ++p) words[r][p] = dot_small(words[r][p], w[p], x);
        }
        a += R;
      } while (++i < m.run);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) acc[r][p] = dot_words(acc[r][p], words[r][p], iset1(0x00010001));
    }
  }
};
#endif

// For codes that use the whole byte.
struct WideCodes {
  static constexpr int kElements = kDotElements;

  template <int R, int P>
  QUIRE_INLINE static void group(const uint32_t* a, const char* const (&b)[P], const BlockArgs& m, I (&acc)[R][P]) {
    int s = 0;
    do {
      I w[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) w[p] = iload(b[p] + s * 64);
      add_dots(a, w, acc);
      a += R * kElements;
    } while (++s < m.steps);
  }
};

// The sums of group g: to[r][p] += scale * integer sum - minimum * sum of the activations.
template <class Codes, int R, int P>
QUIRE_INLINE void add_group(const BlockArgs& m, int g, V (&to)[R][P]) {
  const size_t stride = kGroupHeader + size_t(m.steps) * 64;
  const char *head[P], *codes[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
    head[p] = m.b + size_t(p) * m.panel_bytes + size_t(g) * stride;
    codes[p] = head[p] + kGroupHeader;
  }
  const int32_t *sums = m.sums + size_t(g) * R, *start = m.minima ? kNoSums : sums;
  I acc[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const I first = iset1(start[r]);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) acc[r][p] = first;
  }
  Codes::template group<R, P>(m.a + size_t(g) * size_t(m.steps) * size_t(R * Codes::kElements), codes, m, acc);
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
    const V scale = load(reinterpret_cast<const float*>(head[p]));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) to[r][p] = fma(scale, to_float(acc[r][p]), to[r][p]);
  }
  if (!m.minima) return;
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
    const V minimum = load(reinterpret_cast<const float*>(head[p]) + 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      to[r][p] = fma(set1(reinterpret_cast<const float*>(sums)[r]), minimum, to[r][p]);
  }
}

template <int R, int P>
QUIRE_INLINE void clear(V (&v)[R][P]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) v[r][p] = set1(0);
}

// total += x_scale * part.
template <int R, int P>
QUIRE_INLINE void add_scaled(const float* x_scale, const V (&part)[R][P], V (&total)[R][P]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const V scale = set1(x_scale[r]);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) total[r][p] = fma(scale, part[r][p], total[r][p]);
  }
}

// Registers hold the sums of one group and the sums that they are added to. The outputs of a block of many groups stay
// in memory.
template <class Codes, int R, int P>
void micro_blocks(const BlockArgs& args) {
  const BlockArgs m = args;  // a copy, which stores cannot change
  const float* x_scale = m.x_scale;
  for (int g = 0; g < m.groups;) {
    V total[R][P], part[R][P];
    auto each = [&](auto&& f) QUIRE_INLINE_LAMBDA {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) f(m.c + size_t(r) * m.c_stride + p * 16, total[r][p]);
    };
    if (m.groups_per_scale > 1) {
      clear(part);
      const int end = min_of(g + m.groups_per_scale, m.groups);
      do {
        add_group<Codes>(m, g, part);
      } while (++g < end);
      each([](const float* c, V& v) QUIRE_INLINE_LAMBDA { v = load(c); });
      add_scaled(x_scale, part, total), x_scale += R;
    } else {
      each([](const float* c, V& v) QUIRE_INLINE_LAMBDA { v = load(c); });
      do {
        clear(part);
        add_group<Codes>(m, g, part);
        add_scaled(x_scale, part, total), x_scale += R;
      } while (++g < m.groups);
    }
    each([](float* c, V& v) QUIRE_INLINE_LAMBDA { store(c, v); });
  }
}

using BlockMicro = void (*)(const BlockArgs&);

// The loop for 1 to kBlockTileRows rows and a power of two of panels, at most block_panels(rows).
template <class Codes, int R = kBlockTileRows>
inline BlockMicro block_micro(int rows, int panels) {
  if constexpr (R > 1)
    if (rows < R) return block_micro<Codes, R - 1>(rows, panels);
  constexpr int most = block_panels(R);
  if constexpr (most >= 4)
    if (panels == 4) return micro_blocks<Codes, R, 4>;
  if constexpr (most >= 2)
    if (panels == 2) return micro_blocks<Codes, R, 2>;
  return micro_blocks<Codes, R, 1>;
}

}  // namespace quire::QUIRE_ISA
