// Groups the query rows of a step into jobs for threads. Knows which blocks sequences share; knows no cache and no
// thread.
#pragma once

#include "attention/attention_tile.h"
#include "kernels/kernels.h"

namespace quire::QUIRE_ISA {

constexpr int kJobRows = 224;
constexpr int kSegment = 1024;  // positions
constexpr int kSplitJobs = 4;  // per thread: with fewer jobs than this, threads share segments instead

// Up to kJobRows query rows of a kv head: some of one sequence, or all of several sequences with the same first blocks.
// Row i of a sequence belongs to its token i / (heads per kv head).
struct RowGroup {
  int first, members;   // places in AttentionArgs::order
  int row, rows;        // the first row, if there is one member; the number of all rows
  int shared;           // positions before this are in the same blocks for all members
  int low = 0, high = 0;  // positions low..high-1 are seen by some row
  int begin = 0, count = 0;  // the groups of the same sequences: begin..begin+count-1
  int heads = 0;        // kv heads of a job; together with the rows of one head up to kJobRows rows
  int first_job = 0;    // of the groups of the same sequences
};

// The rows of a group for kv heads head..head+heads-1, head by head.
struct AttentionJob : RowGroup {
  int head;
};

// Consecutive rows of the sequence at `place`; the group has `at` rows before them.
struct RowPart {
  int place, seq, row, rows, at;
};

class AttentionJobs {
 public:
  static size_t bytes(const AttentionLimits& l) {
    const size_t rows = size_t(l.max_tokens) * size_t(l.num_heads / l.num_kv_heads);
    return (size_t(l.max_seqs) + rows / kJobRows + 1) * sizeof(RowGroup);
  }

  // Groups are stored in `memory`, of bytes(). A job combines sequences that share blocks, and heads, whose blocks are
  // neighbours, but not so many that threads run out of jobs, or of segments if there are few jobs.
  AttentionJobs(const AttentionArgs& args, int threads, void* memory)
      : a_(args), groups_(static_cast<RowGroup*>(memory)), per_head_(args.num_heads / args.kv.num_kv_heads) {
    for (int i = 0; i < a_.num_seqs; ++i) cost_ += double(rows_at(i)) * positions_at(i);
    const double most = cost_ * kv_heads() / (kSplitJobs * threads);
    const int whole = a_.num_seqs < kSplitJobs * threads ? kSegment : INT32_MAX;  // positions of a thread's task
    auto most_rows = [&](int positions) { return int(min_of(most / min_of(positions, whole), double(kJobRows))); };
    for (int i = 0; i < a_.num_seqs;) {
      RowGroup g{i, 1, 0, rows_at(i), length_of(seq_at(i))};
      int positions = positions_at(i);
      for (int next = i + 1; next < a_.num_seqs && begins_alike(next); ++next) {
        const int further = max_of(positions, positions_at(next)), rows = g.rows + rows_at(next);
        if (rows > most_rows(further)) break;
        positions = further, g.rows = rows, ++g.members;
        g.shared = min_of(g.shared, a_.shared[next]);
      }
      const int heads = max_of(1, min_of(most_rows(positions) / g.rows, kv_heads())), parts = parts_of(heads);
      g.heads = (kv_heads() + parts - 1) / parts;
      add(g);
      i += g.members;
    }
  }

  int count() const { return jobs_; }
  // The kv heads that each sequence's rows meet.
  int kv_heads() const { return a_.by_head ? 1 : a_.kv.num_kv_heads; }
  int first_token(int seq) const { return a_.views ? a_.views[seq].token : a_.cu_q[seq]; }

  // All groups of the same sequences before the next heads: a head's keys and values stay in L2.
  AttentionJob operator[](int index) const {
    int low = 0, high = groups_count_;  // groups_[low].first_job <= index < groups_[high].first_job
    while (high - low > 1) (groups_[(low + high) / 2].first_job <= index ? low : high) = (low + high) / 2;
    const RowGroup& any = groups_[low];
    const int place = index - any.first_job, head = place / any.count * any.heads;
    AttentionJob job{groups_[any.begin + place % any.count], head};
    job.heads = min_of(job.heads, kv_heads() - head);
    if (a_.by_head) job.head = a_.views[seq_at(job.first)].kv_head;
    return job;
  }

