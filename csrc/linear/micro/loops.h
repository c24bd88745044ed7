// The inner loops of a matrix product: R rows times P panels of 16 outputs with all sums in registers.
// Knows packed operands; knows no threads and no epilogue.
//
// A tile of activations is packed [k][R] (bfloat16 dots: [k / 2][R] pairs), a panel of weights as in kernels.h.
// Each output is one chain of multiply-adds over ascending k, continued through memory between blocks of K. No tile
// shape changes that chain, so a row's bits do not depend on the rows beside it.
#pragma once

#include <type_traits>

#include "kernels/kernels.h"
#include "linear/micro/expand.h"
#include "linear/micro/dots.h"
#include "simd/simd.h"

namespace quire::QUIRE_ISA {

// Tile shapes that keep every sum in a register.
#if defined(QUIRE_AVX512)
constexpr int kMaxRows = 14;
constexpr int max_panels(int rows) { return rows <= 6 ? 4 : 2; }
#elif defined(QUIRE_AVX2)
constexpr int kMaxRows = 6;
constexpr int max_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#elif defined(QUIRE_NEON)
constexpr int kMaxRows = 6;
constexpr int max_panels(int rows) { return rows <= 2 ? 2 : 1; }
#else
constexpr int kMaxRows = 3;
constexpr int max_panels(int) { return 1; }
#endif

// The panels that a tile takes at once while weights stream. One panel at a time reads memory in a single run, which
// suits the prefetchers (int4: 1.1 times as fast from memory, 0.85 to 0.95 in cache); several keep more sums in flight.
template <class Dot>
constexpr int stream_width(int rows) {
#if defined(QUIRE_VNNI)
  if (std::is_same_v<Dot, DotI4> && rows <= 4) return 1;
  if (std::is_same_v<Dot, DotI8> && rows == 1) return 2;
#endif
  return max_panels(rows);
}

// Tiles of a product with more than kMaxRows rows.
template <class Dot>
struct BlockTile {
  static constexpr int rows = kMaxRows, panels = max_panels(kMaxRows);
};
#if defined(QUIRE_AVX512)
// Leaves registers in which to widen or unpack weights: 10 and 5% faster than 14 rows.
template <>
struct BlockTile<DotWide> {
  static constexpr int rows = 13, panels = 2;
};
template <>
struct BlockTile<DotHalves> : BlockTile<DotWide> {};
template <>
struct BlockTile<DotI4> : BlockTile<DotWide> {};
#endif
template <class Pairs>
struct BlockTile<Compact<Pairs>> : BlockTile<Pairs> {};
#if defined(QUIRE_VNNI)
// Needs fewer loads per product (10 for 24, not 16 for 28): 5 to 10% faster. It is slower for widened weights, because
// twice as many panels do not stay in L1.
template <>
struct BlockTile<DotI8> {
  static constexpr int rows = 6, panels = 4;
};
#endif

// The most rows for which expanded weights (of 12 bits) stay in registers.
#if defined(QUIRE_AVX512)
constexpr int kFewRows = 4;
#else
constexpr int kFewRows = 3;
#endif

// With more rows than this a loop always computes as many panels as there are registers for.
constexpr int kExactRows = 6;

inline constexpr int32_t kNoSums[kMaxRows] = {};

// One block of K for one tile of rows and P panels.
struct MicroArgs {
  const void* a = nullptr;  // tile, at the block's first step
  const char* b = nullptr;  // first panel, at the block's first step
  size_t panel_bytes = 0;   // from panel to panel
  int steps = 0;
  float* c = nullptr;  // [R][c_stride]
  size_t c_stride = 0;
  bool accumulate = false;   // continue the chains in c; else begin at zero
  ptrdiff_t next_block = 0;  // Prefetch::weights: bytes from the end of this block to the weights that are read next
  // Prefetch::activations: a panel to fetch meanwhile, 64 bytes per step, and the destination of the sums: `out_lines`
  // lines at out + r * out_stride for row r.
  const char* next = nullptr;
  const float* out = nullptr;
  size_t out_stride = 0;
  int out_lines = 0;
  int group = 0;  // columns of a group, for layouts with groups; the rest as in Format
  bool offsets = false;
  bool narrow = false;
  const int32_t* sums = kNoSums;  // [group][R], without groups [R]: sums of the activations, as Dot::begin takes them
  // Weights in 12 bits: [P] tables and escapes, the block's first step, and the expanded block [P][steps].
  const CompactPanel* compact = nullptr;
  uint32_t first_step = 0;
  ExpandedStep* expanded = nullptr;
};

// What the loop prefetches: weights if they stream from memory once, activations if weights are in cache.
enum class Prefetch { weights, activations };
constexpr int kWeightsAhead = 24;   // steps of 64 bytes of a panel
constexpr int kGroupsAhead = 1536;  // bytes of a panel whose columns come in groups
constexpr int kCompactAhead = 8;    // steps of a panel in 12 bits

QUIRE_INLINE void fetch_meanwhile(const char*& next) {
  __builtin_prefetch(next, 0, 2);
  next += 64;
}

// Fetches one row at a time, because all at once would delay the loop's own loads.
QUIRE_INLINE void fetch_output(const MicroArgs& m, int row) {
  const float* at = m.out + size_t(row) * m.out_stride;
  for (int line = 0; line < m.out_lines; ++line) __builtin_prefetch(at + line * 16, 1, 3);
}

// Computes a step of K and moves on to the next one. Prefetches `ahead` bytes on, or the target of `next`.
template <class Dot, Prefetch Ahead, int R, int P>
QUIRE_INLINE void multiply_step(const typename Dot::A*& a, const char*& b, size_t panel_bytes, ptrdiff_t ahead,
                                const char*& next, typename Dot::Sum (&acc)[R][P]) {
  const char* panels[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
    panels[p] = b + size_t(p) * panel_bytes;
    if constexpr (Ahead == Prefetch::weights) __builtin_prefetch(panels[p] + ahead, 0, 3);
  }
  if constexpr (Ahead == Prefetch::activations) fetch_meanwhile(next);
  Dot::template step<R, P>(a, panels, acc);
  a += R * Dot::kStepA;
  b += Dot::kStepBytes;
}

// Reads a header: floats [16], or this group's half of the pairs of bfloat16 [16][2].
struct HeaderField {
  int shifts[2];  // by place; a table, because with a branch g++ keeps the group's sums in memory
  I mask;
  explicit HeaderField(bool narrow) : shifts{narrow ? 16 : 0, 0}, mask(iset1(narrow ? int32_t(0xffff0000u) : -1)) {}
  V load(const char* field, int place) const { return float_of(shift_left(iload(field), shifts[place]) & mask); }
};

// Like `micro_plain`, for weights in groups. The float sums are adjacent in memory: they are touched once per group.
template <class Dot, Prefetch Ahead, int R, int P>
void micro_groups(const MicroArgs& m) {
  const typename Dot::A* a = static_cast<const typename Dot::A*>(m.a);
  const int groups = m.steps * Dot::kStepK / m.group, steps = m.group / Dot::kStepK;
  const size_t header = m.offsets ? 128 : 64, group_bytes = size_t(steps) * Dot::kStepBytes;
  const size_t unit_bytes = header + (group_bytes << m.narrow);  // a header and the groups behind it
  const int ahead = int((kGroupsAhead + unit_bytes - 1) / unit_bytes);
  const char* next = m.next;
  const size_t panel_bytes = m.panel_bytes;  // copies, which stores cannot change
  const bool offsets = m.offsets, narrow = m.narrow;
  const HeaderField field(narrow);
  alignas(64) float total[R][P][16];
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      store(total[r][p], m.accumulate ? load(m.c + size_t(r) * m.c_stride + p * 16) : set1(0));
  for (int g = 0; g < groups; ++g) {
    const int unit = g >> narrow, place = g & narrow;
    // Prefetched while this group is computed: a later group, or one of the next block. (A header of two groups is
    // fetched twice, which avoids a branch.)
    const ptrdiff_t offset =
        ptrdiff_t(size_t(ahead) * unit_bytes) + (g + (ahead << narrow) < groups ? 0 : m.next_block);
    const char *heads = m.b + size_t(unit) * unit_bytes, *b = heads + header + size_t(place) * group_bytes;
    const char* head[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      head[p] = heads + size_t(p) * panel_bytes;
      if constexpr (Ahead == Prefetch::weights)
        for (size_t line = 0; line < header; line += 64) __builtin_prefetch(head[p] + offset + line, 0, 3);
    }
    if constexpr (Ahead == Prefetch::activations) {
      for (size_t line = 0; line < header; line += 64) fetch_meanwhile(next);
      if (g < R) fetch_output(m, g);
    }
    const int32_t *sums = m.sums + size_t(g) * R, *start = offsets ? kNoSums : sums;
    typename Dot::Sum acc[R][P];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const typename Dot::Sum first = Dot::begin(start[r]);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = first;
    }
    int s = 0;
    do {  // at least once, so that g++ need not keep sums in registers for the case without a step
#pragma GCC unroll 1
      for (int run = 0; run < Dot::kRun; ++run) multiply_step<Dot, Ahead>(a, b, panel_bytes, offset, next, acc);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) acc[r][p] = Dot::settled(acc[r][p]);
    } while ((s += Dot::kRun) < steps);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const V scale = field.load(head[p], place);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) store(total[r][p], Dot::scaled(acc[r][p], scale, load(total[r][p])));
    }
    if (!offsets) continue;
    for (int p = 0; p < P; ++p) {
      const V scale = field.load(head[p], place), held = field.load(head[p] + 64, place);
      const V shift = Dot::shift(scale, narrow ? scale * held : held);
      for (int r = 0; r < R; ++r)
        store(total[r][p], fma(set1(reinterpret_cast<const float*>(sums)[r]), shift, load(total[r][p])));
    }
  }
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) store(m.c + size_t(r) * m.c_stride + p * 16, load(total[r][p]));
}

