// A forward pass, recorded once as a flat list of kernel calls over one arena, and run without Python.
// Knows ops, buffers and their lifetimes; knows no model and no scheduler.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/kernels.h"
#include "plan/adapters.h"
#include "plan/kv_cache.h"
#include "linear/matrix.h"
#include "plan/memory.h"
#include "plan/peers.h"
#include "plan/shared_prefix.h"
#include "plan/tails.h"
#include "plan/thread_pool.h"

namespace quire {

struct StepLimits {
  int max_tokens, max_seqs, max_logit_rows;
  int max_adapters = 0;
};

// The arrays of ModelInput (devices/protocol.py) with their lengths.
struct StepInput {
  const int32_t* tokens;
  const int32_t* positions;
  const int32_t* cu_q;
  const int32_t* kv_len;
  const int32_t* slots;
  const int32_t* block_table;
  const int32_t* logit_rows;
  int num_tokens, num_seqs, num_slots, blocks_per_slot, num_logit_rows;
  bool greedy;  // only `best` of the logits is read
  const float* hidden;  // [num_tokens, hidden_width]: the input of `receive`, or null
  int hidden_width;
  const int32_t* adapters = nullptr;  // [num_seqs]: the slot of a sequence's adapter, -1: none; or null: none at all
  // StateInput: [num_seqs] each, and marks [num_marks, 3]; null if the model has no states.
  const int32_t *state_rows = nullptr, *state_open = nullptr, *state_kept = nullptr, *state_marks = nullptr;
  int num_state_marks = 0;
};

// Rows of a buffer: one per token, per token of the step's tails, per logit row, or per row of one head call.
enum class RowKind : int { tokens, tails, logit_rows, head_rows };

struct NormParams {
  bool rms = true;
  std::vector<float> weight;
  std::vector<float> bias;  // empty: none
  float eps = 0;
  bool own_head = false;    // for queries or keys: one weight per head
  bool after_rope = false;  // for queries or keys: the norm follows the rotation

  bool present() const { return !weight.empty(); }
  // Throws std::invalid_argument unless it is for rows of `width` elements.
  void check(int64_t width) const;
  Norm view() const;
};

// The changes to scores, and the positions that a query sees (AttentionArgs).
struct AttentionParams {
  float scale = 1;
  int window = 0, chunk = 0;  // 0: none
  int ahead = 0;
  float cap = 0;
  std::vector<float> slopes, sinks;  // one per head, or empty
  std::vector<float> bias;           // [heads, 2 reach + 1], or empty
};

// How tokens choose experts from their scores (Routing in devices/operands.py).
struct RoutingParams {
  int num_experts = 0, top_k = 0;
  bool sigmoid = false, root_softplus = false, softmax_after = false, renormalize = false;
  bool correct_logits = false;  // the correction is added to the scores, not to the weights
  float sparse_mixer = 0;  // > 0: SparseMixer with this threshold instead of a softmax
  float scale = 1, floor = 1e-20f;
  int num_groups = 1, top_groups = 1;
  bool group_sum = false;
  std::vector<float> correction;
  std::vector<float> weight_scales;  // by expert: its weight is multiplied by it; or empty
  bool shared = false, shared_gate = false;

  int chosen() const { return top_k + (shared ? 1 : 0); }
};

// Index keys, choices and what attention sees of them (devices/sparse_ops.py). `further` is the layer of raw keys, or of the
// entries that attention sees; -1: none.
struct SparseParams {
  int further = -1, size = 1, groups = 1, top_k = 0, local = 0;
  bool overlap = false, tail = false, relu = true;
};

// Which state of a layer an operation carries.
struct StatePlace {
  int layer, state;
};

// Heads with a matrix for a state (ScanArgs).
struct ScanParams {
  std::vector<float> rates, skip;
  int key_heads = 0, heads = 0, rows = 0, columns = 0;
  float bound = 0, least = 0, most = 0;
  bool delta = false, by_channel = false;
};

// gate and up [2 I, D], or one matrix [I, D], and down [D, I]; biases in packed order, or empty.
struct ExpertWeights {
  std::shared_ptr<PackedMatrix> up, down;
  std::vector<float> up_bias, down_bias;
  float limit = 0;  // as in Plan::linear
};

// Recording: the methods below (bind/record_bind.cpp) append an op and return the number of its output buffer; all
// throw std::invalid_argument if shapes disagree. Order: ops of hidden, begin_head, ops of the head, finish, bind. A
// stage before a model's last has no head: ops of hidden, tap of its result, finish(-1), bind.
class Plan {
 public:
  Plan(const Kernels& kernels, std::shared_ptr<ThreadPool> pool, std::vector<KVLayer> layers, StepLimits limits);

