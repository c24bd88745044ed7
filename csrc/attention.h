// Causal paged attention of a ragged step. Knows the KV layout and block tables; knows no plan and no model.
//
// Positions are taken in tiles of 64 and segments of 1024, both aligned to absolute position 0. Softmax is online over
// the tiles of a segment (Milakov and Gimelshein 2018); segments are then merged in order (as in flash-decoding), always,
// so that a long sequence may be split over threads. Hence a row's bits depend on neither the batch, the chunk it came
// in, the block size nor the number of threads.
//
// A job is up to kJobRows query rows of one sequence and kv head; row i is token i / group, head i % group.
#pragma once

#include <type_traits>

#include "attention_tile.h"
#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr int kSegment = 1024;
constexpr int kJobRows = 112;
constexpr int kSplitJobs = 4;   // per thread: with fewer jobs than this, segments become tasks of their own
constexpr int kSplitTasks = 8;  // per thread: segments in flight then
constexpr double kSmallStep = 100e3;  // multiply-adds under which waking threads costs more than it saves

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Query rows after some segments.
struct Partial {
  RowState* rows;  // sum[0] alone counts once a segment is complete
  float* values;   // [kJobRows][padded]
};

struct AttentionSizes {
  size_t padded, tiles, scores, partial, thread, split;

  AttentionSizes(int head_dim, int value_dim, int threads)
      : padded(round_up(size_t(value_dim), kLanes)),
        tiles(kTile * (round_up(size_t(head_dim), kLanes) + padded)),  // one of keys and one of values, in floats
        scores(kJobRows * (kTile + 1)),  // and what each row keeps
        partial(round_up(kJobRows * (sizeof(RowState) + padded * 4), 64)),
        thread(2 * partial + round_up((tiles + scores + kJobRows * size_t(head_dim)) * 4, 64)),  // queries too
        split(size_t(threads) * (kSplitTasks + 2 * kSplitJobs) * partial) {}
};

inline size_t attention_workspace(const AttentionLimits& l) {
  const AttentionSizes sizes(l.head_dim, l.value_dim, l.threads);
  return round_up((size_t(l.max_seqs) + 1) * 4, 64) + size_t(l.threads) * sizes.thread + sizes.split;
}

struct AttentionJob {
  int seq, head;       // kv head
  int row, rows;       // first row and how many
  int start;           // position of the sequence's first query token
  int low, high;       // positions low..high-1 are seen by some row

  int first_segment() const { return low / kSegment; }
  int segments() const { return (high - 1) / kSegment + 1 - first_segment(); }
};

class Attention {
 public:
  Attention(const AttentionArgs& args, int threads)
      : a_(args), sizes_(args.kv.head_dim, args.kv.value_dim, threads), group_(args.num_heads / args.kv.num_kv_heads) {
    char* p = static_cast<char*>(args.workspace);
    jobs_before_ = reinterpret_cast<int32_t*>(p);
    p += round_up((size_t(args.num_seqs) + 1) * 4, 64);
    thread_memory_ = p;
    split_memory_ = p + size_t(threads) * sizes_.thread;
    jobs_before_[0] = 0;
    for (int b = 0; b < args.num_seqs; ++b) {
      const int rows = (args.cu_q[b + 1] - args.cu_q[b]) * group_;
      jobs_before_[b + 1] = jobs_before_[b] + (rows + kJobRows - 1) / kJobRows;
      work_ += double(rows) * args.kv_len[b] * args.kv.head_dim * 2 * args.kv.num_kv_heads;
    }
  }

  int jobs() const { return jobs_before_[a_.num_seqs] * a_.kv.num_kv_heads; }
  double work() const { return work_; }

