// Causal paged attention of a ragged step. Knows block tables; knows no plan and no model.
//
// Positions are processed in tiles of 64 and segments of 1024, both aligned to absolute position 0. Softmax is online
// over the tiles of a segment (Milakov and Gimelshein 2018); segments are then merged in order (as in flash-decoding),
// always, so that threads may share a long sequence. Hence a row's bits do not depend on the batch, its chunk, the
// block size or the number of threads.
//
// A job is a group of query rows and a kv head. Rows of sequences that begin with the same blocks read those together.
#pragma once

#include <type_traits>

#include "attention/attention_jobs.h"
#include "attention/attention_kv.h"
#include "attention/attention_tile.h"
#include "kernels/kernels.h"
#include "simd/simd.h"

namespace quire::QUIRE_ISA {

constexpr int kRowsAhead = 8;   // query rows to prefetch into L1 before packing
constexpr int kSplitTasks = 8;  // per thread: segments in flight if there are few jobs
constexpr double kSmallStep = 30e3;  // multiply-adds below which waking threads costs more than it saves

// The state of query rows after some segments.
struct Partial {
  RowState* rows;  // only sum[0] counts once a segment is complete
  float* values;   // [kJobRows][padded]
};

struct AttentionSizes {
  size_t padded, tiles, scores, queries, partial, thread, split;

  AttentionSizes(int head_dim, int value_dim, int threads)
      : padded(round_up(size_t(value_dim), kLanes)),
        tiles(LayerKV::copied_words(size_t(head_dim), padded)),
        scores(kJobRows * kTile + round_up(kJobRows, kLanes)),  // and the factor that keeps each row's past
        queries(kJobRows * size_t(max_of(head_dim, query_words<int8_t>(head_dim)))),
        partial(round_up(kJobRows * (sizeof(RowState) + padded * 4), 64)),
        thread(2 * partial + round_up((tiles + scores + 2 * queries) * 4, 64)),
        split(size_t(threads) * (kSplitTasks + 2 * kSplitJobs) * partial) {}
};

inline size_t attention_workspace(const AttentionLimits& l) {
  const AttentionSizes sizes(l.head_dim, l.value_dim, l.threads);
  return round_up(AttentionJobs::bytes(l), 64) + size_t(l.threads) * sizes.thread + sizes.split;
}

// `T` is the type of keys and values in the cache.
template <class T>
class Attention {
 public:
  Attention(const AttentionArgs& args, const AttentionLimits& limits)
      : a_(args),
        sizes_(args.kv.head_dim, args.kv.value_dim, limits.threads),
        kv_(args.kv, args.entries, args.pool),
        query_words_(query_words<T>(args.kv.head_dim)),
        jobs_(args, limits.threads, args.workspace),
        thread_memory_(static_cast<char*>(args.workspace) + round_up(AttentionJobs::bytes(limits), 64)),
        split_memory_(thread_memory_ + size_t(limits.threads) * sizes_.thread) {}

  const AttentionJobs& jobs() const { return jobs_; }
  double work() const { return jobs_.cost() * a_.kv.head_dim * 2 * jobs_.kv_heads(); }  // multiply-adds

  static int first_segment(const AttentionJob& j) { return j.low / kSegment; }
  static int segments(const AttentionJob& j) { return (j.high - 1) / kSegment + 1 - first_segment(j); }

  // All segments of a job, in order. Meanwhile prefetches the first keys of the next job.
  __attribute__((noinline)) void run(const AttentionJob& j, const AttentionJob& following, int thread) const {
    const Walk then = walk_of(following, jobs_.first_part(following).seq, following.low, following.high);
    Partial whole = thread_partial(thread, 0), part = thread_partial(thread, 1);
    load_queries(j, thread);
    for (int s = 0; s < segments(j); ++s) {
      segment(j, first_segment(j) + s, s == 0 ? whole : part, thread, s + 1 == segments(j) ? &then : nullptr);
      if (s > 0) merge(j, whole, part);
    }
    finish(j, whole);
  }