  int embed(std::shared_ptr<PackedMatrix> table, float scale);
  // Rows of the table at each token's position + offset.
  int embed_positions(std::shared_ptr<PackedMatrix> table, int offset);
  int norm(int x, NormParams params, int groups = 1);
  int add(int x, int other, float scale);
  int scale(int x, float scale, float cap);
  // Each element of `factors` multiplies a run of neighbours in x, all runs being equally long.
  int multiply(int x, int factors);
  // Part b of the result is the sum of factors[b, a] times part a of x, with the residual added (-1: none).
  int combine(int x, std::vector<float> factors, int vectors, int residual);
  // The same with factors [rows, B A] of each row.
  int mix(int x, int factors, int vectors, int residual);
  // Each part of x, as wide as `like`, scaled to the root mean square of that.
  int match_rms(int x, int like, float floor);
  int compare_parts(int x, int other, int parts, float scale, float floor);
  // The function of that name in plan_elementwise.cpp, with its parameters, of each element.
  int elementwise(const std::string& name, int x, std::vector<float> params);
  // `bias` is in source order [O], or empty; residual -1: none.
  // `limit` bounds the factors of a gated weight's product (0: none).
  int linear(int x, std::shared_ptr<PackedMatrix> weight, const std::vector<float>& bias, Activation activation,
             int residual, float limit);
  int rope(std::vector<float> inv_freq, float scale);
  int store_kv(int qkv, int layer, int num_heads, int angles, NormParams q_norm, NormParams k_norm,
               NormParams v_norm);
  // Queries of a layer without keys of its own.
  int queries(int q, int num_heads, int angles, NormParams norm);
  int store_latent(int kv, int q_latent, int q_rope, int layer, int angles, NormParams norm);
  // `scores` are added to those of each query, by position; queries see what they have `chosen` (-1: none).
  int attention(int q, int layer, int num_heads, AttentionParams params, int scores, int chosen = -1, SparseParams sparse = {});
  // The operations of devices/sparse_ops.py; -1: no such operand. store_keys has no result that is read.
  int store_keys(int x, int gates, int layer, NormParams norm, std::vector<float> inv_freq, float scale,
                 std::vector<float> bias, SparseParams params);
  int choose(int q, int weights, int layer, int num_heads, float scale, SparseParams params);
  // What the distances in whole sequences add to scores: scale * (by_query + by_key) at the place of each distance.
  int relative_scores(int by_query, int by_key, int num_heads, std::vector<int32_t> places, float scale);
  // The operations of devices/recurrent_ops.py; -1: no such operand.
  int convolve(int x, const std::vector<float>& weight, std::vector<float> bias, Activation activation, int dilation,
               StatePlace place);
  // `tables` by number of tokens, from 2 on, as many of each; the ids before `end` do not count.
  int embed_ngrams(std::vector<std::shared_ptr<PackedMatrix>> tables, std::vector<int64_t> multipliers, int end,
                   StatePlace place);
  int delta_rule(int qkv, int steps, int beta, ScanParams params, StatePlace place);
  int state_space(int xbc, int dt, ScanParams params, StatePlace place);
  int selective_scan(int x, int dt, int bc, const std::vector<float>& rates, std::vector<float> skip, StatePlace place);
  int gated_recurrence(int x, int input_gate, int rate_gate, std::vector<float> rates, StatePlace place);
  // activation(head n of x times weights[n] + bias): [T, N K] -> [T, N O].
  int head_linear(int x, std::vector<std::shared_ptr<PackedMatrix>> weights, const std::vector<float>& bias,
                  Activation activation);
  int route(int scores, RoutingParams params, int ids = -1);
  // With `weigh_inputs` a route's weight multiplies its expert's input instead of its output. An expert without
  // weights returns its input.
  int experts(int x, int routes, std::vector<ExpertWeights> experts, Activation activation, bool weigh_inputs);
  // The sum of all ranks' x. `peers` may be null in a plan that is only measured.
  int all_reduce(int x, std::shared_ptr<Peers> peers);
  // The columns of all ranks side by side; `widths` has the number of each rank's.
  int all_gather(int x, std::vector<int> widths, std::shared_ptr<Peers> peers);
  int select_rows(int x);
  // The hidden states that come with a step: [T, width].
  int receive(int width);
  // Keeps x [T, D] of all tokens until the next run.
  void tap(int x);
  // Ends the ops of hidden with their result; returns the head's input.
  int begin_head(int hidden);
  // Ends recording and lays out the arena; nothing is allocated yet.
  void finish(int logits);
  size_t workspace_bytes() const { return total_bytes_; }
  // Allocates memory and binds the plan to a cache.
  void bind(std::shared_ptr<KVStore> kv);

