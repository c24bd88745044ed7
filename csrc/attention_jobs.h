// Who attends together: the query rows of a step in groups, each of which is one job for every kv head. Knows block
// tables by what they share; knows no cache and no thread.
#pragma once

#include "attention_tile.h"
#include "kernels.h"

namespace quire::QUIRE_ISA {

constexpr int kJobRows = 112;
constexpr int kSplitJobs = 4;  // per thread: with fewer jobs than this, threads would wait for each other

// Up to kJobRows query rows: some of one sequence, or all of several that begin with the same blocks. Row i of a
// sequence is its token i / (heads per kv head).
struct RowGroup {
  int first, members;  // places in AttentionArgs::order
  int row, rows;       // the first row of an only member, and how many in all
  int shared;          // positions before this lie in the same blocks for all of several members
  int low, high;       // positions low..high-1 are seen by some row
  int begin, count;    // the groups of the same sequences: begin..begin+count-1
};

// Consecutive rows of one sequence; `at` rows of the group are before them.
struct RowPart {
  int seq, row, rows, at;
};

class RowGroups {
 public:
  static size_t bytes(const AttentionLimits& l) {
    const size_t rows = size_t(l.max_tokens) * size_t(l.num_heads / l.num_kv_heads);
    return (size_t(l.max_seqs) + rows / kJobRows + 1) * sizeof(RowGroup);
  }

  // Groups are kept in `memory`, of bytes(). A job's rows grow with what sequences share, but not so far that threads
  // go without jobs.
  RowGroups(const AttentionArgs& args, int threads, void* memory)
      : a_(args), groups_(static_cast<RowGroup*>(memory)), per_head_(args.num_heads / args.kv.num_kv_heads) {
    const int64_t rows = int64_t(a_.cu_q[a_.num_seqs]) * per_head_;
    const int most = int(min_of<int64_t>(kJobRows, rows * a_.kv.num_kv_heads / (kSplitJobs * threads)));
    for (int i = 0; i < a_.num_seqs;) {
      RowGroup g{i, 1, 0, rows_at(i), a_.kv_len[a_.order[i]], 0, 0, count_, 1};
      while (joins(i + g.members, g.rows, most)) {
        g.shared = min_of(g.shared, a_.shared[i + g.members]);
        g.rows += rows_at(i + g.members++);
      }
      add(g);
      i += g.members;
    }
  }

  int count() const { return count_; }
  const RowGroup& operator[](int i) const { return groups_[i]; }

  // Calls f(part) for each sequence of a group.
  template <class F>
  void for_parts(const RowGroup& g, F&& f) const {
    for (int m = 0, at = 0; m < g.members; ++m) {
      const int rows = g.members == 1 ? g.rows : rows_at(g.first + m);
      f(RowPart{a_.order[g.first + m], g.row, rows, at});
      at += rows;
    }
  }

  int token(const RowPart& p, int row) const { return (p.row + row) / per_head_; }  // of the step's of the sequence
  int head(const RowPart& p, int row, int kv_head) const { return kv_head * per_head_ + (p.row + row) % per_head_; }
  int position(const RowPart& p, int row) const { return a_.kv_len[p.seq] - tokens_of(p.seq) + token(p, row); }
  int first_seen(int position) const {
    const int first = a_.window > 0 ? max_of(0, position - a_.window + 1) : 0;
    return a_.chunk > 0 ? max_of(first, position / a_.chunk * a_.chunk) : first;
  }
  int last_seen(int seq, int position) const { return min_of(position + a_.ahead, a_.kv_len[seq] - 1); }

 private:
  int tokens_of(int seq) const { return a_.cu_q[seq + 1] - a_.cu_q[seq]; }
  int rows_at(int place) const { return tokens_of(a_.order[place]) * per_head_; }

  // Whether the sequence at `place` joins those before it: not if either shares more than twice as much with another.
  bool joins(int place, int rows, int most) const {
    if (place >= a_.num_seqs || rows + rows_at(place) > most || a_.shared[place] < kTile) return false;
    const int after = place + 1 < a_.num_seqs ? a_.shared[place + 1] : 0;
    return 2 * a_.shared[place] >= max_of(a_.shared[place - 1], after);
  }

  // A group, or that of one sequence with many rows in equal groups. The last rows see most: they come first.
  void add(RowGroup g) {
    const int rows = g.rows, begin = count_;
    g.count = (rows + kJobRows - 1) / kJobRows;
    for (int part = g.count - 1; part >= 0; --part) {
      g.begin = begin;
      g.row = int(int64_t(rows) * part / g.count);
      g.rows = int(int64_t(rows) * (part + 1) / g.count) - g.row;
      g.low = INT32_MAX, g.high = 0;
      for_parts(g, [&](const RowPart& p) {
        g.low = min_of(g.low, first_seen(position(p, 0)));
        g.high = max_of(g.high, last_seen(p.seq, position(p, p.rows - 1)) + 1);
      });
      groups_[count_++] = g;
    }
  }

  const AttentionArgs& a_;
  RowGroup* groups_;
  int per_head_, count_ = 0;
};

}  // namespace quire::QUIRE_ISA
