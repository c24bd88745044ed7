// Recording a plan and laying out its arena. Knows shapes and lifetimes; plan_run.cpp executes.
#include "plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace quire {

namespace {

constexpr size_t kAlignFloats = 16;  // 64 bytes

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

void check_norm(const NormParams& norm, int width) {
  require(int(norm.weight.size()) == width && (norm.bias.empty() || int(norm.bias.size()) == width),
          "a norm's weight has " + std::to_string(norm.weight.size()) + " elements, its input " +
              std::to_string(width));
}

}  // namespace

Plan::Plan(const Kernels& kernels, std::shared_ptr<ThreadPool> pool, int num_layers, int num_kv_heads, int head_dim,
           StepLimits limits)
    : kernels_(kernels),
      pool_(std::move(pool)),
      num_layers_(num_layers),
      num_kv_heads_(num_kv_heads),
      head_dim_(head_dim),
      limits_(limits) {
  require(limits.max_tokens > 0 && limits.max_seqs > 0 && limits.max_logit_rows > 0,
          "limits of a plan must be at least 1 token, 1 sequence and 1 row of logits");
}

int Plan::add_buffer(int width, RowKind rows) {
  const int id = int(buffers_.size()), op = int(ops_.size());
  buffers_.push_back({width, rows, op, op, id});
  return id;
}

int Plan::add_op(Op op, int width, RowKind rows) {
  const int now = int(ops_.size());
  for (const int used : {op.in, op.residual, op.angles})
    if (used >= 0) buffers_[size_t(used)].last_op = now;
  op.out = add_buffer(width, rows);
  ops_.push_back(std::move(op));
  return ops_.back().out;
}

const Plan::Buffer& Plan::checked(int buffer, const char* what) const {
  require(buffer >= 0 && buffer < int(buffers_.size()), std::string(what) + " is not a tensor of this plan");
  require(logits_ < 0, "the plan is already finished");
  return buffers_[size_t(buffer)];
}

int Plan::width(int buffer) const { return buffers_.at(size_t(buffer)).width; }

int Plan::embed(std::shared_ptr<PackedMatrix> table, float scale) {
  const MatrixView view = table->view();
  require(!view.gated, "an embedding table cannot be a gated weight");
  vocab_rows_ = vocab_rows_ == 0 ? view.rows : std::min(vocab_rows_, view.rows);
  Op op{.kind = OpKind::embed};
  op.weight = std::move(table);
  op.scale = scale;
  return add_op(std::move(op), view.cols, RowKind::tokens);
}

int Plan::norm(int x, NormParams params) {
  const Buffer in = checked(x, "the input of norm");
  check_norm(params, in.width);
  Op op{.kind = OpKind::norm, .in = x};
  op.norm = std::move(params);
  return add_op(std::move(op), in.width, in.rows);
}

int Plan::linear(int x, std::shared_ptr<PackedMatrix> weight, const std::vector<float>& bias, Activation activation,
                 int residual) {
  const Buffer in = checked(x, "the input of linear");
  const MatrixView view = weight->view();
  const int width = view.gated ? view.rows / 2 : view.rows;
  require(in.width == view.cols, "linear: the input has " + std::to_string(in.width) + " columns, the weight " +
                                     std::to_string(view.cols));
  require(bias.empty() || int(bias.size()) == view.rows, "linear: the bias has " + std::to_string(bias.size()) +
                                                             " elements, the weight " + std::to_string(view.rows) +
                                                             " rows");
  if (residual >= 0) {
    const Buffer& r = checked(residual, "the residual of linear");
    require(r.width == width && r.rows == in.rows, "linear: the residual's shape is not the output's");
  }
  Op op{.kind = OpKind::linear, .in = x, .residual = residual};
  op.activation = activation;
  if (!bias.empty()) {
    op.vector.assign(size_t(view.panels()) * 16, 0.0f);
    for (int i = 0; i < view.panels() * 16; ++i)
      if (const int row = source_row(view, i / 16, i % 16); row >= 0) op.vector[size_t(i)] = bias[size_t(row)];
  }
  op.weight = std::move(weight);
  return add_op(std::move(op), width, in.rows);
}