  AttentionJob job(int index) const {
    AttentionJob j;
    const int G = a_.kv.num_kv_heads;
    int low = 0, high = a_.num_seqs;  // jobs_before_[low] G <= index < jobs_before_[high] G
    while (high - low > 1) (jobs_before_[(low + high) / 2] * G <= index ? low : high) = (low + high) / 2;
    j.seq = low;
    const int q_len = a_.cu_q[low + 1] - a_.cu_q[low], rows = q_len * group_;
    // One head after the other: its keys and values stay in L2. The last rows see most: begin with them.
    const int jobs = jobs_before_[low + 1] - jobs_before_[low], place = index - jobs_before_[low] * G;
    j.head = place / jobs;
    const int part = jobs - 1 - place % jobs;
    j.row = int(int64_t(rows) * part / jobs);
    j.rows = int(int64_t(rows) * (part + 1) / jobs) - j.row;
    j.start = a_.kv_len[low] - q_len;
    j.low = first_seen(j.start + j.row / group_);
    j.high = last_seen(j, j.start + (j.row + j.rows - 1) / group_) + 1;
    return j;
  }

  // All segments of a job, in order.
  void run(const AttentionJob& j, int thread) const {
    Partial whole = thread_partial(thread, 0), part = thread_partial(thread, 1);
    const float* q = load_queries(j, thread);
    for (int s = 0; s < j.segments(); ++s) {
      segment(j, q, j.first_segment() + s, s == 0 ? whole : part, thread);
      if (s > 0) merge(j, whole, part);
    }
    finish(j, whole);
  }

  // Segment number `s` of a job into slot `slot`.
  void run_segment(const AttentionJob& j, int s, int slot, int thread) const {
    segment(j, load_queries(j, thread), j.first_segment() + s, split_partial(slot), thread);
  }

  void merge_slots(const AttentionJob& j, int into, int from) const {
    merge(j, split_partial(into), split_partial(from));
  }
  void finish_slot(const AttentionJob& j, int slot) const { finish(j, split_partial(slot)); }

 private:
  // Positions from..to-1 of the tile that begins at `at`.
  struct TileRange {
    int at, from, to;

    bool touches(int vector) const {
      const int begin = at + vector * kLanes;
      return begin < to && from < begin + kLanes;
    }
  };

  int first_seen(int position) const {
    const int first = a_.window > 0 ? max_of(0, position - a_.window + 1) : 0;
    return a_.chunk > 0 ? max_of(first, position / a_.chunk * a_.chunk) : first;
  }
  int last_seen(const AttentionJob& j, int position) const { return min_of(position + a_.ahead, a_.kv_len[j.seq] - 1); }
  int position_of(const AttentionJob& j, int row) const { return j.start + (j.row + row) / group_; }
  int head_of(const AttentionJob& j, int row) const { return j.head * group_ + (j.row + row) % group_; }

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

  // Rows of q times scale, packed [H][rows] by tiles of rows.
  const float* load_queries(const AttentionJob& j, int thread) const {
    const size_t H = size_t(a_.kv.head_dim);
    float* const q = thread_tiles(thread) + sizes_.tiles + sizes_.scores;
    const RowTiles tiles(j.rows);
    for (int t = 0; t < tiles.count; ++t) {
      const int begin = tiles.begin(t), rows = tiles.begin(t + 1) - begin;
      for (int i = 0; i < rows; ++i) {
        const int token = a_.cu_q[j.seq] + (j.row + begin + i) / group_;
        const float* from = a_.q + size_t(token) * a_.q_stride + size_t(head_of(j, begin + i)) * H;
        float* to = q + size_t(begin) * H + i;
        for (size_t h = 0; h < H; ++h) to[h * size_t(rows)] = from[h] * a_.scale;
      }
    }
    return q;
  }