template <class Dot, int R, int P>
QUIRE_INLINE void begin_sums(const MicroArgs& m, typename Dot::Sum (&acc)[R][P]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
      acc[r][p] = m.accumulate ? Dot::load_sum(m.c + size_t(r) * m.c_stride + p * 16) : Dot::begin(m.sums[r]);
}

template <class Dot, int R, int P>
QUIRE_INLINE void store_sums(const MicroArgs& m, const typename Dot::Sum (&acc)[R][P]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) Dot::store_sum(m.c + size_t(r) * m.c_stride + p * 16, acc[r][p]);
}

template <class Dot, Prefetch Ahead, int R, int P>
void micro_plain(const MicroArgs& m) {
  typename Dot::Sum acc[R][P];
  begin_sums<Dot>(m, acc);

  const typename Dot::A* a = static_cast<const typename Dot::A*>(m.a);
  const char *b = m.b, *next = m.next;
  const size_t panel_bytes = m.panel_bytes;
  // The steps come in parts. Prefetch::weights: steps that prefetch within the block, then steps that prefetch from the
  // next one. Prefetch::activations: one part per row whose output is prefetched.
  const int size = Ahead == Prefetch::weights ? max_of(m.steps - kWeightsAhead, 0)
                                              : m.out_lines > 0 ? (m.steps + R - 1) / R : m.steps;
  ptrdiff_t offset = ptrdiff_t(kWeightsAhead) * Dot::kStepBytes;
  for (int part = 0, step = 0; step < m.steps; ++part) {
    const int end = Ahead == Prefetch::weights && part > 0 ? m.steps : min_of(step + size, m.steps);
    if (Ahead == Prefetch::activations) fetch_output(m, part);
    for (; step < end; ++step) multiply_step<Dot, Ahead>(a, b, panel_bytes, offset, next, acc);
    offset += m.next_block;
  }

  store_sums<Dot>(m, acc);
}