  // Runs a step; logits of the first min(L, max_logit_rows) rows. Throws std::invalid_argument before any write.
  void run(const StepInput& input);
  // Runs the head on logit rows [start, stop) of the last step.
  void head(int start, int stop);
  // The adapter in a slot from the next step on, by the buffers that its ops return; null: none. From any thread.
  void set_adapter(int slot, std::shared_ptr<const AdapterChanges> changes);
  // Throws std::invalid_argument if a change does not fit its op.
  void check_change(const AdapterPlace& place, const AdapterChange& change) const;

  int width(int buffer) const;
  int num_logit_rows() const { return num_logit_rows_; }
  const StepLimits& limits() const { return limits_; }
  float* logits() const;
  float* hidden() const;
  // A buffer passed to `tap`.
  float* tapped(int buffer) const;
  // By row of logits: the lowest index of the largest, or -1 if unknown (BestArgs); null if no product makes them.
  // After a greedy step, a row whose entry is not -1 has only that logit.
  const int32_t* best() const { return best_.empty() ? nullptr : best_.data(); }
  int logits_width() const { return width(logits_); }
  int hidden_width() const { return width(hidden_); }
  // Overwrites all working memory with NaN (for tests: nothing may be read before it is written).
  void poison();

 private:
  enum class OpKind : int {
    embed, embed_positions, norm, linear, rope, store_kv, attention, tails, select_rows, add, scale, store_latent,
    head_linear, route, experts, receive, multiply, elementwise, mix, match_rms, compare_parts, relative_scores, all_reduce, all_gather,
    choose, store_keys, convolve, scan, selective_scan, gated_recurrence, embed_ngrams
  };

  struct Op {
    OpKind kind;
    int in = -1, out = -1, residual = -1, angles = -1, other = -1;
    std::shared_ptr<PackedMatrix> weight{};
    std::vector<float> vector{};  // linear: bias in packed order; rope: inv_freq; elementwise: parameters; mix: factors
    Activation activation = Activation::none;
    NormParams norm{}, k_norm{}, v_norm{};
    float scale = 1, cap = 0, limit = 0;
    StatePlace place{};
    ScanParams scan{};
    SparseParams sparse{};
    int layer = 0, num_heads = 0, groups = 1, offset = 0, function = 0, vectors = 0;
    bool weigh_inputs = false;
    int norm_place = -1;  // of its norm: the buffer that the norm made when it was recorded
    AttentionParams attention{};
    RoutingParams routing{};
    std::vector<std::shared_ptr<PackedMatrix>> weights{};
    std::vector<ExpertWeights> experts{};
    std::vector<int> widths{};
    std::vector<int32_t> places{};
    std::vector<int64_t> multipliers{};
    std::shared_ptr<Peers> peers{};

    std::array<int*, 4> inputs() { return {&in, &residual, &angles, &other}; }
  };

  struct Buffer {
    int width;
    RowKind rows;
    int root;           // the buffer whose memory this one uses
    int first_op = 0, last_op = 0;
    size_t offset = 0;  // in floats
  };

  int add_buffer(int64_t width, RowKind rows);
  int add_op(Op op, int64_t width, RowKind rows);
  const Buffer& checked(int buffer, const char* what) const;
  size_t max_rows(RowKind rows) const;
  size_t buffer_floats(const Buffer& buffer) const;
  void keep_tails();
  void fuse_norms();
  void find_lives();
  void share_buffers();
  void place_buffers();
  size_t shared_workspace() const;
  size_t attention_workspace(const Op& op) const;
  KVLayer cached(int layer, int num_heads, const char* what) const;
  void check_angles(int angles, int head_dim) const;
  int expert_rows(const Op& op) const;
  size_t expert_floats(const Op& op) const;
  size_t expert_workspace(const Op& op) const;

  // Rows of a product that an adapter changes, and where its own part is added; `fresh`: written, whatever is there.
  struct AdapterTarget {
    ChangedRows rows;
    float* y;
    size_t stride;
    bool fresh = false;
  };

