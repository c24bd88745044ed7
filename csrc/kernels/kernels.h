// The interface between kernels and plan: plain argument structs and one table of functions per instruction set. Knows
// pointers and sizes; knows no Python, no plan and no model.
//
// Shape letters as in devices/protocol.py: T tokens, B sequences, D hidden, N query heads, G kv heads, H head_dim,
// O and K rows and columns of a weight. Strides are in elements. Every function is exact
// (docs/architecture.md): a row's bits do not depend on the number of rows or threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/kv_view.h"
#include "linear/format.h"
#include "sample/sampler_table.h"
#include "plan/thread_pool.h"

namespace quire {

// clamped_swiglu and clamped_silu are only gates: they also clamp the up projection (rowwise/activation.h).
enum class Activation : int { none, silu, gelu, gelu_tanh, relu, clamped_swiglu, relu2, sigmoid, softplus, clamped_silu };

// RMSNorm or LayerNorm; without a weight, no norm.
struct Norm {
  bool rms = true;
  const float* weight = nullptr;
  const float* bias = nullptr;  // or null
  float eps = 0;
};

// Outputs of a product that share one noted maximum.
constexpr int kMaximaColumns = 256;
QUIRE_INLINE size_t maxima_of(int width) { return size_t(width + kMaximaColumns - 1) / kMaximaColumns; }

struct Screening;  // linear/argmax_candidates.h

struct LinearArgs {
  const float* x;
  size_t x_stride;
  int rows;
  Norm norm;  // of x, applied while it is packed
  MatrixView weight;
  const float* bias;  // in packed order, 16 * panels() long, or null
  Activation activation;
  const float* residual;  // or null; may be y
  size_t residual_stride;
  float* y;  // [rows, O]; [rows, I] for a gated weight
  size_t y_stride;
  void* workspace;  // linear_workspace() bytes, 64-byte aligned
  // [rows, maxima_of(O)], or null: the greatest of each kMaximaColumns outputs; NaN if one of them is NaN or +inf. Not
  // for gated weights.
  float* maxima = nullptr;
  // Set by `linear` if activations are rounded to int8: one scale per row, and sums by group (linear/rounded_rows.h).
  const float* x_scale = nullptr;
  const int32_t* x_sums = nullptr;
  // For the product with a screen: notes which outputs may be the largest instead of writing y. Set by `screened_best`.
  const Screening* screening = nullptr;
  // Of rows that an adapter may change: the norm of each row in place of `norm`, and where the product goes as it is
  // before bias, activation and residual, [rows, O] in source order. Or null.
  const Norm* row_norms = nullptr;
  float* raw = nullptr;
  size_t raw_stride = 0;
  // By row, or null: what is added to the product before all else, [O] in source order, or null. Such a row has no raw.
  const float* const* added = nullptr;
  float limit = 0;  // of a gated product's factors (rowwise/activation.h); 0: none
};

// A part of a product with a float32 or bfloat16 weight, small enough for one thread: rows [begin, begin + rows) times
// panels [first, last). Both types are multiplied with float32 activations.
struct ProductTask {
  const LinearArgs* product;
  int begin, rows, first, last;
};

// Ends the rows of a product that an adapter changes. `raw` holds x W', then what the adapter adds to it.
//   activate  y = activation(gain * raw + bias + shift), gated as the weight is
//   prepare   y += (gain - 1) * raw + shift, then raw = 0
//   add       y += gain * raw
//   shift     y += shift
enum class Finish { activate, prepare, add, shift };

struct FinishArgs {
  Finish kind;
  int rows, width;
  bool gated;
  Activation activation;
  const float* bias;   // in packed order, or null
  const float* gain;   // [O] in source order as `shift` is, or null: 1
  const float* shift;  // or null: 0
  float* raw;
  size_t raw_stride;
  float* y;
  size_t y_stride;
  float limit;  // as in LinearArgs
};

// The index of the first largest logit of each row, from the logits and their maxima as LinearArgs has them; -1 if one
// is NaN or +inf.
struct BestArgs {
  const float* x;
  size_t stride;
  int rows, width;
  const float* maxima;
  int32_t* best;
};

struct NormArgs {
  const float* x;
  size_t x_stride;
  int rows, width;
  Norm norm;
  float* y;
  size_t y_stride;
  const Norm* row_norms = nullptr;  // as in LinearArgs
  int groups = 1;  // equal parts of a row with statistics of their own
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

// A norm of queries or keys.
struct HeadNorm : Norm {
  enum class Over { head, own_head, all_heads };  // weight [H], [N, H] by head, or [N H] with one statistic for all