  // Computes segment `s` of a job into slot `slot`.
  void run_segment(const AttentionJob& j, int s, int slot, int thread) const {
    load_queries(j, thread);
    segment(j, first_segment(j) + s, split_partial(slot), thread, nullptr);
  }

  void merge_slots(const AttentionJob& j, int into, int from) const {
    merge(j, split_partial(into), split_partial(from));
  }
  void finish_slot(const AttentionJob& j, int slot) const { finish(j, split_partial(slot)); }

 private:
  Partial partial_at(char* p) const {
    return {reinterpret_cast<RowState*>(p), reinterpret_cast<float*>(p + kJobRows * sizeof(RowState))};
  }
  Partial thread_partial(int thread, int i) const {
    return partial_at(thread_memory_ + size_t(thread) * sizes_.thread + size_t(i) * sizes_.partial);
  }
  Partial split_partial(int slot) const { return partial_at(split_memory_ + size_t(slot) * sizes_.partial); }
  float* thread_tiles(int thread) const {
    return reinterpret_cast<float*>(thread_memory_ + size_t(thread) * sizes_.thread + 2 * sizes_.partial);
  }
  float* thread_scores(int thread) const { return thread_tiles(thread) + sizes_.tiles; }
  float* part_queries(int thread) const { return thread_scores(thread) + sizes_.scores; }
  float* joint_queries(int thread) const { return part_queries(thread) + sizes_.queries; }

  // Rows of q times scale: each part's own rows, and rows that several parts share.
  __attribute__((noinline)) void load_queries(const AttentionJob& j, int thread) const {
    using Tiles = RowTiles<Copied<T>>;  // only one tile if read in place
    const Tiles joint(j.rows);
    const size_t words = size_t(query_words_);
    for (int h = 0; h < j.heads; ++h)
      jobs_.for_parts(j, [&](const RowPart& p) {
        float *part = part_queries(thread) + size_t(h * j.rows + p.at) * words, *scratch = thread_tiles(thread);
        pack_queries(p, j.head + h, Tiles(p.rows), 0, part, scratch);
        if (j.members > 1)
          pack_queries(p, j.head + h, joint, p.at, joint_queries(thread) + size_t(h * j.rows) * words, scratch);
      });
  }

  // A part's rows as rows `at`.. of tiles, packed [words][rows] per tile. `scratch` has room for a tile.
  void pack_queries(const RowPart& p, int kv_head, const RowTiles<Copied<T>>& tiles, int at, float* packed,
                    float* scratch) const {
    const int H = a_.kv.head_dim, words = query_words_;
    const size_t stride = round_up(size_t(max_of(H, words)), kLanes);
    auto row = [&](int i) {
      const int token = jobs_.first_token(p.seq) + jobs_.token(p, i), head = jobs_.head(p, i, kv_head);
      return a_.q + size_t(token) * a_.q_stride + size_t(head) * size_t(H);
    };
    for (int t = 0, i = 0; t < tiles.count && i < p.rows; ++t) {
      const int begin = tiles.begin(t), end = tiles.begin(t + 1), first = at + i - begin;
      int count = 0;
      for (; i < p.rows && at + i < end; ++i, ++count) {
        const float* later = row(min_of(i + kRowsAhead, p.rows - 1));
        for (int h = 0; h < H; h += kLanes) __builtin_prefetch(later + h);
        TileLoops<T>::pack_query(row(i), H, a_.scale * a_.kv.key_scale(kv_head), scratch + size_t(count) * stride);
      }
      if (count > 0)
        transpose(scratch, stride, count, words, packed + begin * words + first, size_t(end - begin));
    }
  }

