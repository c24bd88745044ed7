// Records a plan and lays out its arena. Knows shapes and lifetimes; plan_run.cpp executes.
#include "plan/plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

namespace quire {

namespace {

constexpr size_t kAlignFloats = 16;  // 64 bytes
constexpr int64_t kMaxWidth = 1 << 27;  // columns of a tensor
constexpr int64_t kMaxRoutes = 1 << 30;  // of a step: tokens times experts of each

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

std::vector<float> packed_bias(const MatrixView& view, const std::vector<float>& bias) {
  require(bias.empty() || int(bias.size()) == view.rows, "linear: the bias has " + std::to_string(bias.size()) +
                                                             " elements, the weight " + std::to_string(view.rows) +
                                                             " rows");
  if (bias.empty()) return {};
  std::vector<float> packed(size_t(view.panels()) * 16, 0.0f);
  for (int i = 0; i < view.panels() * 16; ++i)
    if (const int row = source_row(view, i / 16, i % 16); row >= 0) packed[size_t(i)] = bias[size_t(row)];
  return packed;
}

}  // namespace

void NormParams::check(int64_t width) const {
  require(std::isfinite(eps), "a norm's eps is not finite");
  require(int64_t(weight.size()) == width && (bias.empty() || int64_t(bias.size()) == width),
          "a norm's weight has " + std::to_string(weight.size()) + " elements, its input " + std::to_string(width));
}

Norm NormParams::view() const {
  if (!present()) return {};
  return {rms, weight.data(), bias.empty() ? nullptr : bias.data(), eps};
}

Plan::Plan(const Kernels& kernels, std::shared_ptr<ThreadPool> pool, std::vector<KVLayer> layers, StepLimits limits)
    : kernels_(kernels), pool_(std::move(pool)), layers_(std::move(layers)), limits_(limits), adapters_(limits.max_adapters) {
  bool fits = !layers_.empty();
  for (const KVLayer& layer : layers_)
    fits = fits && layer.num_kv_heads >= 0 && layer.head_dim > 0 && layer.value_dim >= 0 && layer.value_dim <= layer.head_dim &&
           layer.every > 0 &&
           int64_t(layer.num_kv_heads) * layer.head_dim <= kMaxWidth;
  require(fits, "a plan needs layers, key/value heads and a head size of at least 1, and of sizes that fit");
  require(limits.max_tokens > 0 && limits.max_seqs > 0 && limits.max_logit_rows > 0,
          "limits of a plan must be at least 1 token, 1 sequence and 1 row of logits");
}

int Plan::add_buffer(int64_t width, RowKind rows) {
  require(width > 0 && width <= kMaxWidth, "a tensor of the plan would have " + std::to_string(width) + " columns");
  const int id = int(buffers_.size());
  buffers_.push_back({int(width), rows, id});
  return id;
}

int Plan::add_op(Op op, int64_t width, RowKind rows) {
  op.out = add_buffer(width, rows);
  ops_.push_back(std::move(op));
  return ops_.back().out;
}

const Plan::Buffer& Plan::checked(int buffer, const char* what) const {
  require(buffer >= 0 && buffer < int(buffers_.size()), std::string(what) + " is not a tensor of this plan");
  require(!finished_, "the plan is already finished");
  return buffers_[size_t(buffer)];
}

int Plan::width(int buffer) const { return buffers_.at(size_t(buffer)).width; }

int Plan::embed(std::shared_ptr<PackedMatrix> table, float scale) {
  const MatrixView view = table->view();
  require(!view.gated, "an embedding table cannot be a gated weight");
  require(!view.format.inputs && view.format.nonzeros == 0,
          "an embedding table has no order of columns of its own, and no sparse part");
  vocab_rows_ = vocab_rows_ == 0 ? view.rows : std::min(vocab_rows_, view.rows);
  Op op{.kind = OpKind::embed};
  op.weight = std::move(table);
  op.scale = scale;
  return add_op(std::move(op), view.cols, RowKind::tokens);
}

int Plan::embed_positions(std::shared_ptr<PackedMatrix> table, int offset) {
  const MatrixView view = table->view();
  require(!view.gated, "an embedding table cannot be a gated weight");
  require(offset >= 0 && offset < view.rows, "embed_positions: the offset leaves no position");
  position_rows_ = position_rows_ == 0 ? view.rows - offset : std::min(position_rows_, view.rows - offset);
  Op op{.kind = OpKind::embed_positions};
  op.weight = std::move(table);
  op.offset = offset;
  return add_op(std::move(op), view.cols, RowKind::tokens);
}

int Plan::add(int x, int other, float scale) {
  const Buffer in = checked(x, "the input of add"), second = checked(other, "the second input of add");
  require(in.width == second.width && in.rows == second.rows, "add: the inputs have different shapes");
  Op op{.kind = OpKind::add, .in = x, .other = other};
  op.scale = scale;
  return add_op(std::move(op), in.width, in.rows);
}

int Plan::scale(int x, float scale, float cap) {
  const Buffer in = checked(x, "the input of scale");
  Op op{.kind = OpKind::scale, .in = x};
  op.scale = scale;
  op.cap = cap;
  return add_op(std::move(op), in.width, in.rows);
}

int Plan::norm(int x, NormParams params, int groups) {
  const Buffer in = checked(x, "the input of norm");
  params.check(in.width);
  require(groups > 0 && in.width % groups == 0, "norm: a row is not of that many equal groups");
  Op op{.kind = OpKind::norm, .in = x};
  op.groups = groups;
  op.norm = std::move(params);
  op.norm_place = int(buffers_.size());
  return add_op(std::move(op), in.width, in.rows);
}

int Plan::linear(int x, std::shared_ptr<PackedMatrix> weight, const std::vector<float>& bias, Activation activation,
                 int residual, float limit) {
  const Buffer in = checked(x, "the input of linear");
  const MatrixView view = weight->view();
  const int width = view.gated ? view.rows / 2 : view.rows;
  require(in.width == view.cols, "linear: the input has " + std::to_string(in.width) + " columns, the weight " +
                                     std::to_string(view.cols));
  if (residual >= 0) {
    const Buffer& r = checked(residual, "the residual of linear");
    require(r.width == width && r.rows == in.rows, "linear: the residual's shape is not the output's");
  }
  Op op{.kind = OpKind::linear, .in = x, .residual = residual};
  require(std::isfinite(limit) && limit >= 0 && (limit == 0 || view.gated), "linear: only gated weights have a limit");
  op.activation = activation;
  op.limit = limit;
  op.vector = packed_bias(view, bias);
  op.weight = std::move(weight);
  return add_op(std::move(op), width, in.rows);
}

int Plan::rope(std::vector<float> inv_freq, float scale) {
  require(!inv_freq.empty(), "rope needs at least one frequency");
  const int64_t width = 2 * int64_t(inv_freq.size());
  Op op{.kind = OpKind::rope};
  op.vector = std::move(inv_freq);
  op.scale = scale;
  return add_op(std::move(op), width, RowKind::tokens);
}

int Plan::head_linear(int x, std::vector<std::shared_ptr<PackedMatrix>> weights, const std::vector<float>& bias,
                      Activation activation) {
  const Buffer in = checked(x, "the input of head_linear");
  require(!weights.empty(), "head_linear needs a weight for each head");
  const int rows = weights.front()->view().rows, cols = weights.front()->view().cols;
  for (const auto& weight : weights) {
    const MatrixView v = weight->view();
    require(!v.gated && v.rows == rows && v.cols == cols, "head_linear: the weights have different shapes");
  }
  require(in.width == int64_t(cols) * int64_t(weights.size()), "head_linear: the input is not [T, N K]");
  const int64_t width = int64_t(rows) * int64_t(weights.size());
  require(bias.empty() || int64_t(bias.size()) == width, "head_linear: the bias is not [N O]");
  Op op{.kind = OpKind::head_linear, .in = x};
  op.activation = activation;
  for (size_t n = 0; n * size_t(rows) < bias.size(); ++n) {
    const auto own = bias.begin() + int64_t(n) * rows;
    const std::vector<float> packed = packed_bias(weights[n]->view(), {own, own + rows});
    op.vector.insert(op.vector.end(), packed.begin(), packed.end());
  }
  op.weights = std::move(weights);
  return add_op(std::move(op), width, in.rows);
}

int Plan::route(int scores, RoutingParams params, int ids) {
  const Buffer in = checked(scores, "the input of route");
  const RoutingParams& p = params;
  require(p.num_experts > 0 && in.width == int64_t(p.num_experts) + (p.shared && p.shared_gate ? 1 : 0),
          "route: the scores are not [T, experts]");
  require(p.num_groups > 0 && p.num_experts % p.num_groups == 0 && p.top_groups > 0 && p.top_groups <= p.num_groups,
          "route: groups of experts must be equal and some of them chosen");
  require(p.top_k > 0 && p.top_k <= p.num_experts / p.num_groups * p.top_groups, "route: too many experts a token");
  require(p.correction.empty() || int(p.correction.size()) == p.num_experts, "route: one correction an expert");
  require(std::isfinite(p.scale) && std::isfinite(p.sparse_mixer) && p.floor > 0, "route: the scale is not finite");
  require(int64_t(limits_.max_tokens) * p.chosen() <= kMaxRoutes, "route: too many experts for so many tokens");
  require(p.weight_scales.empty() || int(p.weight_scales.size()) == p.num_experts, "route: one scale an expert");
  if (ids >= 0) {
    const Buffer given = checked(ids, "the ids of route");
    require(given.width == p.top_k && given.rows == in.rows && p.sparse_mixer == 0, "route: the ids are not [T, top_k]");
  }
  const int width = 2 * p.chosen();
  Op op{.kind = OpKind::route, .in = scores, .other = ids};
  op.routing = std::move(params);
  return add_op(std::move(op), width, in.rows);
}

int Plan::experts(int x, int routes, std::vector<ExpertWeights> experts, Activation activation, bool weigh_inputs) {
  const Buffer in = checked(x, "the input of experts"), chosen = checked(routes, "the routes of experts");
  require(in.rows == chosen.rows && in.rows == RowKind::tokens, "experts: as many routes as rows, one per token");
  const auto route = std::find_if(ops_.begin(), ops_.end(), [&](const Op& op) { return op.out == routes; });
  require(route != ops_.end() && route->kind == OpKind::route, "experts: the routes are not those of a router");
  const auto real = std::find_if(experts.begin(), experts.end(), [](const ExpertWeights& e) { return bool(e.up); });
  const int width = real == experts.end() ? in.width : real->down->view().rows;
  const size_t named = size_t(route->routing.num_experts) + (route->routing.shared ? 1 : 0);
  require(experts.size() == named, "experts: there are " + std::to_string(experts.size()) + ", the router names " +
                                       std::to_string(named));
  for (ExpertWeights& e : experts) {
    require(std::isfinite(e.limit) && e.limit >= 0, "experts: a limit is not a number from 0 on");
    require(e.up || width == in.width, "experts: one returns its input, and the others have another width");
    if (!e.up) continue;
    const MatrixView up = e.up->view(), down = e.down->view();
    require(up.cols == in.width && down.rows == width && !down.gated, "experts: a weight is not of the input's width");
    require(down.cols == (up.gated ? up.rows / 2 : up.rows), "experts: the projections do not fit each other");
    e.up_bias = packed_bias(up, e.up_bias);
    e.down_bias = packed_bias(down, e.down_bias);
  }
  Op op{.kind = OpKind::experts, .in = x, .other = routes};
  op.experts = std::move(experts);
  op.activation = activation;
  op.weigh_inputs = weigh_inputs;
  return add_op(std::move(op), width, RowKind::tokens);
}

int Plan::select_rows(int x) {
  const Buffer in = checked(x, "the input of select_rows");
  require(in.rows == RowKind::tokens, "select_rows needs one row per token");
  return add_op(Op{.kind = OpKind::select_rows, .in = x}, in.width, RowKind::logit_rows);
}

int Plan::receive(int width) {
  require(!finished_ && width > 0 && received_width_ == 0, "receive: a plan takes hidden states once, of some width");
  received_width_ = width;
  return add_op(Op{.kind = OpKind::receive}, width, RowKind::tokens);
}

void Plan::tap(int x) {
  require(checked(x, "the input of tap").rows == RowKind::tokens, "tap needs one row per token");
  taps_.push_back(x);
}

int Plan::begin_head(int hidden) {
  const Buffer in = checked(hidden, "the result of hidden");
  require(in.rows == RowKind::logit_rows, "hidden must end in rows picked by select_rows");
  require(hidden_ < 0, "begin_head was called before");
  hidden_ = hidden;
  head_begin_ = ops_.size();
  // Shares the memory of hidden: data() adds the first row of the current call.
  head_input_ = add_buffer(in.width, RowKind::head_rows);
  buffers_[size_t(head_input_)].root = hidden;
  return head_input_;
}

void Plan::finish(int logits) {
  if (logits < 0) {
    require(hidden_ < 0 && !taps_.empty() && !finished_, "a plan without a head must be tapped");
    head_begin_ = ops_.size();
  } else {
    const Buffer out = checked(logits, "the logits");
    require(hidden_ >= 0 && out.rows == RowKind::head_rows && logits != head_input_, "the head computes no logits");
  }
  logits_ = logits;
  finished_ = true;
  keep_tails();
  fuse_norms();
  find_lives();
  share_buffers();
  place_buffers();
  workspace_bytes_ = shared_workspace();
  total_bytes_ = arena_floats_ * 4 + workspace_bytes_ + size_t(limits_.max_tokens) * 4 * sizeof(int32_t);
  if (product_makes_logits()) total_bytes_ += size_t(limits_.max_logit_rows) * (maxima_of(width(logits_)) + 1) * 4;
  total_bytes_ += raw_floats() * 4;
}

bool Plan::product_makes_logits() const {
  return logits_ >= 0 && ops_.back().out == logits_ && ops_.back().kind == OpKind::linear && !ops_.back().weight->view().gated;
}

size_t Plan::max_rows(RowKind rows) const {
  return size_t(rows == RowKind::head_rows ? limits_.max_logit_rows : limits_.max_tokens);
}

size_t Plan::buffer_floats(const Buffer& buffer) const {
  const size_t floats = size_t(buffer.width) * max_rows(buffer.rows);
  return (floats + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
}

// Moves ops to the tails if no stored value depends on their result; inputs that cover all tokens are reduced to the
// rows of the tails first.
void Plan::keep_tails() {
  std::vector<bool> whole(buffers_.size());  // needed for all tokens
  for (const int tap : taps_) whole[size_t(tap)] = true;
  for (auto op = ops_.rbegin(); op != ops_.rend(); ++op) {
    const OpKind kind = op->kind;
    if (kind == OpKind::embed || kind == OpKind::embed_positions || kind == OpKind::rope || kind == OpKind::store_kv ||
        kind == OpKind::store_latent || kind == OpKind::receive || kind == OpKind::relative_scores ||
        kind >= OpKind::store_keys || reads_positions(*op))
      // These read the arrays of the whole step.
      whole[size_t(op->out)] = true;
    if (!whole[size_t(op->out)]) continue;
    for (const int* used : op->inputs())
      if (*used >= 0) whole[size_t(*used)] = true;
  }
  std::vector<int> tails(buffers_.size(), -1);  // by buffer: its rows of the tails, once taken
  std::vector<Op> ops;
  for (Op& op : ops_) {
    RowKind& rows = buffers_[size_t(op.out)].rows;
    if (rows == RowKind::tokens && !whole[size_t(op.out)]) rows = RowKind::tails;
    const bool narrow = rows == RowKind::tails || op.kind == OpKind::select_rows;
    for (int* used : op.inputs()) {
      if (!narrow || *used < 0 || buffers_[size_t(*used)].rows != RowKind::tokens) continue;
      int& taken = tails[size_t(*used)];
      if (taken < 0) {
        taken = add_buffer(width(*used), RowKind::tails);
        ops.push_back(Op{.kind = OpKind::tails, .in = *used, .out = taken});
        ++head_begin_;
      }
      *used = taken;
    }
    ops.push_back(std::move(op));
  }
  ops_ = std::move(ops);
}

// Fuses a norm into the only product that reads it, where that packs its rows: saves a pass and a barrier.
void Plan::fuse_norms() {
  std::vector<int> readers(buffers_.size());
  for (Op& op : ops_)
    for (const int* used : op.inputs())
      if (*used >= 0) ++readers[size_t(*used)];
  for (const int tap : taps_) ++readers[size_t(tap)];
  std::vector<int> norms(buffers_.size(), -1);  // by buffer: the norm that makes it
  std::vector<bool> fused(ops_.size());
  for (size_t i = 0; i < ops_.size(); ++i) {
    Op& op = ops_[i];
    // The rows of a tile must fit in scratch memory beside their rounded form.
    const bool fits = size_t(width(op.out)) * 16 * 4 <= ThreadPool::kScratchBytes / 2;
    if (op.kind == OpKind::norm && op.out != hidden_ && readers[size_t(op.out)] == 1 && fits && op.groups == 1)
      norms[size_t(op.out)] = int(i);
    if (op.kind != OpKind::linear || norms[size_t(op.in)] < 0) continue;
    Op& norm = ops_[size_t(norms[size_t(op.in)])];
    op.in = norm.in;
    op.norm = std::move(norm.norm);
    op.norm_place = norm.norm_place;
    fused[size_t(&norm - ops_.data())] = true;
  }
  std::vector<Op> ops;
  size_t before_head = 0;
  for (size_t i = 0; i < ops_.size(); ++i) {
    if (fused[i]) continue;
    before_head += i < head_begin_;
    ops.push_back(std::move(ops_[i]));
  }
  ops_ = std::move(ops);
  head_begin_ = before_head;
}

void Plan::find_lives() {
  for (size_t i = 0; i < ops_.size(); ++i) {
    for (const int* used : ops_[i].inputs())
      if (*used >= 0) buffers_[size_t(*used)].last_op = int(i);
    Buffer& out = buffers_[size_t(ops_[i].out)];
    out.first_op = out.last_op = int(i);
  }
  std::vector<int> kept = taps_;
  if (logits_ >= 0) kept.insert(kept.end(), {hidden_, logits_});
  for (const int buffer : kept) buffers_[size_t(buffer)].last_op = int(ops_.size());
}

// Changes a buffer in place if nothing reads it later: a residual that is added to, the source of tails, or a rank's part
// of a sum. Saves a buffer, and its cache lines are warm.
void Plan::share_buffers() {
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    Buffer& out = buffers_[size_t(op.out)];
    const bool moves = op.kind == OpKind::tails || op.kind == OpKind::all_reduce;
    const bool adds = op.kind == OpKind::linear || op.kind == OpKind::mix;
    const int changed = adds ? op.residual : moves ? op.in : -1;
    if (changed < 0 || changed == head_input_ || buffers_[size_t(changed)].last_op != int(i)) continue;
    if (adds && (op.residual == op.in || buffers_[size_t(changed)].rows != out.rows)) continue;
    out.root = buffers_[size_t(changed)].root;
    Buffer& root = buffers_[size_t(out.root)];
    root.last_op = std::max(root.last_op, out.last_op);
  }
  if (logits_ >= 0) buffers_[size_t(head_input_)].root = buffers_[size_t(hidden_)].root;
}

// Greedy by size, largest first: each buffer goes to the lowest offset that is free during its life.
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
    const int rows = int(max_rows(buffers_[size_t(op.out)].rows));
    if (op.kind == OpKind::linear) bytes = std::max(bytes, kernels_.linear_workspace(op.weight->view(), rows));
    if (op.kind == OpKind::attention)
      bytes = std::max(bytes, attention_workspace(op));
    if (op.kind == OpKind::choose)
      bytes = std::max(bytes, kernels_.choose_workspace(rows, op.num_heads, op.sparse.groups, width(op.in) / op.num_heads,
                                                        op.sparse.top_k, pool_->threads()));
    for (const auto& weight : op.weights) bytes = std::max(bytes, kernels_.linear_workspace(weight->view(), rows));
    if (op.kind == OpKind::experts) bytes = std::max(bytes, expert_workspace(op));
  }
  return bytes;
}