int Plan::rope(std::vector<float> inv_freq, float scale) {
  require(!inv_freq.empty(), "rope needs at least one frequency");
  const int width = 2 * int(inv_freq.size());
  Op op{.kind = OpKind::rope};
  op.vector = std::move(inv_freq);
  op.scale = scale;
  return add_op(std::move(op), width, RowKind::tokens);
}

int Plan::store_kv(int qkv, int layer, int num_heads, int angles, NormParams q_norm, NormParams k_norm) {
  const Buffer in = checked(qkv, "the input of store_kv");
  require(in.rows == RowKind::tokens, "store_kv needs one row per token");
  require(layer >= 0 && layer < num_layers_, "store_kv: layer " + std::to_string(layer) + " is not in the cache");
  require(num_heads > 0 && num_heads % num_kv_heads_ == 0, "query heads must be a multiple of key/value heads");
  require(in.width == (num_heads + 2 * num_kv_heads_) * head_dim_, "store_kv: the input is not [T, (N + 2 G) H]");
  require(head_dim_ * 4 <= int(ThreadPool::kScratchBytes), "store_kv: head_dim is too large");
  if (angles >= 0) {
    const Buffer& a = checked(angles, "the angles of store_kv");
    require(a.rows == RowKind::tokens && a.width <= head_dim_ && a.width % 2 == 0,
            "store_kv: angles must be [T, rotary_dim] with an even rotary_dim of at most head_dim");
  }
  if (q_norm.present()) check_norm(q_norm, head_dim_);
  if (k_norm.present()) check_norm(k_norm, head_dim_);
  Op op{.kind = OpKind::store_kv, .in = qkv};
  op.angles = angles;
  op.norm = std::move(q_norm);
  op.k_norm = std::move(k_norm);
  op.layer = layer;
  op.num_heads = num_heads;
  return add_op(std::move(op), num_heads * head_dim_, RowKind::tokens);
}

int Plan::attention(int q, int layer, int num_heads, float scale, int window) {
  const Buffer in = checked(q, "the input of attention");
  require(in.rows == RowKind::tokens && in.width == num_heads * head_dim_, "attention: the input is not [T, N H]");
  require(layer >= 0 && layer < num_layers_, "attention: layer " + std::to_string(layer) + " is not in the cache");
  require(num_heads > 0 && num_heads % num_kv_heads_ == 0, "query heads must be a multiple of key/value heads");
  require(window >= 0, "attention: a window must be at least 1 token");
  Op op{.kind = OpKind::attention, .in = q};
  op.layer = layer;
  op.num_heads = num_heads;
  op.scale = scale;
  op.window = window;
  return add_op(std::move(op), in.width, RowKind::tokens);
}

int Plan::select_rows(int x) {
  const Buffer in = checked(x, "the input of select_rows");
  require(in.rows == RowKind::tokens, "select_rows needs one row per token");
  return add_op(Op{.kind = OpKind::select_rows, .in = x}, in.width, RowKind::logit_rows);
}

int Plan::begin_head(int hidden) {
  const Buffer in = checked(hidden, "the result of hidden");
  require(in.rows == RowKind::logit_rows, "hidden must end in rows picked by select_rows");
  require(hidden_ < 0, "begin_head was called before");
  hidden_ = hidden;
  head_begin_ = ops_.size();
  // Shares the memory of hidden: data() adds the first row of the call.
  head_input_ = add_buffer(in.width, RowKind::head_rows);
  buffers_[size_t(head_input_)].root = hidden;
  return head_input_;
}

void Plan::finish(int logits) {
  const Buffer out = checked(logits, "the logits");
  require(hidden_ >= 0 && out.rows == RowKind::head_rows && logits != head_input_, "the head computes no logits");
  logits_ = logits;
  for (const int kept : {hidden_, logits_}) buffers_[size_t(kept)].last_op = int(ops_.size());
  share_residuals();
  place_buffers();
  workspace_bytes_ = shared_workspace();
  total_bytes_ = arena_floats_ * 4 + workspace_bytes_ + size_t(limits_.max_tokens) * 3 * sizeof(int32_t);
}