// Like `micro_plain`, for weights that are expanded in registers, a step at a time, one panel after the other.
template <class Dot, int R, int P>
void micro_compact_few(const MicroArgs& m) {
  using Pairs = typename Dot::Pairs;
  const typename Dot::A* a = static_cast<const typename Dot::A*>(m.a);
  const char* b = m.b;
  const size_t panel_bytes = m.panel_bytes;
  CompactPanel panels[P];
  StepTable tables[P];
  uint32_t step = m.first_step, patched = kNoEscape;
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
    panels[p] = m.compact[p];
    tables[p] = panels[p].table();
    patched = min_of(patched, panels[p].patched_step());
  }
  typename Dot::Sum acc[R][P];
  begin_sums<Dot>(m, acc);
  for (int s = 0; s < m.steps; ++s, ++step, b += kCompactBytes, a += R * Dot::kStepA) {
    const ptrdiff_t ahead = kCompactAhead * ptrdiff_t(kCompactBytes) + (s + kCompactAhead < m.steps ? 0 : m.next_block);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const char* from = b + size_t(p) * panel_bytes;
      for (size_t line = 0; line < kCompactBytes; line += 64) __builtin_prefetch(from + ahead + line, 0, 3);
      StepPairs expanded = expand(from, tables[p]);
      if (step == patched) [[unlikely]] expanded = panels[p].patched(step, expanded);
#pragma GCC unroll 4
      for (int pair = 0; pair < kCompactPairs; ++pair) {
        const I pairs[1] = {expanded.pairs[pair]};
        Pairs::add(a + pair * R * Pairs::kStepA, pairs, acc, p);
      }
    }
    if (step == patched) [[unlikely]] {
      patched = kNoEscape;
      for (int p = 0; p < P; ++p) patched = min_of(patched, panels[p].patched_step());
    }
  }
  store_sums<Dot>(m, acc);
}

