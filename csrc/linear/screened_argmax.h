// Finds the largest output of each row without computing most of the product: the screen tells which panels may have
// it, and only those are multiplied, as `linear` does it, so the result is the same bit for bit. Knows products; knows
// no plan.
#pragma once

#include "linear/argmax_candidates.h"
#include "linear/layout_dots.h"
#include "linear/product.h"

namespace quire::QUIRE_ISA {

constexpr int kWaitingRows = 3;  // so few rows are bound by memory
// At most one in so many of a row's panels is multiplied, on average; with more, the whole product is quicker.
constexpr int candidate_share(int rows) { return rows <= kWaitingRows ? 8 : 16; }
// A row's candidates are split into so many parts, for threads to share if there are fewer rows than threads.
constexpr int kCandidateParts = 8;
constexpr float kScreenMagnitude = 1e10f;  // the largest activation or weight for which bounds and products stay finite
// Up to so many columns, sums of int8 products fit in 32 bits and a row fits in a thread's scratch memory.
constexpr int kScreenColumns = 65536;

// The largest of some outputs; the first one if there are several.
struct Largest {
  float value;
  int32_t at;

  void meet(Largest other) {
    if (other.value > value || (other.value == value && other.at < at)) *this = other;
  }
};
constexpr Largest kNone = {-__builtin_inff(), 0x7fffffff};

// The workspace of a screened product: the workspace of the product with the screen, then each row's state and the
// results of its parts.
struct ScreenMemory {
  ScreenRow* rows;
  Largest* largest;  // [rows][kCandidateParts]

