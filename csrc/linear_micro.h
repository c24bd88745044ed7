// The inner loops of a matrix product: R rows times P panels of 16 outputs with all sums in registers.
// Knows packed operands; knows no threads and no epilogue.
//
// A tile of activations is packed [k][R] (bfloat16 dots: [k / 2][R] pairs), a panel of weights as in kernels.h.
// Each output is one chain of multiply-adds over ascending k, continued through memory between blocks of K. No tile
// shape changes that chain, so a row's bits do not depend on the rows beside it.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "simd_int.h"

namespace quire::QUIRE_ISA {

// acc[r][p] += a[r] * w[p]. (A multiply-add that broadcasts its own operand from memory has half the rate.)
template <int R, int P>
inline void add_products(const float* a, const V (&w)[P], V (&acc)[R][P]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const V x = set1(a[r]);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) acc[r][p] = fma(x, w[p], acc[r][p]);
  }
}

// The same with sums of four products of bytes: weights without a sign, activations with.
template <int R, int P>
inline void add_dots(const uint32_t* a, const I (&w)[P], I (&acc)[R][P]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const I x = iset1(int32_t(a[r]));
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) acc[r][p] = dot_bytes(acc[r][p], w[p], x);
  }
}

// How one step of K multiplies. Steps: `kStepK` columns of K; a step of a panel is `kStepBytes`; a row has `kStepA`
// elements of 4 bytes in a step of a tile.
struct FloatSums {
  using Sum = V;
  static constexpr bool kGroups = false;
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

// bfloat16 weights widened to float32 in registers; activations stay float32.
struct DotWide : FloatSums {
  using A = float;
  static constexpr int kStepK = 2, kStepBytes = 64, kStepA = 2;

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], V (&acc)[R][P]) {
    V w[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) w[p] = pair_first(reinterpret_cast<const uint16_t*>(b[p]));
    add_products(a, w, acc);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) w[p] = pair_second(reinterpret_cast<const uint16_t*>(b[p]));
    add_products(a + R, w, acc);
  }
};

#if defined(QUIRE_BF16_DOT)
// bfloat16 weights times activations rounded to bfloat16, two columns of K an instruction.
struct DotPairs : FloatSums {
  using A = uint32_t;
  static constexpr int kStepK = 2, kStepBytes = 64, kStepA = 1;

  static inline V dot(V acc, __m512i x, __m512i w) {
#if defined(QUIRE_BF16_DOT_EMULATED)
    const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
    const V x0 = {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))}, x1 = {_mm512_castsi512_ps(_mm512_and_si512(x, high))};
    const V w0 = {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))}, w1 = {_mm512_castsi512_ps(_mm512_and_si512(w, high))};
    return fma(x0, w0, fma(x1, w1, acc));
#else
    return {_mm512_dpbf16_ps(acc.r, (__m512bh)x, (__m512bh)w)};
#endif
  }

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], V (&acc)[R][P]) {
    __m512i w[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) w[p] = _mm512_loadu_si512(b[p]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512i x = _mm512_set1_epi32(int(a[r]));
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = dot(acc[r][p], x, w[p]);
    }
  }
};
#endif

// int8 weights times activations rounded to int8, four columns of K an instruction. The weights' bytes are 128 more
// than their values, so a row's sums begin at -128 times the sum of its activations. Sums are integers, kept as such in
// the float rows between blocks of K.
struct DotI8 {
  using A = uint32_t;
  using Sum = I;
  static constexpr bool kGroups = false;
  static constexpr int kStepK = 4, kStepBytes = 64, kStepA = 1, kHeldPlus = 128;
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

// int8 weights as float32 numbers, without their scale; activations stay float32.
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

// int4 weights by groups of columns, times activations rounded to int8: eight columns of K a step, the bytes of four
// and of four more. A group's sums are integers; scaled, they are added to the float sums in the order of the groups.
struct DotI4 {
  using A = uint32_t;
  using Sum = I;
  static constexpr bool kGroups = true;
  static constexpr int kStepK = 8, kStepBytes = 64, kStepA = 2, kHeldPlus = 8;

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], I (&acc)[R][P]) {
    const I mask = iset1(0x0f0f0f0f);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      I w[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) w[p] = shift_right(iload(b[p]), half * 4) & mask;
      add_dots(a + half * R, w, acc);
    }
  }

  // A group's sums begin at -8 times the sum of its activations; with offsets at zero.
  static inline I begin(int32_t sum) { return iset1(sum); }
  static inline V scaled(I acc, V scale, V before) { return fma(scale, to_float(acc), before); }
  static inline V shift(V, V offset) { return set1(0) - offset; }  // times the float sum of the activations
};

// int4 weights as float32 numbers; activations stay float32. Without offsets a group's sums are scaled as one.
struct DotI4Wide {
  using A = float;
  using Sum = V;
  static constexpr bool kGroups = true;
  static constexpr int kStepK = 8, kStepBytes = 64, kStepA = 8;

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