  void segment(const AttentionJob& j, const float* q, int index, Partial out, int thread) const {
    for (int i = 0; i < j.rows; ++i) {
      out.rows[i].best = -__builtin_inff();
      out.rows[i].slope = a_.slopes ? a_.slopes[head_of(j, i)] : 0.0f;
      out.rows[i].position = position_of(j, i);
      store(out.rows[i].sum, set1(0.0f));
    }
    std::memset(out.values, 0, size_t(j.rows) * sizes_.padded * 4);
    const KVView& kv = a_.kv;
    const bool whole_vectors = kv.block_size % kLanes == 0 && kv.head_dim % kLanes == 0 && !kv.shared_values;
    const int low = max_of(j.low, index * kSegment), high = min_of(j.high, (index + 1) * kSegment);
    for (int at = low / kTile * kTile; at < high; at += kTile) {
      const TileRange range{at, max_of(low, at), min_of(high, at + kTile)};
      // Many rows: widen small types once per tile instead of once per few rows.
      const bool few = whole_vectors && j.rows <= kDirectRows;
      if (kv.type == KVType::f32) attend_as<float>(j, q, range, whole_vectors, out, thread);
      else if (kv.type == KVType::bf16) attend_as<uint16_t>(j, q, range, few, out, thread);
      else attend_as<int8_t>(j, q, range, few, out, thread);
    }
    for (int i = 0; i < j.rows; ++i) out.rows[i].sum[0] = reduce_add(load(out.rows[i].sum));
  }

  template <class T>
  void attend(const AttentionJob& j, const float* q, int at, const TileKV<T>& kv, Partial out, int thread) const {
    int first[kJobRows], last[kJobRows];
    for (int i = 0; i < j.rows; ++i) {
      const int position = position_of(j, i);
      first[i] = max_of(first_seen(position) - at, 0);
      last[i] = min_of(last_seen(j, position) - at, kTile - 1);
    }
    float* scores = thread_tiles(thread) + sizes_.tiles;
    const TileShape shape{a_.kv.head_dim, int(sizes_.padded), at, a_.cap};
    attend_tile(shape, q, RowTiles(j.rows), kv, first, last, out.rows, scores, scores + kJobRows * kTile, out.values);
  }

  // The tile where it lies in the cache, or copied to floats first.
  template <class T>
  void attend_as(const AttentionJob& j, const float* q, TileRange range, bool in_place, Partial out, int thread) const {
    TileScales scales;
    if (std::is_same_v<T, int8_t>) load_scales(j, range, scales);
    const TileScales* used = std::is_same_v<T, int8_t> ? &scales : nullptr;
    if (in_place) attend(j, q, range.at, direct<T>(j, range, used), out, thread);
    else attend(j, q, range.at, copied<T>(j, range, thread_tiles(thread), used), out, thread);
  }

  void load_scales(const AttentionJob& j, TileRange range, TileScales& scales) const {
    std::memset(&scales, 0, sizeof(scales));
    const size_t skipped = a_.kv.tile_elements();
    for_runs(j, range, [&](int place, int block, int offset, int length) {
      const char* keys = a_.kv.key_tile(a_.layer, block, j.head) + skipped;
      const char* values = a_.kv.shared_values ? keys : a_.kv.value_tile(a_.layer, block, j.head) + skipped;
      std::memcpy(scales.keys + place, keys + size_t(offset) * 4, size_t(length) * 4);
      std::memcpy(scales.values + place, values + size_t(offset) * 4, size_t(length) * 4);
    });
  }

  template <class T>
  const T* key_at(int block, int head) const {
    return reinterpret_cast<const T*>(a_.kv.key_tile(a_.layer, block, head));
  }
  template <class T>
  const T* value_at(int block, int head, int offset) const {
    return reinterpret_cast<const T*>(a_.kv.value_tile(a_.layer, block, head)) + size_t(offset) * size_t(a_.kv.head_dim);
  }
  const int32_t* table(const AttentionJob& j) const {
    return a_.block_table + size_t(a_.slots[j.seq]) * a_.block_table_stride;
  }

  // Calls f(place in the tile, block, offset in it, length) for each run of the range that lies in one block.
  template <class F>
  void for_runs(const AttentionJob& j, TileRange range, F&& f) const {
    const int size = a_.kv.block_size;
    for (int p = range.from; p < range.to;) {
      const int offset = p % size, length = min_of(size - offset, range.to - p);
      f(p - range.at, table(j)[p / size], offset, length);
      p += length;
    }
  }