// Like `micro_plain`, for weights that are expanded to memory a step at a time: to the stack, or with
// Prefetch::activations to `m.expanded`, for the tiles that follow.
template <class Dot, Prefetch Ahead, int R, int P>
void micro_compact(const MicroArgs& m) {
  using Pairs = typename Dot::Pairs;
  const typename Dot::A* a = static_cast<const typename Dot::A*>(m.a);
  const char *b = m.b, *next = m.next;
  const size_t panel_bytes = m.panel_bytes;
  ExpandedStep stack[P];
  CompactPanel panels[P];
  ExpandedStep* to[P];
  uint32_t step = m.first_step, patched = kNoEscape;
  for (int p = 0; p < P; ++p) {
    panels[p] = m.compact[p];
    to[p] = Ahead == Prefetch::weights ? stack + p : m.expanded + size_t(p) * size_t(m.steps);
    patched = min_of(patched, panels[p].patched_step());
  }
  typename Dot::Sum acc[R][P];
  begin_sums<Dot>(m, acc);
  for (int s = 0; s < m.steps; ++s, ++step, b += kCompactBytes) {
    const ptrdiff_t ahead = kCompactAhead * ptrdiff_t(kCompactBytes) + (s + kCompactAhead < m.steps ? 0 : m.next_block);
    if (Ahead == Prefetch::activations && s < R) fetch_output(m, s);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const char* from = b + size_t(p) * panel_bytes;
      for (size_t line = 0; line < kCompactBytes; line += 64)
        if constexpr (Ahead == Prefetch::weights) __builtin_prefetch(from + ahead + line, 0, 3);
        else if (p == 0) fetch_meanwhile(next);
      store(*to[p], expand(from, panels[p].table()));
    }
    if (step == patched) {
      patched = kNoEscape;
      for (int p = 0; p < P; ++p) {
        panels[p].patch(step, *to[p]);
        patched = min_of(patched, panels[p].patched_step());
      }
    }
    // Sums need all registers, so pairs come from memory.
    __asm__ volatile("" : : "r"(to) : "memory");
    for (int pair = 0; pair < kCompactPairs; ++pair) {
      const char* pairs[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) pairs[p] = reinterpret_cast<const char*>(to[p]->pairs[pair]);
      Pairs::template step<R, P>(a, pairs, acc);
      a += R * Pairs::kStepA;
    }
    if constexpr (Ahead == Prefetch::activations)
      for (int p = 0; p < P; ++p) ++to[p];
  }
  store_sums<Dot>(m, acc);
}

template <class Dot, Prefetch Ahead, int R, int P>
void micro(const MicroArgs& m) {
  constexpr bool compact = Dot::kLoop == Loop::compact;
  if constexpr (compact && Ahead == Prefetch::weights && R <= kFewRows) micro_compact_few<Dot, R, P>(m);
  else if constexpr (compact) micro_compact<Dot, Ahead, R, P>(m);
  else if constexpr (Dot::kLoop == Loop::groups) micro_groups<Dot, Ahead, R, P>(m);
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

// Each of two or more equal tiles has at least half of the rows that it may have.
template <class Dot>
constexpr int least_rows(Prefetch ahead) {
  return ahead == Prefetch::weights || BlockTile<Dot>::rows == 1 ? 1 : BlockTile<Dot>::rows / 2;
}

// The loop for `rows` (least_rows()..most_rows()) and `panels` (1, 2 or 4, at most as many as such a tile has). With
// more than kExactRows rows it always computes all panels: a caller with one panel left passes panel_bytes 0 and drops
// the sums of the copy.
template <class Dot, Prefetch Ahead, int R = most_rows<Dot>(Ahead)>
Micro micro_for(int rows, int panels) {
  if constexpr (R > least_rows<Dot>(Ahead))
    if (rows < R) return micro_for<Dot, Ahead, R - 1>(rows, panels);
  return micro_for_panels<Dot, Ahead, R>(panels);
}

// Loops that several products share are compiled once, in kernels/float.
extern template Micro micro_for<DotF32, Prefetch::weights>(int, int);
extern template Micro micro_for<DotF32, Prefetch::activations>(int, int);
extern template Micro micro_for<DotWide, Prefetch::weights>(int, int);

}  // namespace quire::QUIRE_ISA