  // As DotI4's; weights are taken as q - 8 already, so 8 scales must come back where there are offsets.
  static inline V begin(int32_t) { return set1(0); }
  static inline V scaled(V acc, V scale, V before) { return fma(scale, acc, before); }
  static inline V shift(V scale, V offset) { return fma(set1(8), scale, set1(0) - offset); }
};

// Tile shapes that keep every sum in a register.
#if defined(QUIRE_AVX512)
constexpr int kMaxRows = 14;
constexpr int max_panels(int rows) { return rows <= 4 ? 4 : 2; }
#elif defined(QUIRE_AVX2)
constexpr int kMaxRows = 6;
constexpr int max_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int kMaxRows = 3;
constexpr int max_panels(int) { return 1; }
#endif

// Tiles of a product with more than kMaxRows rows.
template <class Dot>
struct BlockTile {
  static constexpr int rows = kMaxRows, panels = max_panels(kMaxRows);
};
#if defined(QUIRE_AVX512)
// Leaves registers to widen or unpack weights in: 10 and 5% faster than 14 rows.
template <>
struct BlockTile<DotWide> {
  static constexpr int rows = 13, panels = 2;
};
template <>
struct BlockTile<DotI4> : BlockTile<DotWide> {};
#endif
#if defined(QUIRE_VNNI)
// Takes fewer loads for a product (10 for 24, not 16 for 28): 5 to 10% faster. Where weights are widened it is slower:
// twice as many panels do not stay in L1.
template <>
struct BlockTile<DotI8> {
  static constexpr int rows = 6, panels = 4;
};
#endif

// With more rows than this a loop always makes as many panels as there are registers for.
constexpr int kExactRows = 6;

inline constexpr int32_t kNoSums[kMaxRows] = {};

// One block of K for one tile of rows and P panels.
struct MicroArgs {
  const void* a;       // tile, at the block's first step
  const char* b;       // first panel, at the block's first step
  size_t panel_bytes;  // from panel to panel
  int steps;
  float* c;  // [R][c_stride]
  size_t c_stride;
  bool accumulate;       // continue the chains in c; else begin at zero
  ptrdiff_t next_block;  // Prefetch::weights: bytes from the end of this block to the weights that are read next
  // Prefetch::activations: a panel to fetch meanwhile, 64 bytes a step, and where the sums will go: of row r
  // `out_lines` lines at out + r * out_stride.
  const char* next = nullptr;
  const float* out = nullptr;
  size_t out_stride = 0;
  int out_lines = 0;
  int group = 0;         // layouts with groups: columns of one
  bool offsets = false;
  const int32_t* sums = kNoSums;  // [group][R], without groups [R]: of the activations, as Dot::begin takes them
};

// What the loop fetches ahead: weights where they stream from memory once, activations where weights are in cache.
enum class Prefetch { weights, activations };
constexpr int kWeightsAhead = 24;   // steps of 64 bytes of a panel
constexpr int kGroupsAhead = 1536;  // bytes of a panel whose columns come in groups

inline void fetch_meanwhile(const char*& next) {
  __builtin_prefetch(next, 0, 2);
  next += 64;
}

// A row at a time: all at once would hold up the loop's own loads.
inline void fetch_output(const MicroArgs& m, int row) {
  const float* at = m.out + size_t(row) * m.out_stride;
  for (int line = 0; line < m.out_lines; ++line) __builtin_prefetch(at + line * 16, 1, 3);
}

// As `micro_plain`, for weights in groups. The float sums are in memory, side by side: they are touched once a group.
template <class Dot, Prefetch Ahead, int R, int P>
void micro_groups(const MicroArgs& m) {
  const typename Dot::A* a = static_cast<const typename Dot::A*>(m.a);
  const int groups = m.steps * Dot::kStepK / m.group, steps = m.group / Dot::kStepK;
  const size_t header = m.offsets ? 128 : 64, group_bytes = header + size_t(steps) * Dot::kStepBytes;
  const int ahead = int((kGroupsAhead + group_bytes - 1) / group_bytes);
  const char* next = m.next;
  const size_t panel_bytes = m.panel_bytes;  // copies, which stores cannot change
  const bool offsets = m.offsets;
  alignas(64) float total[R][P][16];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      store(total[r][p], m.accumulate ? load(m.c + size_t(r) * m.c_stride + p * 16) : set1(0));
  for (int g = 0; g < groups; ++g) {
    // What is fetched while this group is worked on: one some groups ahead, or of the next block.
    const ptrdiff_t offset = ptrdiff_t(ahead * group_bytes) + (g + ahead < groups ? 0 : m.next_block);
    const char* b = m.b + size_t(g) * group_bytes;
    const float* head[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      head[p] = reinterpret_cast<const float*>(b + size_t(p) * panel_bytes);
      if constexpr (Ahead == Prefetch::weights)
        for (size_t line = 0; line < header; line += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(head[p]) + offset + line, 0, 3);
    }
    b += header;
    if (Ahead == Prefetch::activations && g < R) fetch_output(m, g);
    const int32_t *sums = m.sums + size_t(g) * R, *start = offsets ? kNoSums : sums;
    typename Dot::Sum acc[R][P];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const typename Dot::Sum first = Dot::begin(start[r]);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = first;
    }
    int s = 0;
    do {  // at least once: else sums would have to be in registers where no step follows
      const char* panels[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        panels[p] = b + size_t(p) * panel_bytes;
        if constexpr (Ahead == Prefetch::weights) __builtin_prefetch(panels[p] + offset, 0, 3);
      }
      if constexpr (Ahead == Prefetch::activations) fetch_meanwhile(next);
      Dot::template step<R, P>(a, panels, acc);
      a += R * Dot::kStepA;
      b += Dot::kStepBytes;
    } while (++s < steps);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const V scale = load(head[p]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) store(total[r][p], Dot::scaled(acc[r][p], scale, load(total[r][p])));
    }
    if (!offsets) continue;
    for (int p = 0; p < P; ++p) {
      const V shift = Dot::shift(load(head[p]), load(head[p] + 16));
      for (int r = 0; r < R; ++r)
        store(total[r][p], fma(set1(reinterpret_cast<const float*>(sums)[r]), shift, load(total[r][p])));
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) store(m.c + size_t(r) * m.c_stride + p * 16, load(total[r][p]));
}