  void start(const AttentionJob& j, Partial out) const {
    for (int h = 0; h < j.heads; ++h)
      jobs_.for_parts(j, [&](const RowPart& p) {
        for (int i = 0; i < p.rows; ++i) {
          RowState& row = out.rows[h * j.rows + p.at + i];
          row.best = -__builtin_inff();
          row.slope = a_.slopes ? a_.slopes[jobs_.head(p, i, j.head + h)] : 0.0f;
          row.reach = a_.reach;
          row.bias = a_.bias ? a_.bias + size_t(jobs_.head(p, i, j.head + h)) * size_t(2 * a_.reach + 1) + a_.reach : nullptr;
          row.position = jobs_.position(p, i);
          const size_t token = size_t(jobs_.first_token(p.seq) + jobs_.token(p, i)), head = size_t(jobs_.head(p, i, j.head + h));
          row.added = a_.added ? a_.added + (token * size_t(a_.num_heads) + head) * a_.added_positions : nullptr;
          row.first = jobs_.first_seen(row.position);
          row.last = jobs_.last_seen(p.seq, row.position);
          store(row.sum, set1(0.0f));
        }
      });
    std::memset(out.values, 0, size_t(j.heads * j.rows) * sizes_.padded * 4);
  }

  // `count` rows of each head of the job, from row `at` on.
  HeadRows rows_of(const AttentionJob& j, Partial out, const float* queries, int at, int count) const {
    return {queries + size_t(at) * size_t(query_words_), out.rows + at, out.values + size_t(at) * sizes_.padded,
            count, j.rows};
  }

  // `then` is the thread's next work, or null.
  __attribute__((noinline)) void segment(const AttentionJob& j, int index, Partial out, int thread, const Walk* then) const {
    start(j, out);
    const int begin = index * kSegment, end = begin + kSegment;
    const int joint = j.members > 1 ? j.shared / kTile * kTile : 0;
    auto own_walk = [&](const RowPart& p) {
      const RowState* rows = out.rows + p.at;
      const int low = max_of(rows[0].first, joint), high = rows[p.rows - 1].last + 1;
      return walk_of(j, p.seq, max_of(low, begin), min_of(high, end));
    };
    if (joint > 0) {
      const Walk first = own_walk(jobs_.first_part(j));
      walk(walk_of(j, jobs_.first_part(j).seq, max_of(j.low, begin), min_of(joint, end)),
           rows_of(j, out, joint_queries(thread), 0, j.rows), thread, &first);
    }
    jobs_.for_parts(j, [&](const RowPart& p) {
      RowPart following = p;
      const bool more = jobs_.next_part(j, following);
      const Walk next = own_walk(following);
      walk(own_walk(p), rows_of(j, out, part_queries(thread), p.at, p.rows), thread, more ? &next : then);
    });
    for (int i = 0; i < j.heads * j.rows; ++i) out.rows[i].sum[0] = reduce_add(load(out.rows[i].sum));
  }

  // Adds the visible positions of a walk to rows. `then` is the thread's next work, or null.
  void walk(const Walk& w, const HeadRows& rows, int thread, const Walk* then) const {
    if (w.low >= w.high) return;
    if (then && then->low >= then->high) then = nullptr;
    // Many rows: convert two-byte elements (widen, or pair) once per tile instead of once per few rows.
    const bool few = rows.count <= kDirectRows || !std::is_same_v<T, uint16_t>;
    walk_as(w, rows, few && !w.view && kv_.whole_vectors(), thread, then);
  }

  Walk walk_of(const AttentionJob& j, int seq, int low, int high) const {
    const QueryView* view = a_.views ? a_.views + seq : nullptr;
    const int slot = view ? view->slot : a_.slots[seq];
    return {a_.block_table + size_t(slot) * a_.block_table_stride, view, j.head, j.heads, low, high};
  }

  // Reads tiles in place, all heads of a tile before the next, because their blocks are neighbours; or copies them
  // first, head by head.
  void walk_as(const Walk& w, const HeadRows& rows, bool in_place, int thread, const Walk* then) const {
    if (!in_place) return walk_copies(w, rows, thread, then);
    TileKV<T> own = kv_.direct<T>(w, w.range(0)), next;
    for (int tile = 0; tile < w.tiles(); ++tile, own = next) {
      next = after_tile(w, tile, then);
      own.after_keys = ahead(own.values, own.values, kValueStep<T> * sizeof(T));
      own.after_values = ahead(next.keys, own.values, next.key_stride * sizeof(T));
      own.next = &next;
      attend(rows, w.range(tile).at, own, thread);
    }
  }

