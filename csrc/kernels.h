// What a set of kernels offers the plan: plain argument structs and one table of functions per instruction set.
// Knows pointers and sizes; knows no Python, no plan and no model.
//
// Shape letters as in ops/protocol.py: T tokens, B sequences, D hidden, N query heads, G kv heads, H head_dim,
// O and K rows and columns of a weight. Strides are in elements. Every function is exact in the sense of DESIGN
// section 5: a row's bits do not depend on how many rows or threads there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kv_cache.h"
#include "sampler_table.h"
#include "thread_pool.h"

namespace quire {

enum class Activation : int { none, silu, gelu, gelu_tanh, relu };

// A packed weight [O, K]: panels of 16 rows, each contiguous, zero padded in O and in K.
//   float32   [ceil(O / 16)][K][16]
//   bfloat16  [ceil(O / 16)][ceil(K / 2)][16][2]
// In a gated weight the panels alternate: 16 rows of the gate, the same 16 rows of the up projection, ...
struct MatrixView {
  const char* data = nullptr;
  int rows = 0, cols = 0;  // O (of a gated weight: 2 I) and K
  bool bf16 = false, gated = false;

  QUIRE_INLINE int padded_cols() const { return bf16 ? (cols + 1) / 2 * 2 : cols; }
  QUIRE_INLINE size_t panel_bytes() const { return size_t(padded_cols()) * 16 * (bf16 ? 2 : 4); }
  QUIRE_INLINE int panels() const { return gated ? 2 * ((rows / 2 + 15) / 16) : (rows + 15) / 16; }
  QUIRE_INLINE size_t nbytes() const { return panel_bytes() * size_t(panels()); }
};

struct LinearArgs {
  const float* x;
  size_t x_stride;
  int rows;
  MatrixView weight;
  const float* bias;  // in packed order, 16 * panels() long, or null
  Activation activation;
  const float* residual;  // or null; may be y
  size_t residual_stride;
  float* y;  // [rows, O], of a gated weight [rows, I]
  size_t y_stride;
  void* workspace;  // linear_workspace() bytes, 64-byte aligned
};

struct NormArgs {
  const float* x;
  size_t x_stride;
  int rows, width;
  bool rms;  // else LayerNorm
  const float* weight;
  const float* bias;  // or null
  float eps;
  float* y;
  size_t y_stride;
};

struct EmbedArgs {
  const int32_t* tokens;  // 0 <= token < table.rows
  int num_tokens;
  MatrixView table;
  float scale;
  float* y;
  size_t y_stride;
};

struct RopeArgs {
  const int32_t* positions;
  int num_tokens;
  const float* inv_freq;  // [half]
  int half;
  float scale;
  float* angles;  // [T, 2 * half]: cosines, then sines
  size_t stride;
};

struct HeadNorm {
  bool rms = true;
  const float* weight = nullptr;  // [H]; null: no norm
  const float* bias = nullptr;
  float eps = 0;
};

struct StoreKVArgs {
  const float* qkv;  // [T, (N + 2 G) H]
  size_t qkv_stride;
  int num_tokens, num_heads;
  const float* angles;  // or null
  size_t angles_stride;
  int rotary_dim;
  HeadNorm q_norm, k_norm;
  KVView kv;
  int layer;
  const int32_t* block;   // [T] physical block of each token
  const int32_t* offset;  // [T] place inside it
  float* q;               // [T, N H]
  size_t q_stride;
};

// Causal attention of a ragged step over the paged cache. Sequence b owns rows cu_q[b]..cu_q[b+1]-1 of q and out, at
// positions kv_len[b] - (cu_q[b+1] - cu_q[b]) .. kv_len[b] - 1, whose keys and values are already in the cache. Its
// block table is row slots[b]. All ids are checked by the plan. window 0: none.
struct AttentionArgs {
  const float* q;
  size_t q_stride;
  float* out;
  size_t out_stride;
  KVView kv;
  int layer, num_heads, num_seqs;
  const int32_t* cu_q;    // [B + 1]
  const int32_t* kv_len;  // [B]
  const int32_t* slots;   // [B]
  const int32_t* block_table;
  size_t block_table_stride;
  float scale;
  int window;
  void* workspace;  // attention_workspace() bytes, 64-byte aligned
};

struct AttentionLimits {
  int max_tokens, max_seqs, num_heads, num_kv_heads, head_dim, threads;
};

struct Kernels {
  const char* name;
  bool bf16_dot;  // bfloat16 weights multiply activations rounded to bfloat16

  void (*linear)(const LinearArgs&, ThreadPool&);
  size_t (*linear_workspace)(const MatrixView& weight, int max_rows);
  void (*norm)(const NormArgs&, ThreadPool&);
  void (*embed)(const EmbedArgs&, ThreadPool&);
  void (*rope)(const RopeArgs&, ThreadPool&);
  void (*store_kv)(const StoreKVArgs&, ThreadPool&);

  // csrc/attention*.h. Shared memory between threads that attention needs (split KV), beside ThreadPool::scratch.
  void (*attention)(const AttentionArgs&, ThreadPool&);
  size_t (*attention_workspace)(const AttentionLimits&);

  // probe_kernels.h: each runs `steps` steps on one core and returns the operations of a step (0: cannot).
  double (*probe_fp32)(int64_t steps);
  double (*probe_bf16)(int64_t steps);
  uint32_t (*probe_read)(const char* data, size_t bytes);

  const SamplerKernels* sampler;  // csrc/sampler_kernels.h
};

#define QUIRE_DECLARE_ISA(isa) \
  namespace isa {              \
  extern const Kernels kernels; \
  }
QUIRE_DECLARE_ISA(scalar)
QUIRE_DECLARE_ISA(avx2)
QUIRE_DECLARE_ISA(avx512)
QUIRE_DECLARE_ISA(avx512_bf16)
QUIRE_DECLARE_ISA(avx512_bf16_emulated)
QUIRE_DECLARE_ISA(neon)
#undef QUIRE_DECLARE_ISA

// The table of an available instruction set (isa.h).
const Kernels& kernels_for(const std::string& isa);

}  // namespace quire
