// The course of a sequence's state through a step: open rows first, then its tokens, written where the step keeps it.
// Knows no formula.
#pragma once

#include "kernels/kernels.h"
#include "simd/simd.h"

namespace quire::QUIRE_ISA {

// Calls run(state, open, from, count) for runs of open rows (`open`) or tokens of the sequence, in order. `state` is the
// part [begin, begin + size) of its state; tokens that may be taken back advance a copy of it, in `copy`.
template <class Run>
QUIRE_INLINE void run_segments(const StateSeq& s, size_t begin, size_t size, float* copy, Run&& run) {
  float* state = s.state + begin;
  if (s.fresh) std::memset(state, 0, size * sizeof(float));
  if (s.open > 0) run(state, true, 0, s.open);
  int done = 0;
  for (int m = 0; m < s.num_marks; ++m) {
    if (s.marks[m].count > done) run(state, false, done, s.marks[m].count - done);
    done = s.marks[m].count;
    std::memcpy(s.marks[m].state + begin, state, size * sizeof(float));
  }
  if (s.kept > done) run(state, false, done, s.kept - done);
  if (s.kept == s.tokens) return;
  std::memcpy(copy, state, size * sizeof(float));
  run(copy, false, s.kept, s.tokens - s.kept);
}

// Calls f(sequence, part, first, last, scratch) for every sequence and part in ranges of its `units`, in parallel: as few
// ranges as keep all threads busy, of whole `grain` units.
template <class F>
inline void for_state_ranges(ThreadPool& pool, const StateStep& step, int parts, int units, int grain, F&& f) {
  const int most = (units + grain - 1) / grain, whole = step.num_seqs * parts;
  const int ranges = pool.threads() == 1 ? 1 : min_of(most, max_of(1, 4 * pool.threads() / whole));
  pool.parallel_for(whole * ranges, [&](int task, int thread) {
    const int range = task % ranges, part = task / ranges % parts, seq = task / ranges / parts;
    const int first = int(int64_t(most) * range / ranges) * grain;
    const int last = min_of(units, int(int64_t(most) * (range + 1) / ranges) * grain);
    f(step.seqs[seq], part, first, last, static_cast<float*>(pool.scratch(thread)));
  });
}

}  // namespace quire::QUIRE_ISA