template <class Dot, Prefetch Ahead, int R, int P>
void micro_plain(const MicroArgs& m) {
  typename Dot::Sum acc[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
      acc[r][p] = m.accumulate ? Dot::load_sum(m.c + size_t(r) * m.c_stride + p * 16) : Dot::begin(m.sums[r]);

  const typename Dot::A* a = static_cast<const typename Dot::A*>(m.a);
  const char *b = m.b, *next = m.next;
  const size_t panel_bytes = m.panel_bytes;
  // In parts. Prefetch::weights: the steps whose prefetch stays inside the block, then those whose prefetch is in the
  // next one. Prefetch::activations: a part for each row whose output is fetched.
  const int size = Ahead == Prefetch::weights ? max_of(m.steps - kWeightsAhead, 0)
                                              : m.out_lines > 0 ? (m.steps + R - 1) / R : m.steps;
  ptrdiff_t offset = ptrdiff_t(kWeightsAhead) * Dot::kStepBytes;
  for (int part = 0, step = 0; step < m.steps; ++part) {
    const int end = Ahead == Prefetch::weights && part > 0 ? m.steps : min_of(step + size, m.steps);
    if (Ahead == Prefetch::activations) fetch_output(m, part);
    for (; step < end; ++step) {
      const char* panels[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        panels[p] = b + size_t(p) * panel_bytes;
        if constexpr (Ahead == Prefetch::weights) __builtin_prefetch(panels[p] + offset, 0, 3);
      }
      if constexpr (Ahead == Prefetch::activations) fetch_meanwhile(next);
      Dot::template step<R, P>(a, panels, acc);
      a += R * Dot::kStepA;
      b += Dot::kStepBytes;
    }
    offset += m.next_block;
  }

#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) Dot::store_sum(m.c + size_t(r) * m.c_stride + p * 16, acc[r][p]);
}

template <class Dot, Prefetch Ahead, int R, int P>
void micro(const MicroArgs& m) {
  if constexpr (Dot::kGroups) micro_groups<Dot, Ahead, R, P>(m);
  else micro_plain<Dot, Ahead, R, P>(m);
}

using Micro = void (*)(const MicroArgs&);

template <class Dot, Prefetch Ahead, int R>
inline Micro micro_for_panels(int panels) {
  constexpr int most = Ahead == Prefetch::weights ? max_panels(R) : BlockTile<Dot>::panels;
  if constexpr (R <= kExactRows && most >= 4)
    if (panels == 2) return micro<Dot, Ahead, R, 2>;
  if constexpr (R <= kExactRows && most >= 2)
    if (panels == 1) return micro<Dot, Ahead, R, 1>;
  return micro<Dot, Ahead, R, most>;
}

template <class Dot>
constexpr int most_rows(Prefetch ahead) {
  return ahead == Prefetch::weights ? kMaxRows : BlockTile<Dot>::rows;
}

// Two or more equal tiles have at least half as many rows each as they may.
template <class Dot>
constexpr int least_rows(Prefetch ahead) {
  return ahead == Prefetch::weights || BlockTile<Dot>::rows == 1 ? 1 : BlockTile<Dot>::rows / 2;
}

// The loop for `rows` (least_rows()..most_rows()) and `panels` (1, 2 or 4, at most as many as such a tile has). With
// more than kExactRows rows it always makes all: a caller with one panel left gives panel_bytes 0 and drops the copy's
// sums.
template <class Dot, Prefetch Ahead, int R = most_rows<Dot>(Ahead)>
inline Micro micro_for(int rows, int panels) {
  if constexpr (R > least_rows<Dot>(Ahead))
    if (rows < R) return micro_for<Dot, Ahead, R - 1>(rows, panels);
  return micro_for_panels<Dot, Ahead, R>(panels);
}

}  // namespace quire::QUIRE_ISA