  // Pointers into the cache, where vectors of keys and of values are whole.
  template <class T>
  TileKV<T> direct(const AttentionJob& j, TileRange range, const TileScales* scales) const {
    const int size = a_.kv.block_size;
    TileKV<T> tile;
    tile.scales = scales;
    tile.key_stride = size_t(size), tile.value_stride = kLanes;
    for (int v = 0; v < kTileVectors; ++v) {
      const int p = range.at + v * kLanes;
      tile.keys[v] = range.touches(v) ? key_at<T>(table(j)[p / size], j.head) + p % size : nullptr;
    }
    for_runs(j, range, [&](int place, int block, int offset, int length) {
      const T* values = value_at<T>(block, j.head, offset);
      for (int i = 0; i < length; ++i) tile.values[place + i] = values + size_t(i) * size_t(a_.kv.head_dim);
    });
    return tile;
  }

  static float widen(float x) { return x; }
  static float widen(uint16_t x) { return bf16_to_float(x); }
  static float widen(int8_t x) { return float(x); }

  // Pointers to copies in float: keys [kTileVectors][H][16], values [padded / 16][kTile][16], so that what a loop over
  // one or two vectors reads is in one piece. Places outside the range stay as they were.
  template <class T>
  TileKV<float> copied(const AttentionJob& j, TileRange range, float* copies, const TileScales* scales) const {
    const size_t H = size_t(a_.kv.head_dim), size = size_t(a_.kv.block_size), padded = sizes_.padded;
    float *key_copy = copies, *value_copy = copies + (sizes_.tiles - kTile * padded);
    auto key_to = [&](size_t place) { return key_copy + place / kLanes * H * kLanes + place % kLanes; };
    for_runs(j, range, [&](int place, int block, int offset, int length) {
      const T* keys = key_at<T>(block, j.head) + offset;
      size_t i = 0;
      for (; place % kLanes == 0 && i + kLanes <= size_t(length); i += kLanes)
        for (size_t h = 0; h < H; ++h) store(key_to(size_t(place) + i) + h * kLanes, load_kv(keys + h * size + i));
      for (; i < size_t(length); ++i)
        for (size_t h = 0; h < H; ++h) key_to(size_t(place) + i)[h * kLanes] = widen(keys[h * size + i]);
      float* to = value_copy + size_t(place) * kLanes;
      if (a_.kv.shared_values) return transpose_values(key_to, size_t(place), size_t(length), to);
      const T* values = value_at<T>(block, j.head, offset);
      for (i = 0; i < size_t(length); ++i, to += kLanes, values += H) {
        size_t h = 0;
        for (; h + kLanes <= H; h += kLanes) store(to + h * kTile, load_kv(values + h));
        if (h == H) continue;
        store(to + h * kTile, set1(0));
        for (size_t k = h; k < H; ++k) to[h * kTile + k - h] = widen(values[k]);
      }
    });
    TileKV<float> tile;
    tile.scales = scales;
    tile.key_stride = kLanes, tile.value_stride = kTile * kLanes;
    for (int v = 0; v < kTileVectors; ++v)
      tile.keys[v] = range.touches(v) ? key_to(size_t(v) * kLanes) : nullptr;
    for (int i = 0; i < kTile; ++i) tile.values[i] = value_copy + i * kLanes;
    return tile;
  }

  // Values that are the first elements of the copied keys of positions from `place` on.
  template <class KeyTo>
  void transpose_values(KeyTo key_to, size_t place, size_t length, float* to) const {
    const size_t W = size_t(a_.kv.value_dim);
    for (size_t i = 0; i < length; ++i)
      for (size_t w = 0; w < sizes_.padded; ++w)
        to[w / kLanes * kTile * kLanes + i * kLanes + w % kLanes] = w < W ? key_to(place + i)[w * kLanes] : 0.0f;
  }

