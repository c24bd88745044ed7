// The inner loops of a matrix product: R rows times P panels of 16 outputs with all sums in registers.
// Knows packed operands; knows no threads and no epilogue.
//
// A tile of activations is packed [k][R] (bfloat16 dots: [k / 2][R] pairs), a panel of weights as in kernels.h.
// Each output is one chain of multiply-adds over ascending k, continued through memory between blocks of K. No tile
// shape changes that chain, so a row's bits do not depend on the rows beside it.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// How one step of K multiplies. Steps: `kStepK` columns of K; a step of a panel is `kStepBytes`; a row has `kStepA`
// elements of 4 bytes in a step of a tile.
struct DotF32 {
  using A = float;
  static constexpr int kStepK = 1, kStepBytes = 64, kStepA = 1;

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], V (&acc)[R][P]) {
    V w[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) w[p] = load(reinterpret_cast<const float*>(b[p]));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const V x = set1(a[r]);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = fma(x, w[p], acc[r][p]);
    }
  }
};

// bfloat16 weights widened to float32 in registers; activations stay float32.
struct DotWide {
  using A = float;
  static constexpr int kStepK = 2, kStepBytes = 64, kStepA = 2;

  template <int R, int P>
  static inline void step(const A* a, const char* const (&b)[P], V (&acc)[R][P]) {
    V w[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) w[p] = pair_first(reinterpret_cast<const uint16_t*>(b[p]));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const V x = set1(a[r]);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = fma(x, w[p], acc[r][p]);
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) w[p] = pair_second(reinterpret_cast<const uint16_t*>(b[p]));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const V x = set1(a[R + r]);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = fma(x, w[p], acc[r][p]);
    }
  }
};

#if defined(QUIRE_BF16_DOT)
// bfloat16 weights times activations rounded to bfloat16, two columns of K an instruction.
struct DotPairs {
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
};

// What the loop fetches ahead: weights where they stream from memory once, activations where weights are in cache.
enum class Prefetch { weights, activations };
// In steps of 64 bytes a panel, and in bytes of a tile.
constexpr int kWeightsAhead = 24;
constexpr int kActivationsAhead = 2048;

template <class Dot, Prefetch Ahead, int R, int P>
void micro(const MicroArgs& m) {
  V acc[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) acc[r][p] = m.accumulate ? load(m.c + size_t(r) * m.c_stride + p * 16) : set1(0);

  const typename Dot::A* a = static_cast<const typename Dot::A*>(m.a);
  const char* b = m.b;
  const size_t panel_bytes = m.panel_bytes;
  // First the steps whose prefetch stays inside the block, then those whose prefetch is in the next one.
  const int inside = m.steps > kWeightsAhead ? m.steps - kWeightsAhead : 0;
  ptrdiff_t offset = ptrdiff_t(kWeightsAhead) * Dot::kStepBytes;
  int step = 0;
  for (int part = Ahead == Prefetch::weights ? 0 : 1; part < 2; ++part) {
    const int end = part == 0 ? inside : m.steps;
    for (; step < end; ++step) {
      const char* panels[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        panels[p] = b + size_t(p) * panel_bytes;
        if constexpr (Ahead == Prefetch::weights) __builtin_prefetch(panels[p] + offset, 0, 3);
      }
      if constexpr (Ahead == Prefetch::activations)
        __builtin_prefetch(reinterpret_cast<const char*>(a) + kActivationsAhead, 0, 3);
      Dot::template step<R, P>(a, panels, acc);
      a += R * Dot::kStepA;
      b += Dot::kStepBytes;
    }
    offset += m.next_block;
  }

#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) store(m.c + size_t(r) * m.c_stride + p * 16, acc[r][p]);
}

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

using Micro = void (*)(const MicroArgs&);

template <class Dot, Prefetch Ahead, int R>
inline Micro micro_for_panels(int panels) {
  constexpr int most = max_panels(R);
  if constexpr (R <= 4 && most >= 4)
    if (panels == 2) return micro<Dot, Ahead, R, 2>;
  if constexpr (R <= 4 && most >= 2)
    if (panels == 1) return micro<Dot, Ahead, R, 1>;
  return micro<Dot, Ahead, R, most>;
}

// Two or more equal tiles of at most kMaxRows have at least half as many rows each.
constexpr int min_rows(Prefetch ahead) { return ahead == Prefetch::weights ? 1 : kMaxRows > 1 ? kMaxRows / 2 : 1; }

// The loop for `rows` (min_rows()..kMaxRows) and `panels` (1, 2 or 4, at most max_panels(rows)). With more than 4 rows
// it always makes max_panels(rows): a caller with one panel left gives panel_bytes 0 and drops the copy's sums.
template <class Dot, Prefetch Ahead, int R = kMaxRows>
inline Micro micro_for(int rows, int panels) {
  if constexpr (R > min_rows(Ahead))
    if (rows < R) return micro_for<Dot, Ahead, R - 1>(rows, panels);
  return micro_for_panels<Dot, Ahead, R>(panels);
}

}  // namespace quire::QUIRE_ISA