  // The tile after a tile of a walk; the tile itself if the next is unknown.
  TileKV<T> after_tile(const Walk& w, int tile, const Walk* then) const {
    if (tile + 1 < w.tiles()) return kv_.direct<T>(w, w.range(tile + 1));
    return then ? kv_.direct<T>(*then, then->range(0)) : kv_.direct<T>(w, w.range(tile));
  }

  void walk_copies(const Walk& w, const HeadRows& rows, int thread, const Walk* then) const {
    TileScales scales;
    for (int tile = 0; tile < w.tiles(); ++tile)
      for (int head = 0; head < w.heads; ++head) {
        const TileRange range = w.range(tile);
        const size_t at = size_t(rows.at(head, 0));
        const HeadRows own{rows.q + at * size_t(query_words_), rows.states + at, rows.values + at * sizes_.padded,
                           rows.count, 0};
        auto copies = kv_.copied<T>(w, w.head + head, range, thread_tiles(thread));
        // While one head is processed, prefetch the next head, or the next tile.
        const Walk other{w.table, w.view, w.head + head + 1, 1, w.low, w.high};
        const TileKV<T> next = head + 1 < w.heads ? kv_.direct<T>(other, range) : after_tile(w, tile, then);
        copies.after_keys = ahead(next.keys, copies.keys, next.key_stride * sizeof(T));
        copies.after_values = ahead(next.values, copies.values, kValueStep<T> * sizeof(T));
        if constexpr (std::is_same_v<T, int8_t>) {
          kv_.load_scales(w, w.head + head, range, scales);
          for (int v = 0; v < kTileVectors; ++v)
            copies.key_scales[v] = scales.keys + v * kLanes, copies.value_scales[v] = scales.values + v * kLanes;
        }
        attend(own, range.at, copies, thread);
      }
  }

  // `next` if it is visible, else data that is in L1 already.
  template <class U>
  static Ahead ahead(const T* const (&next)[kTileVectors], const U* const (&own)[kTileVectors], size_t stride) {
    Ahead result;
    for (int v = 0; v < kTileVectors; ++v) result.at[v] = next[v] ? bytes(next[v]) : bytes(own[v]);
    result.stride = stride;
    return result;
  }

  // `U` is T, or the type of its copy.
  template <class U>
  void attend(const HeadRows& rows, int at, const TileKV<U>& kv, int thread) const {
    const RowTiles<U> split(rows.count);
    RowTile tiles[(kJobRows + Steps<U>::kMicroRows - 1) / Steps<U>::kMicroRows];
    int first[kJobRows], last[kJobRows];
    for (int t = 0; t < split.count; ++t) {
      RowTile tile{split.begin(t), split.begin(t + 1) - split.begin(t), kTile, -1};
      for (int i = tile.begin; i < tile.begin + tile.rows; ++i) {
        first[i] = max_of(rows.states[i].first - at, 0);
        last[i] = min_of(rows.states[i].last - at, kTile - 1);
        if (first[i] <= last[i]) tile.low = min_of(tile.low, first[i]), tile.high = max_of(tile.high, last[i]);
      }
      tiles[t] = tile;
    }
    const TileShape shape{a_.kv.head_dim, int(sizes_.padded), at, a_.cap};
    attend_tile(shape, rows, kv, tiles, split.count, first, last, thread_scores(thread));
  }

  __attribute__((noinline)) void merge(const AttentionJob& j, Partial whole, Partial part) const {
    for (int i = 0; i < j.heads * j.rows; ++i) {
      RowState &w = whole.rows[i], &p = part.rows[i];
      if (p.best == -__builtin_inff()) continue;  // the row sees nothing in this segment
      const float best = max_of(w.best, p.best);
      const V keep = exp(set1(w.best - best)), add = exp(set1(p.best - best));
      w.best = best;
      store(w.sum, fma(load(p.sum), add, load(w.sum) * keep));
      float* out = whole.values + size_t(i) * sizes_.padded;
      const float* in = part.values + size_t(i) * sizes_.padded;
      for (size_t h = 0; h < sizes_.padded; h += kLanes) store(out + h, fma(load(in + h), add, load(out + h) * keep));
    }
  }

