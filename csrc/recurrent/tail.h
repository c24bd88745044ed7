// States that are the last inputs of a sequence, row by row. Knows no formula.
#pragma once

#include <cstring>

#include "kernels/kernels.h"

namespace quire {

// Row j of what a sequence's operation sees is, in order: of the `rows` of its state, of its open rows, of its tokens,
// which are rows of `x` [T, channels].
struct Tail {
  const StateSeq& s;
  const float* x;
  size_t channels, open_row;
  int rows;

  const float* seen(int j) const {
    if (j < rows) return s.state + size_t(j) * channels;
    if (j < rows + s.open) return s.open_rows + size_t(j - rows) * open_row;
    return x + size_t(s.first + j - rows - s.open) * channels;
  }

  // Before channels [first, last) are read.
  void begin(int first, int last) const {
    for (int r = 0; s.fresh && r < rows; ++r)
      std::memset(s.state + size_t(r) * channels + first, 0, size_t(last - first) * sizeof(float));
  }

  // After they were read: writes them to marks and to the state.
  void keep(int first, int last) const {
    for (int m = 0; m < s.num_marks; ++m) move(s.marks[m].count, s.marks[m].state, first, last);
    move(s.kept, s.state, first, last);
  }

 private:
  void move(int count, float* state, int first, int last) const {  // rows move to lower places: in place too
    for (int r = 0; r < rows; ++r) {
      const float* from = seen(s.open + count + r) + first;
      float* to = state + size_t(r) * channels + first;
      if (from != to) std::memcpy(to, from, size_t(last - first) * sizeof(float));
    }
  }
};

}  // namespace quire