  static size_t product_bytes(const MatrixView& screen, int rows) {
    return round_up(quantized_bytes(screen, rows), 64);
  }
  static size_t bytes(const MatrixView& w, int rows) {
    return product_bytes(w.screen(), rows) + size_t(rows) * (sizeof(ScreenRow) + kCandidateParts * sizeof(Largest));
  }
  explicit ScreenMemory(const LinearArgs& a) {
    char* p = static_cast<char*>(a.workspace) + product_bytes(a.weight.screen(), a.rows);
    rows = reinterpret_cast<ScreenRow*>(p);
    largest = reinterpret_cast<Largest*>(rows + a.rows);
  }
};

// Bounds of the length of n values and of the change by rounding them to int8; NaN if a value is too large or NaN.
struct LengthBounds {
  float length, rounding;
};

template <class Dot>
inline LengthBounds length_bounds(const float* x, int n, Int8Scale scale) {
  V length = set1(0), rounding = set1(0);
  for (int k = 0; k < n; k += kLanes) {
    const V v = load_first(x + k, min_of(kLanes, n - k)), w = multiplied<Dot>(v);
    const V apart = fma(to_float(to_int(v * set1(scale.inverse))), set1(-scale.scale), w);
    length = fma(w, w, length), rounding = fma(apart, apart, rounding);
  }
  constexpr float up = 1.001f;  // covers the rounding of these sums and roots, for up to kScreenColumns
  const float part = up * __builtin_sqrtf(reduce_add(rounding));
  return {up * __builtin_sqrtf(reduce_add(length)),
          scale.scale * 127.0f < kScreenMagnitude ? part : __builtin_nanf("")};
}

// Bounds for a row of n activations in products with a weight and with its screen.
template <class Dot>
inline ScreenRow screen_row(const float* x, int n) {
  const LengthBounds bounds = length_bounds<Dot>(x, n, int8_scale(x, n));
  // A product of floats rounds at most twice per column, each time by at most 2^-24 of |x| |w|; the outputs of the
  // screen and the bounds themselves are rounded a few more times.
  const float floats = float(n) * 0x1p-22f + 0x1p-19f;
  const float rounding = bounds.rounding + floats * (bounds.length + bounds.rounding);
  return {bounds.length, rounding, -__builtin_inff(), 0};
}

// The largest output of row `row` in panels noted from `first` to `last`. `packed`: memory for a row.
template <class Dot>
inline Largest largest_of(const LinearArgs& a, int row, const Candidate* first, const Candidate* last, void* packed) {
  using Product = typename ManyTiles<Dot>::Product;
  const MatrixView& w = a.weight;
  LinearArgs one = a;
  one.x = a.x + size_t(row) * a.x_stride, one.rows = 1;
  pack_tile<Product>(one, Tiles(1, 1), 0, static_cast<typename Product::A*>(packed));
  constexpr int most = max_panels(1) > 1 ? 2 : 1;  // two at once, because the sums of one depend on each other
  alignas(64) float c[most * 16];
  const size_t panel_bytes = w.panel_bytes();
  Largest result = kNone;
  for (int count; first < last; first += count) {
    count = min_of(most, int(last - first));
    const int panels[] = {first[0].panel, first[count - 1].panel};
    MicroArgs m{.a = packed,
                .b = w.data + panel_bytes * size_t(panels[0]),
                .steps = w.padded_cols() / Dot::kStepK,
                .c = c,
                .c_stride = 16};
    m.panel_bytes = panel_bytes * size_t(ptrdiff_t(panels[1] - panels[0]));
    CompactPanel compact[most];
    if constexpr (Dot::kLoop == Loop::compact) {
      for (int p = 0; p < count; ++p) compact[p] = compact_panel(w, panels[p], 0);
      m.compact = compact;
    }
    micro_for_panels<Dot, Prefetch::weights, 1>(count)(m);
    for (int i = 0; i < count * 16; ++i)
      if (const int at = panels[i / 16] * 16 + i % 16; at < w.rows) result.meet({c[i], at});
  }
  return result;
}

// Notes candidates in y, whose rows have room for them, and keeps those that may still be the largest once all outputs
// are seen. False if too many remain, or a row cannot be screened.
template <class Dot>
inline bool find_candidates(const LinearArgs& a, Linear* screen_product, const ScreenMemory& memory,
                            const Screening& screening, ThreadPool& pool) {
  for_tiles(a, Tiles(a.rows, 1), pool, [&](int r, int) {
    memory.rows[r] = screen_row<Dot>(a.x + size_t(r) * a.x_stride, a.weight.cols);
  });
  for (int r = 0; r < a.rows; ++r)
    if (!(memory.rows[r].rounding < __builtin_inff())) return false;
  LinearArgs coarse = a;
  coarse.weight = a.weight.screen();
  coarse.y_stride = 0, coarse.maxima = nullptr;
  coarse.screening = &screening;
  screen_product(&coarse, 1, pool);
  int64_t total = 0;
  for (int r = 0; r < a.rows; ++r) {
    ScreenRow& row = memory.rows[r];
    Candidate* noted = screening.noted + size_t(r) * screening.stride;
    int kept = 0;
    for (int i = 0; i < row.candidates; ++i)
      if (noted[i].most >= row.least) noted[kept++] = noted[i];
    total += row.candidates = kept;
  }
  return total * candidate_share(a.rows) <= int64_t(a.rows) * a.weight.panels();
}

template <class Dot>
inline bool screened_best_as(const LinearArgs& a, Linear* screen_product, int32_t* best, ThreadPool& pool) {
  const ScreenMemory memory(a);
  const size_t stride = a.y_stride * sizeof(float) / sizeof(Candidate);
  const Screening screening{memory.rows, reinterpret_cast<Candidate*>(a.y), stride};
  if (!find_candidates<Dot>(a, screen_product, memory, screening, pool)) return false;
  const int parts = a.rows < pool.threads() ? min_of(pool.threads(), kCandidateParts) : 1;
  pool.parallel_for(a.rows * parts, [&](int task, int thread) {
    const int row = task / parts, part = task % parts;
    const Candidate* noted = screening.noted + size_t(row) * screening.stride;
    const int64_t count = memory.rows[row].candidates;
    memory.largest[task] =
        largest_of<Dot>(a, row, noted + count * part / parts, noted + count * (part + 1) / parts, pool.scratch(thread));
  });
  for (int r = 0; r < a.rows; ++r) {
    Largest largest = kNone;
    for (int part = 0; part < parts; ++part) largest.meet(memory.largest[r * parts + part]);
    if (largest.at < 0 || largest.at >= a.weight.rows) return false;  // no candidate: the weights have NaN
    best[r] = largest.at;
    a.y[size_t(r) * a.y_stride + size_t(largest.at)] = largest.value;
  }
  return true;
}

}  // namespace quire::QUIRE_ISA
