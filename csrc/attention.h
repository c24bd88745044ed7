// Causal paged attention. Knows the KV layout; knows no plan.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

inline size_t attention_workspace(const AttentionLimits&) { return 0; }

// One query row and head: online softmax over blocks, whose tiles are aligned to absolute position 0.
inline void attention_row(const AttentionArgs& a, int seq, int row, int head) {
  const KVView& kv = a.kv;
  const int H = kv.head_dim, block_size = kv.block_size;
  const int g = head / (a.num_heads / kv.num_kv_heads);
  const int position = a.kv_len[seq] - a.cu_q[seq + 1] + row;
  const int first = a.window > 0 ? max_of(0, position - a.window + 1) : 0;
  const float* q = a.q + size_t(row) * a.q_stride + size_t(head) * H;
  float* out = a.out + size_t(row) * a.out_stride + size_t(head) * H;
  const int32_t* table = a.block_table + size_t(a.slots[seq]) * a.block_table_stride;
  auto element = [&](const char* tile, size_t i) {
    return kv.bf16 ? bf16_to_float(reinterpret_cast<const uint16_t*>(tile)[i]) : reinterpret_cast<const float*>(tile)[i];
  };
  float best = -__builtin_inff(), sum = 0;
  for (int h = 0; h < H; ++h) out[h] = 0;
  for (int p = first; p <= position; ++p) {
    const int block = table[p / block_size], offset = p % block_size;
    const char* keys = kv.key_tile(a.layer, block, g);
    const char* values = kv.value_tile(a.layer, block, g);
    float score = 0;
    for (int h = 0; h < H; ++h) score += q[h] * element(keys, size_t(h) * block_size + offset);
    score *= a.scale;
    const float top = max_of(best, score);
    const float keep = __builtin_expf(best - top), weight = __builtin_expf(score - top);
    best = top;
    sum = sum * keep + weight;
    for (int h = 0; h < H; ++h) out[h] = out[h] * keep + weight * element(values, size_t(offset) * H + h);
  }
  for (int h = 0; h < H; ++h) out[h] /= sum;
}

inline void attention(const AttentionArgs& a, ThreadPool& pool) {
  const int heads = a.num_heads;
  pool.parallel_for(a.num_seqs * heads, [&](int task, int) {
    const int seq = task / heads, head = task % heads;
    for (int row = a.cu_q[seq]; row < a.cu_q[seq + 1]; ++row) attention_row(a, seq, row, head);
  });
}

}  // namespace quire::QUIRE_ISA