  Over over = Over::head;
  bool after_rope = false;
};

// y = x + scale * other, row by row.
struct AddArgs {
  const float* x;
  const float* other;
  float scale;
  float* y;
  size_t rows, width;
};

// y = scale * x, then cap * tanh(y / cap) if cap > 0.
struct ScaleArgs {
  const float* x;
  float scale, cap;
  float* y;
  size_t rows, width;
};

struct StoreKVArgs {
  const float* qkv;  // [T, (N + 2 G) H]
  size_t qkv_stride;
  int num_tokens, num_heads;
  const float* angles;  // or null
  size_t angles_stride;
  int rotary_dim;
  HeadNorm q_norm, k_norm, v_norm;
  KVView kv;
  const int32_t* block;   // [T] physical block of each token
  const int32_t* offset;  // [T] place inside it
  float* q;               // [T, N H]
  size_t q_stride;
};

// Multi-head latent attention: one key per token, of C latent and R rotated elements; the first C are its value too.
struct StoreLatentArgs {
  const float* kv;        // [T, C + R]: the latent, normed here, then the part to rotate; null: the keys are there
  const float* q_latent;  // [T, N C]
  const float* q_rope;    // [T, N R]
  int num_tokens, num_heads, rotary_dim;  // R
  const float* angles;    // [T, R]
  Norm norm;              // of the latent
  KVView kv_view;
  const int32_t* block;
  const int32_t* offset;
  float* q;  // [T, N (C + R)]
};

// Attention of a ragged step over the paged cache. Sequence b owns rows cu_q[b]..cu_q[b+1]-1 of q and out, at positions
// kv_len[b] - (cu_q[b+1] - cu_q[b]) .. kv_len[b] - 1, whose keys and values are already in the cache. Its block table
// is row slots[b]. The plan has checked all ids. A query at p sees positions up to p + ahead, but none before p -
// window + 1 or before the last multiple of chunk (0: no such bound). A score is scale * q . k, then cap * tanh(score /
// cap) if cap > 0, plus slope * (position - p), plus bias[position - p], whose ends hold for all beyond, plus
// added[row, head, position]; a sink is one more score without a value.
//
// With `views`, the sequences are queries by themselves, each of which sees a list of rows: as many of its layer as `own`
// says, from position `first` on, then pools of `pool` positions or, if there are `entries`, rows of that layer. `numbers`
// are those of the pools or entries, ascending; null: 0, 1, 2, ... A list's places count as positions. `by_head`: a view is
// of one kv head, else of all. `order` may be null then, and no bound to positions be set.
struct QueryView {
  int token, slot, length, first, own;
  const float* numbers;
  int kv_head;
};

struct AttentionArgs {
  const float* q;
  size_t q_stride;
  float* out;
  size_t out_stride;
  KVView kv;
  int num_heads, num_seqs;
  const int32_t* cu_q;    // [B + 1]
  const int32_t* kv_len;  // [B]
  const int32_t* slots;   // [B]
  const int32_t* block_table;
  size_t block_table_stride;
  const int32_t* order;   // [B] sequences; those that begin with the same blocks are adjacent (SharedPrefixes)
  const int32_t* shared;  // [B] positions in blocks that each of them shares with the one before
  float scale;
  int window, chunk;
  int ahead;  // positions after its own that a query sees too: 0 if attention is causal
  float cap;
  const float* slopes;  // [N], or null
  const float* sinks;   // [N], or null
  const float* bias;    // [N, 2 reach + 1], or null
  int reach;
  const float* added;   // [T, N, added_positions], or null; whole tiles may be read
  size_t added_positions;
  void* workspace;      // attention_workspace() bytes, 64-byte aligned
  int num_tokens = 0;   // 0: cu_q[num_seqs]
  const QueryView* views = nullptr;
  const KVView* entries = nullptr;
  int pool = 1;
  bool by_head = false;
};

// A row of a weight rounded to int8: its scale and bounds of its lengths (linear/screened_argmax.h).
struct ScreenWeightRow {
  float scale, length, rounding;
};

// Another row of states that takes the state of a sequence after `count` of its tokens.
struct StateMark {
  int count;
  float* state;
};

// A sequence's part of a step as an operation with a state sees it: its tokens are rows first .. first + tokens - 1. The
// state advances by `open` open rows, then by `kept` of its tokens; the others advance a copy of it.
struct StateSeq {
  int first, tokens, open, kept;
  bool fresh;  // it starts from zeros, whatever the state holds
  float* state;
  const float* open_rows;
  const StateMark* marks;  // by count
  int num_marks;
};

struct StateStep {
  const StateSeq* seqs;
  int num_seqs;
  size_t row;  // elements of an open row
};

// The operations of devices/recurrent_ops.py. Open rows are written by the plan.
struct ConvolveArgs : StateStep {
  const float* x;  // [T, channels], as y
  int channels, taps, dilation;
  const float* weight;  // [taps, channels]
  const float* bias;    // or null
  Activation activation;
  float* y;
};

// DeltaRule and, without `delta`, StateSpace: head h has a state [K, columns] and the keys of head h / (heads / key_heads).
struct ScanArgs : StateStep {
  bool delta, by_channel;  // `steps` is [T, heads K] instead of [T, heads]
  const float *x, *steps, *beta;  // steps may be null for StateSpace; beta is the delta rule's
  int key_heads, heads, K, columns;
  const float *rates, *skip;  // [heads]; skip may be null
  float bound, least, most;
  float* y;  // [T, heads columns]
};

struct SelectiveArgs : StateStep {
  const float *x, *dt, *bc;
  int channels, N;
  const float *rates, *skip;  // rates are in panels as the state is
  float* y;
};

struct GatedArgs : StateStep {
  const float *x, *input_gate, *rate_gate;
  int channels;
  const float* rates;
  float* y;
};

// The operations of devices/sparse_ops.py. x and gates are [T, C]; without `gates` x is [T, C], of keys alone.
struct StoreKeysArgs {
  const float *x, *gates;  // gates may be null
  size_t x_stride, gates_stride;
  int channels;  // C of a token's row in x
  int num_tokens, num_seqs;
  const int32_t *positions, *cu_q, *slots, *block_table;
  size_t block_table_stride;
  KVView kv, raw;     // raw: of no heads if size is 1
  int size;
  const float* bias;  // [size, C], or null: a mean
  bool overlap;
  Norm norm;          // or none
  const float* inv_freq;  // [half], or null
  int half;
  float scale;        // of the angles
};

struct ChooseArgs {
  const float* q;  // [T, N D]
  const float* weights;  // [T, N], or null
  int num_seqs;
  const int32_t *cu_q, *kv_len, *slots, *block_table;
  size_t block_table_stride;
  KVView kv;
  int num_heads, groups, top_k, size, local;
  bool tail, relu;
  float scale;
  float* out;  // [T, groups (top_k + tail)]
  void* workspace;  // choose_workspace() bytes
};

struct AttentionLimits {
  int max_tokens, max_seqs, num_heads, num_kv_heads, head_dim, value_dim, threads;
};

// Kernels come in three groups, by what they multiply, so that instruction sets that differ in one group share the
// others: AVX-512 with and without VNNI multiply floats with the same code. CMakeLists.txt lists the sets that compile
// a group; isa.cpp puts the groups of a set together.
// At most kMostProducts that do not depend on each other.
using Linear = void(const LinearArgs*, int count, ThreadPool&);
constexpr int kMostProducts = 64;
#define QUIRE_COUNT_LAYOUT(name, Traits) +1
constexpr int kLayouts = 0 QUIRE_LAYOUTS(QUIRE_COUNT_LAYOUT);
#undef QUIRE_COUNT_LAYOUT
using Attend = void(const AttentionArgs&, ThreadPool&);
using Probe = double(int64_t steps);  // runs `steps` steps on one core, returns the operations of a step (0: cannot)

// Floats by floats, and everything that multiplies no matrices (float/).
struct FloatKernels {
  Linear* float_products[kLayouts];  // activations stay float
  Attend* attention_f32;
  size_t (*attention_workspace_f32)(const AttentionLimits&);
  void (*best)(const BestArgs&, ThreadPool&);
  // Group i of the tasks ends before tasks[ends[i]]; one thread runs it, in order.
  void (*products)(const ProductTask* tasks, const int* ends, int groups, ThreadPool&);
  int product_rows;  // of a task, at most
  void (*finish)(const FinishArgs&, ThreadPool&);
  void (*norm)(const NormArgs&, ThreadPool&);
  void (*embed)(const EmbedArgs&, ThreadPool&);
  void (*unpack_blocks)(const MatrixView&, int panel, float* const (&rows)[16]);  // the values of rows that are not null
  void (*rope)(const RopeArgs&, ThreadPool&);
  void (*store_kv)(const StoreKVArgs&, ThreadPool&);
  void (*store_latent)(const StoreLatentArgs&, ThreadPool&);
  void (*store_keys)(const StoreKeysArgs&, ThreadPool&);
  void (*choose)(const ChooseArgs&, ThreadPool&);
  size_t (*choose_workspace)(int tokens, int num_heads, int groups, int head_dim, int top_k, int threads);
  void (*add)(const AddArgs&, ThreadPool&);
  void (*scale)(const ScaleArgs&, ThreadPool&);
  void (*convolve)(const ConvolveArgs&, ThreadPool&);
  void (*scan)(const ScanArgs&, ThreadPool&);
  void (*selective_scan)(const SelectiveArgs&, ThreadPool&);
  void (*gated_recurrence)(const GatedArgs&, ThreadPool&);
  Probe* probe_fp32;
  uint32_t (*probe_read)(const char* data, size_t bytes);
  const SamplerKernels* sampler;
};

// Integers by integers: activations, queries and softmax weights are rounded first (byte/).
struct ByteKernels {
  Linear* int8_products[kLayouts];
  size_t (*linear_workspace_i8)(const MatrixView& weight, int max_rows);
  Attend* attention_i8;
  size_t (*attention_workspace_i8)(const AttentionLimits&);
  Probe* probe_int8;
};

// bfloat16, in pairs or widened, and the screens of weights in float types (pair/).
struct PairKernels {
  Linear* bf16_products[kLayouts];
  bool (*multiplies_pairs)(const MatrixView& blocks);  // whether bf16_products take them; null if there are none
  size_t (*linear_workspace_float)(const MatrixView& weight, int max_rows);  // for weights with float activations
  Attend* attention_bf16;
  size_t (*attention_workspace_bf16)(const AttentionLimits&);
  bool (*screened_best_by)(const LinearArgs&, Linear* screen_product, int32_t* best, ThreadPool&);
  int screened_rows;
  // Rounds a row of n values, a multiple of 16, to bytes plus 128. `rounding` is NaN if a value is too large or NaN.
  ScreenWeightRow (*screen_weight_row)(const float* x, int n, char* bytes);
  Probe* probe_bf16;
};

// All kernels of one instruction set.
struct Kernels : FloatKernels, ByteKernels, PairKernels {
  const char* name;

  void linear(const LinearArgs&, ThreadPool&) const;
  // Any number of products without maxima that do not depend on each other, each with a workspace of its own.
  void linear(const LinearArgs* products, int count, ThreadPool&) const;
  size_t linear_workspace(const MatrixView& weight, int max_rows) const;
  // Finds the result of `best` for at most `screened_rows` rows by a weight's screen, without the whole product: only
  // that output of y is valid. False if it cannot, or not more quickly (linear/screened_argmax.h).
  bool screened_best(const LinearArgs&, int32_t* best, ThreadPool&) const;

  // Bytes of memory that threads share in attention (split KV), beside ThreadPool::scratch.
  void attention(const AttentionArgs&, ThreadPool&) const;
  size_t attention_workspace(const AttentionLimits&) const;
};

}  // namespace quire