  void merge(const AttentionJob& j, Partial whole, Partial part) const {
    for (int i = 0; i < j.rows; ++i) {
      RowState &w = whole.rows[i], &p = part.rows[i];
      if (p.best == -__builtin_inff()) continue;  // the row sees nothing there
      const float best = max_of(w.best, p.best);
      const V keep = exp(set1(w.best - best)), add = exp(set1(p.best - best));
      w.best = best;
      store(w.sum, fma(load(p.sum), add, load(w.sum) * keep));
      float* out = whole.values + size_t(i) * sizes_.padded;
      const float* in = part.values + size_t(i) * sizes_.padded;
      for (size_t h = 0; h < sizes_.padded; h += kLanes) store(out + h, fma(load(in + h), add, load(out + h) * keep));
    }
  }

  void finish(const AttentionJob& j, Partial whole) const {
    const int W = a_.kv.value_dim;
    for (int i = 0; i < j.rows; ++i) {
      const int token = a_.cu_q[j.seq] + (j.row + i) / group_, head = head_of(j, i);
      float* out = a_.out + size_t(token) * a_.out_stride + size_t(head) * size_t(W);
      const float* in = whole.values + size_t(i) * sizes_.padded;
      V sum = set1(whole.rows[i].sum[0]), keep = set1(1.0f);
      if (a_.sinks) {
        const float best = max_of(whole.rows[i].best, a_.sinks[head]);
        keep = exp(set1(whole.rows[i].best - best));
        sum = fma(sum, keep, exp(set1(a_.sinks[head] - best)));
      }
      for (int w = 0; w < W; w += kLanes) store_first(out + w, load(in + w) * keep / sum, min_of(kLanes, W - w));
    }
  }

  const AttentionArgs& a_;
  AttentionSizes sizes_;
  int group_;
  double work_ = 0;
  int32_t* jobs_before_;  // [B + 1] jobs per kv head
  char* thread_memory_;
  char* split_memory_;
};

// Few jobs over long contexts: waves of segments side by side, merged in order after each wave.
inline void attention_split(const Attention& attention, int jobs, int segments, ThreadPool& pool) {
  const int wave = max_of(1, kSplitTasks * pool.threads() / jobs);
  auto slot = [&](int job, int s) { return s == 0 ? job : jobs + job * wave + s % wave; };
  for (int base = 0; base < segments; base += wave) {
    pool.parallel_for(jobs * wave, [&](int task, int thread) {
      const AttentionJob j = attention.job(task / wave);
      const int s = base + task % wave;
      if (s < j.segments()) attention.run_segment(j, s, slot(task / wave, s), thread);
    });
    pool.parallel_for(jobs, [&](int task, int) {
      const AttentionJob j = attention.job(task);
      for (int s = max_of(base, 1); s < min_of(base + wave, j.segments()); ++s)
        attention.merge_slots(j, slot(task, 0), slot(task, s));
      if (base + wave >= segments) attention.finish_slot(j, slot(task, 0));
    });
  }
}

inline void attention(const AttentionArgs& a, ThreadPool& pool) {
  const Attention attention(a, pool.threads());
  const int jobs = attention.jobs(), threads = pool.threads();
  if (threads == 1 || attention.work() < kSmallStep) {
    pool.parallel_for(1, [&](int, int thread) {
      for (int i = 0; i < jobs; ++i) attention.run(attention.job(i), thread);
    });
    return;
  }
  int segments = 1;
  if (jobs < kSplitJobs * threads)
    for (int i = 0; i < jobs; ++i) segments = max_of(segments, attention.job(i).segments());
  if (segments > 1) return attention_split(attention, jobs, segments, pool);
  pool.parallel_for(jobs, [&](int task, int thread) { attention.run(attention.job(task), thread); });
}

}  // namespace quire::QUIRE_ISA
