// Ops on rows: embedding, norms, rotary angles, the step that norms, rotates and stores keys and values, and the largest
// logit.
// Knows the weight packing and the KV layout; knows no plan.
#include "kernels/parts.h"
#include "linear/argmax.h"
#include "linear/blocks/columns.h"
#include "linear/layouts.h"
#include "rowwise/activation.h"
#include "rowwise/norm.h"
#include "rowwise/store_keys.h"
#include "sample/sampler_kernels.h"
#include "simd/simd.h"
#include "simd/simd_int.h"
#include "simd/simd_narrow.h"

namespace quire::QUIRE_ISA {

// With fewer elements than this, a fork and join costs more than it saves.
constexpr int kElementsPerTask = 16384;

// Calls f(first, last, thread) over even ranges of rows, the same number for every thread if there are several.
template <class F>
inline void for_row_ranges(ThreadPool& pool, int rows, int width, F&& f) {
  const int threads = pool.threads(), wanted = int(int64_t(rows) * width / kElementsPerTask);
  const int tasks = wanted == 0 ? 1 : min_of(rows, (wanted + threads - 1) / threads * threads);
  pool.parallel_for(tasks, [&](int task, int thread) {
    f(int(int64_t(rows) * task / tasks), int(int64_t(rows) * (task + 1) / tasks), thread);
  });
}

void norm(const NormArgs& a, ThreadPool& pool) {
  for_row_ranges(pool, a.rows, a.width, [&](int first, int last, int) {
    const int width = a.width / a.groups;
    for (int r = first; r < last; ++r) {
      Norm own = a.row_norms ? a.row_norms[r] : a.norm;
      for (int begin = 0; begin < a.width; begin += width) {
        norm_row(a.x + size_t(r) * a.x_stride + begin, width, own, a.y + size_t(r) * a.y_stride + begin);
        own.weight += width;
        if (own.bias) own.bias += width;
      }
    }
  });
}

void embed(const EmbedArgs& a, ThreadPool& pool) {
  const MatrixView& w = a.table;
  for_row_ranges(pool, a.num_tokens, w.cols * 4, [&](int first, int last, int) {
    for (int t = first; t < last; ++t) {
      const int row = a.tokens[t];
      float* y = a.y + size_t(t) * a.y_stride;
      auto put = [&](int k, float value) { y[k] = value * a.scale; };
      if (w.format.layout == Layout::blocks) read_block_row(w, row / 16, row % 16, put);
      else read_lane(w, row / 16, row % 16, put);
    }
  });
}

void rope(const RopeArgs& a, ThreadPool& pool) {
  for_row_ranges(pool, a.num_tokens, a.half * 64, [&](int first, int last, int) {
    for (int t = first; t < last; ++t) {
      angles_of(float(a.positions[t]), a.inv_freq, a.half, a.scale, a.angles + size_t(t) * a.stride);
    }
  });
}

// Norm of heads; `to` may be `from`.
inline void norm_heads(const float* from, float* to, int heads, int head_dim, const HeadNorm& norm) {
  if (norm.over == HeadNorm::Over::all_heads)
    norm_row(from, heads * head_dim, norm, to);
  else
    for (int n = 0; n < heads; ++n) {
      Norm one = norm;
      if (norm.over == HeadNorm::Over::own_head) {
        one.weight += n * head_dim;
        if (one.bias) one.bias += n * head_dim;
      }
      norm_row(from + n * head_dim, head_dim, one, to + n * head_dim);
    }
}

// Norms and rotates `heads` heads, in the norm's order, into `to`.
inline void prepare_heads(const float* from, float* to, int heads, int head_dim, const HeadNorm& norm,
                          const float* angles, int rotary_dim) {
  const bool normed = norm.weight != nullptr;
  if (normed && !norm.after_rope) norm_heads(from, to, heads, head_dim, norm);
  else std::memcpy(to, from, size_t(heads) * size_t(head_dim) * 4);
  for (int n = 0; angles && n < heads; ++n) rotate(to + n * head_dim, angles, rotary_dim);
  if (normed && norm.after_rope) norm_heads(to, to, heads, head_dim, norm);
}

// Stores a value in int8, beside the three other positions that share its words; `q` has room for it.
inline void store_int8_value(const float* v, const KVView& kv, char* tile, int offset, int8_t* q) {
  const int H = kv.head_dim, place = offset % 4;
  round_head(v, tile, kv, offset, q);
  char* to = tile + size_t(offset / 4) * size_t(H) * 4;
  int h = 0;
  for (; h + kLanes <= H; h += kLanes, to += kLanes * 4) store_every_fourth(to, place, q + h);
  for (; h < H; ++h, to += 4) to[place] = q[h];
}

inline void store_value(const float* v, const KVView& kv, int head, int block, int offset, float* scratch) {
  char* tile = kv.value_tile(block, head);
  const size_t H = size_t(kv.head_dim), first = size_t(offset) * H;
  if (kv.type == KVType::i8) {
    store_int8_value(v, kv, tile, offset, reinterpret_cast<int8_t*>(scratch));
  } else if (kv.widens()) {
    with_narrow(kv.type, tile, [&](auto* elements) QUIRE_INLINE_LAMBDA {
      const float scale = kv.value_scale(head);
      for (size_t h = 0; h < H; ++h) narrowed(v[h] / scale, elements + first + h);
    });
  } else if (kv.type == KVType::bf16) {
    uint16_t* to = reinterpret_cast<uint16_t*>(tile) + first;
    size_t h = 0;
    for (; h + 16 <= H; h += 16) store_bf16(to + h, load(v + h));
    for (; h < H; ++h) to[h] = float_to_bf16(v[h]);
  } else {
    std::memcpy(reinterpret_cast<float*>(tile) + first, v, H * 4);
  }
}

// The number of tokens from `t` on, up to 16, that are adjacent in one block.
inline void store_kv_run(const StoreKVArgs& a, int t, int count, float* scratch) {
  const KVView& kv = a.kv;
  const int H = kv.head_dim, G = kv.num_kv_heads, N = a.num_heads;
  const size_t key_stride = size_t(G) * size_t(H);
  float* rounded = scratch + size_t(kLanes) * key_stride;
  for (int i = t; i < t + count; ++i) {
    const float* row = a.qkv + size_t(i) * a.qkv_stride;
    const float* angles = a.angles ? a.angles + size_t(i) * a.angles_stride : nullptr;
    prepare_heads(row, a.q + size_t(i) * a.q_stride, N, H, a.q_norm, angles, a.rotary_dim);
    prepare_heads(row + N * H, scratch + size_t(i - t) * key_stride, G, H, a.k_norm, angles, a.rotary_dim);
    const float* values = row + (N + G) * H;
    if (a.v_norm.weight != nullptr) {
      float* normed = rounded + kLanes * H;
      norm_heads(values, normed, G, H, a.v_norm);
      values = normed;
    }
    for (int g = 0; g < G; ++g) store_value(values + g * H, kv, g, a.block[i], a.offset[i], rounded);
  }
  for (int g = 0; g < G; ++g)
    store_keys(scratch + g * H, key_stride, count, kv, g, a.block[t], a.offset[t], rounded);
}

// A task stores the runs that begin in its range, so that no two tasks write the keys of one run.
void store_kv(const StoreKVArgs& a, ThreadPool& pool) {
  const int width = (a.num_heads + 2 * a.kv.num_kv_heads) * a.kv.head_dim;
  auto begins = [&](int t) {
    return t == 0 || t == a.num_tokens || a.offset[t] % kLanes == 0 || a.block[t] != a.block[t - 1] ||
           a.offset[t] != a.offset[t - 1] + 1;
  };
  for_row_ranges(pool, a.num_tokens, width, [&](int first, int last, int thread) {
    for (int t = first; t < last; ++t) {
      if (!begins(t)) continue;
      int count = 1;
      while (!begins(t + count)) ++count;
      store_kv_run(a, t, count, static_cast<float*>(pool.scratch(thread)));
    }
  });
}

void store_latent(const StoreLatentArgs& a, ThreadPool& pool) {
  const int C = a.kv_view.value_dim, R = a.rotary_dim, H = C + R, N = a.num_heads;
  for_row_ranges(pool, a.num_tokens, (N + 1) * H, [&](int first, int last, int thread) {
    float* key = static_cast<float*>(pool.scratch(thread));
    for (int t = first; t < last; ++t) {
      const float* angles = a.angles + size_t(t) * size_t(R);
      if (a.kv) {
        const float* kv = a.kv + size_t(t) * size_t(H);
        norm_row(kv, C, a.norm, key);
        std::memcpy(key + C, kv + C, size_t(R) * 4);
        rotate(key + C, angles, R);
        store_keys(key, 0, 1, a.kv_view, 0, a.block[t], a.offset[t], key + H);
      }
      for (int n = 0; n < N; ++n) {
        float* q = a.q + (size_t(t) * size_t(N) + size_t(n)) * size_t(H);
        std::memcpy(q, a.q_latent + (size_t(t) * size_t(N) + size_t(n)) * size_t(C), size_t(C) * 4);
        std::memcpy(q + C, a.q_rope + (size_t(t) * size_t(N) + size_t(n)) * size_t(R), size_t(R) * 4);
        rotate(q + C, angles, R);
      }
    }
  });
}

// Calls f(first element, lanes) over 16-wide strides of all rows.
template <class F>
inline void for_strides(ThreadPool& pool, size_t rows, size_t width, F&& f) {
  for_row_ranges(pool, int(rows), int(width), [&](int first, int last, int) {
    const size_t end = size_t(last) * width;
    for (size_t i = size_t(first) * width; i < end; i += 16) f(i, int(min_of(size_t{16}, end - i)));
  });
}

void add(const AddArgs& a, ThreadPool& pool) {
  const V scale = set1(a.scale);
  for_strides(pool, a.rows, a.width, [&](size_t i, int n) {
    store_first(a.y + i, fma(scale, load_first(a.other + i, n), load_first(a.x + i, n)), n);
  });
}

void scale(const ScaleArgs& a, ThreadPool& pool) {
  const V factor = set1(a.scale), cap = set1(a.cap);
  for_strides(pool, a.rows, a.width, [&](size_t i, int n) {
    V v = load_first(a.x + i, n) * factor;
    if (a.cap > 0) v = cap * tanh(v / cap);
    store_first(a.y + i, v, n);
  });
}

void note_maxima(const LinearArgs& a, int first, int last, int begin, int end) {
  const size_t blocks = maxima_of(a.weight.rows);
  for (int r = first; r < last; ++r)
    for (int column = begin; column < end; column += kMaximaColumns) {
      const float* y = a.y + size_t(r) * a.y_stride + column;
      const BlockMax most = block_max<false>(y, min_of(kMaximaColumns, end - column));
      a.maxima[size_t(r) * blocks + size_t(column / kMaximaColumns)] = most.sound ? most.value : __builtin_nanf("");
    }
}

// The index of the first largest value of each row, or -1.
void best(const BestArgs& a, ThreadPool& pool) {
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