  __attribute__((noinline)) void finish(const AttentionJob& j, Partial whole) const {
    for (int h = 0; h < j.heads; ++h)
      jobs_.for_parts(j, [&](const RowPart& p) {
        for (int i = 0; i < p.rows; ++i) finish_row(p, i, j.head + h, whole, h * j.rows + p.at + i);
      });
  }

  // Writes row `at` of a job, which is row i of a part, to the output.
  void finish_row(const RowPart& p, int i, int kv_head, Partial whole, int at) const {
    const int W = a_.kv.value_dim, token = jobs_.first_token(p.seq) + jobs_.token(p, i), head = jobs_.head(p, i, kv_head);
    const RowState& row = whole.rows[at];
    float* out = a_.out + size_t(token) * a_.out_stride + size_t(head) * size_t(W);
    const float* in = whole.values + size_t(at) * sizes_.padded;
    V sum = set1(row.sum[0]), keep = set1(1.0f);
    if (a_.sinks) {
      const float best = max_of(row.best, a_.sinks[head]);
      keep = exp(set1(row.best - best));
      sum = fma(sum, keep, exp(set1(a_.sinks[head] - best)));
    }
    const V share = keep / sum * set1(a_.kv.value_scale(kv_head));
    for (int w = 0; w < W; w += kLanes) store_first(out + w, load(in + w) * share, min_of(kLanes, W - w));
  }

  const AttentionArgs& a_;
  AttentionSizes sizes_;
  LayerKV kv_;
  int query_words_;  // of a packed query row
  AttentionJobs jobs_;
  char* thread_memory_;
  char* split_memory_;
};

// For few jobs over long contexts: waves of parallel segments, merged in order after each wave.
template <class T>
inline void attention_split(const Attention<T>& attention, int jobs, int segments, ThreadPool& pool) {
  const int wave = max_of(1, kSplitTasks * pool.threads() / jobs);
  auto slot = [&](int job, int s) { return s == 0 ? job : jobs + job * wave + s % wave; };
  for (int base = 0; base < segments; base += wave) {
    pool.parallel_for(jobs * wave, [&](int task, int thread) {
      const AttentionJob j = attention.jobs()[task / wave];
      const int s = base + task % wave;
      if (s < Attention<T>::segments(j)) attention.run_segment(j, s, slot(task / wave, s), thread);
    });
    pool.parallel_for(jobs, [&](int task, int) {
      const AttentionJob j = attention.jobs()[task];
      for (int s = max_of(base, 1); s < min_of(base + wave, Attention<T>::segments(j)); ++s)
        attention.merge_slots(j, slot(task, 0), slot(task, s));
      if (base + wave >= segments) attention.finish_slot(j, slot(task, 0));
    });
  }
}

template <class T>
void attention(const AttentionArgs& a, ThreadPool& pool) {
  const AttentionLimits limits{a.num_tokens > 0 ? a.num_tokens : a.cu_q[a.num_seqs], a.num_seqs, a.num_heads, a.kv.num_kv_heads, a.kv.head_dim,
                               a.kv.value_dim, pool.threads()};
  const Attention<T> attention(a, limits);
  const int jobs = attention.jobs().count(), threads = pool.threads();
  auto run = [&](int job, int thread) {
    attention.run(attention.jobs()[job], attention.jobs()[min_of(job + 1, jobs - 1)], thread);
  };
  if (threads == 1 || attention.work() < kSmallStep) {
    pool.parallel_for(1, [&](int, int thread) {
      for (int job = 0; job < jobs; ++job) run(job, thread);
    });
    return;
  }
  int segments = 1;
  if (jobs < kSplitJobs * threads)
    for (int i = 0; i < jobs; ++i) segments = max_of(segments, Attention<T>::segments(attention.jobs()[i]));
  if (segments > 1) return attention_split(attention, jobs, segments, pool);
  pool.parallel_shares(jobs, run);  // so that the next job is usually the thread's own
}

}  // namespace quire::QUIRE_ISA
