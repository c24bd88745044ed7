// States that are matrices: the gated delta rule and the scan of Mamba-2, token after token. A state [K, columns] lies in
// panels of a few columns, [K, 16 kScanVectors] each (the last may be narrower), so that a panel stays in the first cache
// while it runs over the tokens of a step. Sums over K have two accumulators, of even and of odd rows: their order depends on K
// alone.
#pragma once

#include "recurrent/segments.h"
#include "rowwise/activation.h"
#include "rowwise/norm.h"

namespace quire::QUIRE_ISA {

#if defined(QUIRE_AVX512)
constexpr int kScanVectors = 4;  // their accumulators hide the latency of products
#else
constexpr int kScanVectors = 2;
#endif
constexpr int kScanWidth = 16 * kScanVectors;

// A token as its panels need it.
struct ScanToken {
  const float *k, *q, *decay, *decayed_k;  // [K]
  const float* v;                          // [columns] of the head
  float factor, skip;
  float* y;  // or null
};

// One token of 16 P columns from `column` on, or of fewer (P is 1 then), in a panel of `stride` columns.
template <bool kDelta, int P, bool kNarrow>
QUIRE_INLINE void scan_token(float* state, int K, size_t stride, int column, int columns, const ScanToken& t) {
  auto at = [&](int p, int i) { return state + size_t(i) * stride + 16 * p; };
  auto get = [&](const float* from) { return kNarrow ? load_first(from, columns) : load(from); };
  auto put = [&](float* to, V v) { kNarrow ? store_first(to, v, columns) : store(to, v); };
  V u[P], sum[P][2];
  for (int p = 0; p < P; ++p) u[p] = get(t.v + column + 16 * p), sum[p][0] = sum[p][1] = set1(0);
  auto rows = [&](auto&& row) {
    int i = 0;
    for (; i + 2 <= K; i += 2) row(i, 0), row(i + 1, 1);
    if (i < K) row(i, 0);
  };
  if constexpr (kDelta) {
    rows([&](int i, int lane) QUIRE_INLINE_LAMBDA {
      const V k = set1(t.decayed_k[i]);
      for (int p = 0; p < P; ++p) sum[p][lane] = fma(k, get(at(p, i)), sum[p][lane]);
    });
    for (int p = 0; p < P; ++p) u[p] = u[p] - (sum[p][0] + sum[p][1]), sum[p][0] = sum[p][1] = set1(0);
  }
  for (int p = 0; p < P; ++p) u[p] = u[p] * set1(t.factor);
  rows([&](int i, int lane) QUIRE_INLINE_LAMBDA {
    const V k = set1(t.k[i]), q = set1(t.q[i]), decay = set1(t.decay[i]);
    for (int p = 0; p < P; ++p) {
      const V s = fma(k, u[p], decay * get(at(p, i)));
      put(at(p, i), s);
      sum[p][lane] = fma(q, s, sum[p][lane]);
    }
  });
  if (!t.y) return;
  for (int p = 0; p < P; ++p) {
    V y = sum[p][0] + sum[p][1];
    if constexpr (!kDelta) y = fma(set1(t.skip), get(t.v + column + 16 * p), y);
    put(t.y + column + 16 * p, y);
  }
}

// x divided by its length, times `scale`.
inline void to_unit(const float* x, int n, float scale, float* y) {
  const V by = set1(scale / __builtin_sqrtf(sum_of_squares(x, n, 0) + 1e-6f));
  for (int i = 0; i < n; i += 16) store_first(y + i, load_first(x + i, min_of(16, n - i)) * by, min_of(16, n - i));
}

// The rows of a head: of tokens, or of open rows, which have no queries and no result.
struct ScanRows {
  const float *q, *k, *v, *steps, *beta;
  size_t x_stride, steps_stride, beta_stride;
  float* y;
  size_t y_stride;
};

inline ScanRows scan_rows(const ScanArgs& a, const StateSeq& s, int head, bool open) {
  const int key_head = head / (a.heads / a.key_heads), step_width = a.by_channel ? a.K : 1;
  const size_t key_at = size_t(key_head) * size_t(a.K), value_at = size_t(head) * size_t(a.columns);
  const size_t values = size_t(a.heads) * size_t(a.columns), steps = size_t(a.heads) * size_t(step_width);
  const size_t step_at = size_t(head) * size_t(step_width), keys = size_t(a.key_heads) * size_t(a.K);
  if (open) {
    const float* row = s.open_rows;
    const float *k = row + (a.delta ? 0 : values), *v = row + (a.delta ? keys : 0), *after = row + keys + values;
    return {nullptr, k + key_at, v + value_at, a.steps ? after + step_at : nullptr, after + steps + head, a.row, a.row, a.row,
            nullptr, 0};
  }
  const size_t first = size_t(s.first), width = 2 * keys + values;
  const float* x = a.x + first * width;
  const float *q = x + (a.delta ? 0 : values + keys), *k = x + (a.delta ? keys : values), *v = x + (a.delta ? 2 * keys : 0);
  return {q + key_at, k + key_at, v + value_at, a.steps ? a.steps + first * steps + step_at : nullptr,
          a.beta ? a.beta + first * size_t(a.heads) + head : nullptr, width, steps, size_t(a.heads),
          a.y + first * values + value_at, values};
}

constexpr int kScanChunk = 16;  // tokens that are prepared at a time

// Fills in token i of the rows, whose keys, queries and decays go to `to`: 4 times K, rounded up to 16.
inline ScanToken scan_prepare(const ScanArgs& a, const ScanRows& rows, int head, size_t i, float* to) {
  const int K = a.K;
  const size_t padded = round_up(size_t(K), 16);
  float *k = to, *q = to + padded, *decay = to + 2 * padded, *decayed_k = to + 3 * padded;
  const float *own_k = rows.k + i * rows.x_stride, *steps = rows.steps ? rows.steps + i * rows.steps_stride : nullptr;
  const V rate = set1(0.0f - a.rates[head]);
  ScanToken t{k, q, decay, decayed_k, rows.v + i * rows.x_stride, 1, a.skip ? a.skip[head] : 0.0f,
              rows.y ? rows.y + i * rows.y_stride : nullptr};
  if (!rows.q) std::memset(q, 0, padded * sizeof(float));
  if (!a.delta) {
    if (steps) t.factor = min_of(max_of(*steps, a.least), a.most);
    const V e = exp(rate * set1(t.factor));
    for (size_t c = 0; c < padded; c += 16) store(decay + c, e);
    std::memcpy(k, own_k, size_t(K) * sizeof(float));
    if (rows.q) std::memcpy(q, rows.q + i * rows.x_stride, size_t(K) * sizeof(float));
    return t;
  }
  t.factor = rows.beta[i * rows.beta_stride];
  to_unit(own_k, K, 1, k);
  if (rows.q) to_unit(rows.q + i * rows.x_stride, K, 1.0f / __builtin_sqrtf(float(K)), q);
  auto decay_of = [&](V step) {
    return exp(a.bound < 0 ? set1(a.bound) * sigmoid(set1(0) - rate * step) : rate * step);
  };
  const V one = a.by_channel ? set1(0) : decay_of(set1(*steps));
  for (int c = 0; c < K; c += 16) {
    const int lanes = min_of(16, K - c);
    const V e = a.by_channel ? decay_of(load_first(steps + c, lanes)) : one;
    store(decay + c, e);
    store_first(decayed_k + c, load_first(k + c, lanes) * e, lanes);
  }
  return t;
}

template <bool kDelta>
inline void scan_head(const ScanArgs& a, const StateSeq& s, int head, int first, int last, float* scratch) {
  const int K = a.K;
  const size_t matrix = size_t(K) * size_t(a.columns), padded = round_up(size_t(K), 16);
  const size_t begin = size_t(first), end = size_t(last);
  float *prepared = scratch, *copy = scratch + kScanChunk * 4 * padded;
  run_segments(s, size_t(head) * matrix + begin * size_t(K), (end - begin) * size_t(K), copy,
               [&](float* state, bool open, int from, int count) {
    const ScanRows rows = scan_rows(a, s, head, open);
    for (int done = 0; done < count; done += kScanChunk) {
      const int n = min_of(kScanChunk, count - done);
      ScanToken tokens[kScanChunk];
      for (int i = 0; i < n; ++i)
        tokens[i] = scan_prepare(a, rows, head, size_t(from + done + i), prepared + size_t(i) * 4 * padded);
      for (size_t at = begin; at < end; at += kScanWidth) {
        float* panel = state + (at - begin) * size_t(K);
        const int columns = int(min_of(end - at, size_t(kScanWidth))), whole = columns / 16 * 16;
        const size_t stride = size_t(columns);
        if (columns == kScanWidth) {
          for (int i = 0; i < n; ++i) scan_token<kDelta, kScanVectors, false>(panel, K, kScanWidth, int(at), columns, tokens[i]);
          continue;
        }
        for (int i = 0; i < n; ++i)
          for (int c = 0; c < columns; c += 16)
            if (c < whole) scan_token<kDelta, 1, false>(panel + c, K, stride, int(at) + c, 16, tokens[i]);
            else scan_token<kDelta, 1, true>(panel + c, K, stride, int(at) + c, columns - c, tokens[i]);
      }
    }
  });
}

}  // namespace quire::QUIRE_ISA
