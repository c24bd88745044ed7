// Ops on rows: embedding, norms, rotary angles, and the step that norms, rotates and stores keys and values.
// Knows the weight packing and the KV layout; knows no plan.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Fewer elements than this per thread are not worth a fork and join.
constexpr int kElementsPerTask = 16384;

// Calls f(first, last, thread) over ranges of rows.
template <class F>
inline void for_row_ranges(ThreadPool& pool, int rows, int width, F&& f) {
  const int per_task = max_of(1, kElementsPerTask / max_of(1, width));
  const int tasks = (rows + per_task - 1) / per_task;
  pool.parallel_for(tasks, [&](int task, int thread) {
    f(task * per_task, min_of(rows, (task + 1) * per_task), thread);
  });
}

// Sum of f(vector index, first element, lanes) over a row in 16-wide strides; lanes past the end are zero.
inline float sum_of_squares(const float* x, int n, float mean) {
  V sum = set1(0), m = set1(mean);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const V d = load(x + i) - m;
    sum = fma(d, d, sum);
  }
  if (i < n) {
    const V d = select(first_lanes(n - i), load_first(x + i, n - i) - m, set1(0));
    sum = fma(d, d, sum);
  }
  return reduce_add(sum);
}

inline float mean_of(const float* x, int n) {
  V sum = set1(0);
  int i = 0;
  for (; i + 16 <= n; i += 16) sum = sum + load(x + i);
  if (i < n) sum = sum + load_first(x + i, n - i);
  return reduce_add(sum) / float(n);
}

inline void norm_row(const float* x, int n, bool rms, const float* weight, const float* bias, float eps, float* y) {
  const float mean = rms ? 0.0f : mean_of(x, n);
  const V scale = set1(1.0f / __builtin_sqrtf(sum_of_squares(x, n, mean) / float(n) + eps)), m = set1(mean);
  for (int i = 0; i < n; i += 16) {
    const int lanes = min_of(16, n - i);
    V v = (load_first(x + i, lanes) - m) * scale * load_first(weight + i, lanes);
    if (bias) v = v + load_first(bias + i, lanes);
    store_first(y + i, v, lanes);
  }
}

inline void norm(const NormArgs& a, ThreadPool& pool) {
  for_row_ranges(pool, a.rows, a.width, [&](int first, int last, int) {
    for (int r = first; r < last; ++r)
      norm_row(a.x + size_t(r) * a.x_stride, a.width, a.rms, a.weight, a.bias, a.eps, a.y + size_t(r) * a.y_stride);
  });
}

inline void embed(const EmbedArgs& a, ThreadPool& pool) {
  const MatrixView& w = a.table;
  for_row_ranges(pool, a.num_tokens, w.cols * 4, [&](int first, int last, int) {
    for (int t = first; t < last; ++t) {
      const int row = a.tokens[t], lane = row % 16;
      const char* panel = w.data + w.panel_bytes() * size_t(row / 16);
      float* y = a.y + size_t(t) * a.y_stride;
      if (w.bf16) {
        const uint16_t* pairs = reinterpret_cast<const uint16_t*>(panel) + lane * 2;
        for (int k = 0; k < w.cols; ++k) y[k] = bf16_to_float(pairs[(k / 2) * 32 + k % 2]) * a.scale;
      } else {
        const float* values = reinterpret_cast<const float*>(panel) + lane;
        for (int k = 0; k < w.cols; ++k) y[k] = values[size_t(k) * 16] * a.scale;
      }
    }
  });
}

inline void rope(const RopeArgs& a, ThreadPool& pool) {
  for_row_ranges(pool, a.num_tokens, a.half * 64, [&](int first, int last, int) {
    for (int t = first; t < last; ++t) {
      float* y = a.angles + size_t(t) * a.stride;
      const float position = float(a.positions[t]);
      for (int i = 0; i < a.half; ++i) {
        const float angle = position * a.inv_freq[i];
        y[i] = __builtin_cosf(angle) * a.scale;
        y[a.half + i] = __builtin_sinf(angle) * a.scale;
      }
    }
  });
}

// Pairs (i, i + half): x' = x cos - y sin, y' = y cos + x sin.
inline void rotate(float* x, const float* angles, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; i += 16) {
    const int n = min_of(16, half - i);
    const V c = load_first(angles + i, n), s = load_first(angles + half + i, n);
    const V a = load_first(x + i, n), b = load_first(x + half + i, n);
    store_first(x + i, a * c - b * s, n);
    store_first(x + half + i, b * c + a * s, n);
  }
}

// Head `from` normed and rotated into `to` (which may be `from`).
inline void prepare_head(const float* from, float* to, int head_dim, const HeadNorm& norm, const float* angles,
                         int rotary_dim) {
  if (norm.weight)
    norm_row(from, head_dim, norm.rms, norm.weight, norm.bias, norm.eps, to);
  else
    std::memcpy(to, from, size_t(head_dim) * 4);
  if (angles) rotate(to, angles, rotary_dim);
}

template <class E>
inline void store_key(const float* k, E* tile, int head_dim, int block_size, int offset) {
  for (int h = 0; h < head_dim; ++h) {
    if constexpr (sizeof(E) == 2)
      tile[h * block_size + offset] = float_to_bf16(k[h]);
    else
      tile[h * block_size + offset] = k[h];
  }
}

inline void store_value(const float* v, char* tile, bool bf16, int head_dim, int offset) {
  if (!bf16) {
    std::memcpy(reinterpret_cast<float*>(tile) + size_t(offset) * head_dim, v, size_t(head_dim) * 4);
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(tile) + size_t(offset) * head_dim;
  int h = 0;
  for (; h + 16 <= head_dim; h += 16) store_bf16(to + h, load(v + h));
  for (; h < head_dim; ++h) to[h] = float_to_bf16(v[h]);
}

inline void store_kv_token(const StoreKVArgs& a, int t, float* scratch) {
  const KVView& kv = a.kv;
  const int H = kv.head_dim, G = kv.num_kv_heads, N = a.num_heads;
  const float* row = a.qkv + size_t(t) * a.qkv_stride;
  const float* angles = a.angles ? a.angles + size_t(t) * a.angles_stride : nullptr;
  float* q = a.q + size_t(t) * a.q_stride;
  for (int n = 0; n < N; ++n) prepare_head(row + n * H, q + n * H, H, a.q_norm, angles, a.rotary_dim);
  for (int g = 0; g < G; ++g) {
    prepare_head(row + (N + g) * H, scratch, H, a.k_norm, angles, a.rotary_dim);
    char* keys = kv.key_tile(a.layer, a.block[t], g);
    if (kv.bf16)
      store_key(scratch, reinterpret_cast<uint16_t*>(keys), H, kv.block_size, a.offset[t]);
    else
      store_key(scratch, reinterpret_cast<float*>(keys), H, kv.block_size, a.offset[t]);
    store_value(row + (N + G + g) * H, kv.value_tile(a.layer, a.block[t], g), kv.bf16, H, a.offset[t]);
  }
}

inline void store_kv(const StoreKVArgs& a, ThreadPool& pool) {
  const int width = (a.num_heads + 2 * a.kv.num_kv_heads) * a.kv.head_dim;
  for_row_ranges(pool, a.num_tokens, width, [&](int first, int last, int thread) {
    for (int t = first; t < last; ++t) store_kv_token(a, t, static_cast<float*>(pool.scratch(thread)));
  });
}

}  // namespace quire::QUIRE_ISA