void Plan::bind(std::shared_ptr<KVStore> kv) {
  require(finished_, "the plan is not finished");
  require(kv->layers() == layers_, "the KV cache has another shape than the plan");
  auto loaded = [](const std::shared_ptr<PackedMatrix>& weight) { return !weight || weight->view().data != nullptr; };
  for (const Op& op : ops_) {
    bool whole = loaded(op.weight);
    for (const auto& weight : op.weights) whole = whole && loaded(weight);
    for (const ExpertWeights& e : op.experts) whole = whole && loaded(e.up) && loaded(e.down);
    require(whole, "the plan was made with outlines of weights: load them");
    const bool exchanges = op.kind == OpKind::all_reduce || op.kind == OpKind::all_gather;
    require(!exchanges || op.peers, "the plan was made without the other ranks");
  }
  arena_ = HugeBuffer(arena_floats_ * 4);
  workspace_ = HugeBuffer(workspace_bytes_);
  token_block_.resize(size_t(limits_.max_tokens));
  token_offset_.resize(size_t(limits_.max_tokens));
  table_rows_.resize(size_t(limits_.max_tokens));
  if (product_makes_logits()) {
    best_.resize(size_t(limits_.max_logit_rows));
    maxima_.resize(best_.size() * maxima_of(width(logits_)));
  }
  kv_ = std::move(kv);
}

}  // namespace quire