  // Approximate number of positions that the rows of one head process.
  double cost() const { return cost_; }

  // Calls f(part) for each sequence of a group.
  template <class F>
  void for_parts(const RowGroup& g, F&& f) const {
    RowPart part = first_part(g);
    f(part);
    while (next_part(g, part)) f(part);
  }

  RowPart first_part(const RowGroup& g) const {
    return {g.first, seq_at(g.first), g.row, g.members == 1 ? g.rows : rows_at(g.first), 0};
  }
  // Advances `part`; false if it was the last.
  bool next_part(const RowGroup& g, RowPart& part) const {
    const int place = part.place + 1;
    if (place == g.first + g.members) return false;
    part = {place, seq_at(place), g.row, rows_at(place), part.at + part.rows};
    return true;
  }

  int token(const RowPart& p, int row) const { return (p.row + row) / per_head_; }  // among the sequence's in the step
  int head(const RowPart& p, int row, int kv_head) const { return kv_head * per_head_ + (p.row + row) % per_head_; }
  int position(const RowPart& p, int row) const { return length_of(p.seq) - tokens_of(p.seq) + token(p, row); }
  int first_seen(int position) const {
    const int first = a_.window > 0 ? max_of(0, position - a_.window + 1) : 0;
    return a_.chunk > 0 ? max_of(first, position / a_.chunk * a_.chunk) : first;
  }
  int last_seen(int seq, int position) const { return min_of(position + a_.ahead, length_of(seq) - 1); }

 private:
  int parts_of(int heads) const { return (kv_heads() + heads - 1) / heads; }
  int seq_at(int place) const { return a_.order ? a_.order[place] : place; }
  int tokens_of(int seq) const { return a_.views ? 1 : a_.cu_q[seq + 1] - a_.cu_q[seq]; }
  int length_of(int seq) const { return a_.views ? a_.views[seq].length : a_.kv_len[seq]; }
  int rows_at(int place) const { return tokens_of(seq_at(place)) * per_head_; }

  // All positions that the sequence at `place` sees.
  int positions_at(int place) const {
    const int seq = seq_at(place), length = length_of(seq);
    return length - first_seen(length - tokens_of(seq));
  }

  // Whether the sequence at `place` should join the one before: not if either shares more than twice as much with
  // another.
  bool begins_alike(int place) const {
    if (!a_.shared) return false;
    const int after = place + 1 < a_.num_seqs ? a_.shared[place + 1] : 0;
    return a_.shared[place] >= kTile && 2 * a_.shared[place] >= max_of(a_.shared[place - 1], after);
  }

  // Makes a group, or splits one sequence with many rows into equal groups. The last rows see most, so they come first.
  void add(RowGroup g) {
    const int rows = g.rows;
    g.begin = groups_count_, g.first_job = jobs_;
    g.count = (rows + kJobRows - 1) / kJobRows;
    jobs_ += g.count * parts_of(g.heads);
    for (int part = g.count - 1; part >= 0; --part) {
      g.row = int(int64_t(rows) * part / g.count);
      g.rows = int(int64_t(rows) * (part + 1) / g.count) - g.row;
      g.low = INT32_MAX, g.high = 0;
      for_parts(g, [&](const RowPart& p) {
        g.low = min_of(g.low, first_seen(position(p, 0)));
        g.high = max_of(g.high, last_seen(p.seq, position(p, p.rows - 1)) + 1);
      });
      groups_[groups_count_++] = g;
    }
  }

  const AttentionArgs& a_;
  RowGroup* groups_;
  double cost_ = 0;
  int per_head_, groups_count_ = 0, jobs_ = 0;
};

}  // namespace quire::QUIRE_ISA
