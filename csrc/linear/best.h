// Finds the largest logit of each row in two steps: first maxima of blocks of columns, right after a product wrote
// them, then the token. Knows rows of floats; knows no product and no plan.
#pragma once

#include "simd/kernels.h"
#include "sample/sampler_kernels.h"
#include "simd/simd.h"

namespace quire::QUIRE_ISA {

// Maxima of rows [first, last), of the blocks of columns [begin, end); `begin` is a multiple of kMaximaColumns.
inline void note_maxima(const LinearArgs& a, int first, int last, int begin, int end) {
  const size_t blocks = maxima_of(a.weight.rows);
  for (int r = first; r < last; ++r)
    for (int column = begin; column < end; column += kMaximaColumns) {
      const float* y = a.y + size_t(r) * a.y_stride + column;
      const BlockMax most = block_max<false>(y, min_of(kMaximaColumns, end - column));
      a.maxima[size_t(r) * blocks + size_t(column / kMaximaColumns)] = most.sound ? most.value : __builtin_nanf("");
    }
}

// The index of the first largest value of each row, or -1.
inline void best(const BestArgs& a, ThreadPool& pool) {
  const size_t blocks = maxima_of(a.width);
  constexpr int per_task = 8;
  pool.parallel_for((a.rows + per_task - 1) / per_task, [&](int task, int) {
    for (int r = task * per_task; r < min_of(a.rows, (task + 1) * per_task); ++r) {
      const float *x = a.x + size_t(r) * a.stride, *maxima = a.maxima + size_t(r) * blocks;
      const RowMax most = row_max(maxima, int(blocks));
      int block = most.block;
      while (most.sound && maxima[block] != most.value) ++block;
      int at = block * kMaximaColumns;
      while (most.sound && x[at] != most.value) ++at;
      a.best[r] = most.sound ? at : -1;
    }
  });
}

}  // namespace quire::QUIRE_ISA