  void check(const StepInput& input) const;
  void check_sequence(const StepInput& input, int seq) const;
  void locate_tokens(const StepInput& input);
  float* data(int buffer) const;
  int rows_of(int buffer) const;
  bool product_makes_logits() const;
  void execute(size_t first, size_t last);
  void execute_op(const Op& op);
  void execute_linear(const Op& op);
  void find_best(LinearArgs args, bool screened);
  LinearArgs linear_args(const Op& op) const;
  size_t raw_floats() const;
  static bool needs_raw(const PackedMatrix& weight, Activation activation);
  std::vector<ChangedRows> changes(int place, RowKind kind) const;
  const Norm* row_norms(const Op& op, int rows, RowKind kind);
  void execute_adapted(const Op& op, LinearArgs args);
  void run_product(LinearArgs args, const std::vector<ChangedRows>& changed);
  void add_inside(LinearArgs& args, const std::vector<ChangedRows>& changed);
  void keep_raw(LinearArgs& args, const std::vector<ChangedRows>& changed);
  void adapt(const LinearArgs& args, const std::vector<ChangedRows>& changed);
  void replace_product(const LinearArgs& args, const ChangedRows& changed);
  void add_low_rank(const LinearArgs& args, const std::vector<AdapterTarget>& targets);
  void push_ups(const AdapterTarget& target, const float* low);
  void push_tasks(size_t first, size_t last);
  void run_tasks();
  void adapt_embedding(const Op& op, float* out, size_t width);
  void execute_store_kv(const Op& op);
  void execute_attention(const Op& op);
  KVLayer index_keys(int layer, const char* what) const;
  void check_sparse(const Op& op) const;
  void execute_store_keys(const Op& op);
  void execute_choose(const Op& op);
  void attend_to_views(const Op& op, AttentionArgs args, const StepInput& step);
  const StepInput& step_of(int buffer) const { return buffers_[size_t(buffer)].rows == RowKind::tails ? tail_step_ : step_; }
  void execute_tails(const Op& op);
  void execute_select_rows(const Op& op);
  void execute_store_latent(const Op& op);
  void execute_head_linear(const Op& op);
  void execute_elementwise(const Op& op);
  int add_mix(Op op, int64_t made);
  void execute_mix(const Op& op);
  void execute_match_rms(const Op& op);
  void execute_compare_parts(const Op& op);
  void execute_relative_scores(const Op& op);
  bool reads_positions(const Op& op) const;  // of the tokens of the whole step
  void execute_exchange(const Op& op);
  int add_recurrent(Op op, size_t row, size_t state, int64_t width);
  void check_states(const StepInput& input) const;
  void execute_recurrent(const Op& op);
  StateStep place_states(const Op& op);
  void keep_open_rows(const Op& op);
  void execute_ngrams(const Op& op, const StateStep& step);
  void execute_route(const Op& op);
  void execute_experts(const Op& op);
  struct ExpertMemory {  // rows of a mixture in the workspace (plan_moe.cpp), then the workspaces of its products
    size_t width, out_width, inner_width;
    float *in, *out, *inner;
    char* products;
  };
  ExpertMemory expert_memory(const Op& op) const;
  void gather_routes(const Op& op, int first, int count, const ExpertMemory& memory);
  void scatter_routes(const Op& op, int first, int count, const ExpertMemory& memory);
  void run_together(const Op& op, int routed);
  void run_expert(const Op& op, int expert, int first, int rows, const ExpertMemory& memory);
  LinearArgs product_args(const PackedMatrix& weight, const std::vector<float>& bias, Activation activation,
                          const float* x, size_t x_stride, int rows, float* y, size_t y_stride, void* workspace) const;

  const Kernels& kernels_;
  std::shared_ptr<ThreadPool> pool_;
  std::vector<KVLayer> layers_;  // of the cache
  StepLimits limits_;
  std::shared_ptr<KVStore> kv_;

  std::vector<Op> ops_;
  std::vector<Buffer> buffers_;
  std::vector<int> taps_;
  bool finished_ = false, recurrent_ = false;  // recurrent_: some op carries a state
  size_t head_begin_ = 0;
  int hidden_ = -1, head_input_ = -1, logits_ = -1, vocab_rows_ = 0, position_rows_ = 0, received_width_ = 0, scored_positions_ = 0;
  size_t arena_floats_ = 0, workspace_bytes_ = 0, total_bytes_ = 0;

  std::mutex running_;
  HugeBuffer arena_, workspace_;
  std::vector<int32_t> token_block_, token_offset_, table_rows_, best_;
  std::vector<float> maxima_;  // of the rows of logits
  std::vector<int32_t> expert_begin_, expert_rows_;  // by expert: the start of its tokens' (token, place) pairs
  Tails tails_;
  Adapters adapters_;
  std::vector<Norm> row_norms_;
  std::vector<QueryView> views_;
  std::vector<int32_t> plain_cu_q_, plain_lengths_, plain_slots_, plain_order_;
  std::vector<StateSeq> state_seqs_;
  std::vector<StateMark> state_marks_;
  std::vector<float> raw_, low_;  // of products with adapters: before the activation, and between their two products
  std::vector<LinearArgs> products_;
  std::vector<ProductTask> tasks_;
  std::vector<int> task_ends_;         // of groups
  std::vector<const float*> added_;    // LinearArgs::added
  HugeBuffer own_workspace_;
  size_t own_workspace_bytes_ = 0;
  SharedPrefixes prefixes_, tail_prefixes_;
  StepInput step_{}, tail_step_{};
  int num_logit_rows_ = 0, head_start_ = 0, head_rows_ = 0;
  bool greedy_ = false;
  int unscreened_ = 0;  // products of the head that will skip its screen
};

}  // namespace quire