size_t Plan::max_rows(RowKind rows) const {
  return size_t(rows == RowKind::head_rows ? limits_.max_logit_rows : limits_.max_tokens);
}

size_t Plan::buffer_floats(const Buffer& buffer) const {
  const size_t floats = size_t(buffer.width) * max_rows(buffer.rows);
  return (floats + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
}

// A residual that nobody reads later is added to in place: one buffer less, and its lines are warm.
void Plan::share_residuals() {
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    if (op.kind != OpKind::linear || op.residual < 0 || op.residual == op.in) continue;
    const Buffer& residual = buffers_[size_t(op.residual)];
    Buffer& out = buffers_[size_t(op.out)];
    if (residual.last_op != int(i) || residual.rows != out.rows || op.residual == head_input_) continue;
    out.root = residual.root;
    Buffer& root = buffers_[size_t(out.root)];
    root.last_op = std::max(root.last_op, out.last_op);
  }
  buffers_[size_t(head_input_)].root = buffers_[size_t(hidden_)].root;
}

// Greedy by size (largest first): each buffer at the lowest offset that is free during its life.
void Plan::place_buffers() {
  std::vector<int> order;
  for (int i = 0; i < int(buffers_.size()); ++i)
    if (buffers_[size_t(i)].root == i) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [this](int a, int b) {
    return buffer_floats(buffers_[size_t(a)]) > buffer_floats(buffers_[size_t(b)]);
  });
  std::vector<int> placed;
  for (const int id : order) {
    Buffer& buffer = buffers_[size_t(id)];
    std::vector<const Buffer*> busy;
    for (const int other : placed) {
      const Buffer& b = buffers_[size_t(other)];
      if (b.first_op <= buffer.last_op && buffer.first_op <= b.last_op) busy.push_back(&b);
    }
    std::sort(busy.begin(), busy.end(), [](const Buffer* a, const Buffer* b) { return a->offset < b->offset; });
    size_t offset = 0;
    for (const Buffer* b : busy)
      if (b->offset < offset + buffer_floats(buffer)) offset = std::max(offset, b->offset + buffer_floats(*b));
    buffer.offset = offset;
    arena_floats_ = std::max(arena_floats_, offset + buffer_floats(buffer));
    placed.push_back(id);
  }
}

// Ops run one after the other, so one region serves them all.
size_t Plan::shared_workspace() const {
  size_t bytes = 0;
  for (const Op& op : ops_) {
    if (op.kind == OpKind::linear)
      bytes = std::max(bytes, kernels_.linear_workspace(op.weight->view(), int(max_rows(buffers_[size_t(op.out)].rows))));
    if (op.kind == OpKind::attention)
      bytes = std::max(bytes, kernels_.attention_workspace({limits_.max_tokens, limits_.max_seqs, op.num_heads,
                                                            num_kv_heads_, head_dim_, pool_->threads()}));
  }
  return bytes;
}

void Plan::bind(std::shared_ptr<KVStore> kv) {
  const KVView& view = kv->view();
  require(logits_ >= 0, "the plan is not finished");
  require(view.num_layers == num_layers_ && view.num_kv_heads == num_kv_heads_ && view.head_dim == head_dim_,
          "the KV cache has another shape than the plan");
  for (const Op& op : ops_)
    require(!op.weight || op.weight->view().data != nullptr, "the plan was made with outlines of weights: load them");
  arena_ = HugeBuffer(arena_floats_ * 4);
  workspace_ = HugeBuffer(workspace_bytes_);
  token_block_.resize(size_t(limits_.max_tokens));
  token_offset_.resize(size_t(limits_.max_tokens));
  logit_rows_.resize(size_t(limits_.max_tokens));
  kv_ = std::move(kv);
}

}  // namespace quire
