// Tells from the product with a weight's screen which outputs may be the largest of their row. Knows bounds of
// rounding; knows no exact product.
//
// A row x and a row w of a weight are rounded to x' and w' in int8. Their products differ by no more than |x| |w - w'|
// + |x - x'| |w'| (Cauchy-Schwarz); the rounding of floats counts as part of |x - x'|. The largest output is at least
// the greatest lower bound, so an output whose upper bound is less is not the largest.
#pragma once

#include "kernels/kernels.h"
#include "simd/simd.h"
#include "simd/simd_int.h"

namespace quire {

// A row of activations.
struct ScreenRow {
  float length, rounding;  // bounds of |x| and |x - x'|
  float least;             // the greatest lower bound so far: smaller outputs are not the largest
  int32_t candidates;      // the number of panels noted
};

// A panel that may have the largest output of a row; none of its outputs exceeds `most`.
struct Candidate {
  float most;
  int32_t panel;
};

struct Screening {
  ScreenRow* rows;
  Candidate* noted;  // those of row r from r * stride on, in any order
  size_t stride;
};

}  // namespace quire

namespace quire::QUIRE_ISA {

// The most rows for which products of int8 are quicker than products of floats.
#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
constexpr int kScreenedRows = 256;
#else
constexpr int kScreenedRows = 1;
#endif

// The absolute part of the bound: denormal numbers that a CPU may take for 0, times magnitudes of up to 1e10.
constexpr float kScreenSlack = 1e-20f;

// Several threads may note panels of a row at once.
inline float least_of(const ScreenRow& row) {
  float least;
  __atomic_load(&row.least, &least, __ATOMIC_RELAXED);
  return least;
}

inline void note_candidate(ScreenRow& row, Candidate* noted, int panel, V lower, V upper) {
  float least = least_of(row), found = reduce_max(lower);
  while (least < found &&
         !__atomic_compare_exchange(&row.least, &least, &found, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  const float most = reduce_max(upper);
  if (most >= least) noted[__atomic_fetch_add(&row.candidates, 1, __ATOMIC_RELAXED)] = {most, panel};
}

// Notes those of panels [first, first + panels), from the sums c of `rows` rows with them.
inline void note_candidates(const LinearArgs& a, const float* c, size_t c_stride, int first_row, int rows, int first,
                            int panels) {
  const Screening& s = *a.screening;
  for (int panel = first; panel < first + panels; ++panel) {
    const float* bounds = reinterpret_cast<const float*>(a.weight.tail(panel));
    const V scale = load(bounds), length = load(bounds + 16), rounding = load(bounds + 32);
    const float* sums = c + (panel - first) * 16;
    for (int r = first_row; r < first_row + rows; ++r, sums += c_stride) {
      ScreenRow& row = s.rows[r];
      const V y = to_float(iload(sums)) * (scale * set1(a.x_scale[r]));
      const V apart = fma(set1(row.length), rounding, fma(set1(row.rounding), length, set1(kScreenSlack)));
      const V lower = y - apart, upper = y + apart;
      if (lane_bits(less(upper, set1(least_of(row)))) != 0xffffu) [[unlikely]]
        note_candidate(row, s.noted + size_t(r) * s.stride, panel, lower, upper);
    }
  }
}

}  // namespace quire::QUIRE_ISA
