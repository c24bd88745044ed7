// Products, embeddings and norms of a plan whose rows adapters change. Knows ops and buffers; the base's kernels compute
// all rows, so rows without an adapter keep their bits.
//
// Exactness: what an adapter adds to a row depends on that row alone, in an order that depends on no other row.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>

#include "plan/plan.h"

namespace quire {

namespace {

constexpr int64_t kTaskWork = 1 << 16;  // multiply-adds of one task of a small product, about
constexpr int kTaskPanels = 4;          // of one task, at least

// Splits a product into tasks; neighbouring tasks share panels of the weight.
void add_tasks(const LinearArgs& product, int most_rows, std::vector<ProductTask>& tasks) {
  const int padded = product.weight.padded_cols(), panels = product.weight.panels();
  const size_t row_bytes = size_t(padded) * 2 * sizeof(float);  // normed and packed
  const int rows = std::clamp(int(ThreadPool::kScratchBytes / row_bytes), 1, most_rows);
  const int tile = std::min(rows, product.rows);
  const int64_t work = int64_t(tile) * padded * 16;
  const int width = std::max<int>(kTaskPanels, int(kTaskWork / work) / kTaskPanels * kTaskPanels);
  for (int first = 0; first < panels; first += width)
    for (int begin = 0; begin < product.rows; begin += rows)
      tasks.push_back({&product, begin, std::min(rows, product.rows - begin), first, std::min(panels, first + width)});
}

bool is_activated(const LinearArgs& args) { return args.weight.gated || args.activation != Activation::none; }

// Whether a change is a low-rank part alone, which the product can add before its activation.
bool is_inside(const LinearArgs& args, const AdapterChange& change) {
  return is_activated(args) && change.gain.empty() && change.shift.empty() && !change.weight && change.rank > 0;
}

// Whether the second products make each of `outputs` outputs once.
bool makes_all(const AdapterChange& change, int outputs) {
  int made = 0;
  for (const AdapterUp& up : change.ups) {
    if (up.start != made) return false;
    made += up.weight->view().rows;
  }
  return made == outputs;
}

const float* data_of(const std::vector<float>& values) { return values.empty() ? nullptr : values.data(); }

}  // namespace

void Plan::check_change(const AdapterPlace& place, const AdapterChange& change) const {
  auto require = [](bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(std::string("an adapter's change does not fit: ") + what);
  };
  const auto [out, index] = place;
  if (change.norm) {
    const auto normed = [&](const Op& op) { return op.norm_place == out; };
    const auto op = std::find_if(ops_.begin(), ops_.end(), normed);
    require(op != ops_.end(), "there is no such norm");
    change.norm->check(int64_t(op->norm.weight.size()));
    return;
  }
  const auto op = std::find_if(ops_.begin(), ops_.end(), [&](const Op& o) { return o.out == out; });
  require(op != ops_.end(), "there is no such product");
  const bool embeds = op->kind == OpKind::embed;
  std::shared_ptr<PackedMatrix> base = op->weight;
  if (op->kind == OpKind::experts) {
    require(index >= 0 && index / 2 < int(op->experts.size()), "there is no such expert");
    const ExpertWeights& e = op->experts[size_t(index / 2)];
    base = index % 2 ? e.down : e.up;
  }
  require(base != nullptr && (embeds || op->kind == OpKind::linear || op->kind == OpKind::experts), "no such weight");
  const MatrixView view = base->view();
  const int64_t inputs = embeds ? view.rows : view.cols, outputs = embeds ? view.cols : view.rows;
  require(!change.down || (!embeds && change.down->view().cols == inputs), "its first product takes other inputs");
  require(change.lookup.empty() || (embeds && int64_t(change.lookup.size()) == inputs * change.rank),
          "its table has another number of tokens");
  require(change.rank == 0 || embeds == !change.lookup.empty(), "its first product is of another kind");
  for (const AdapterUp& up : change.ups)
    require(up.start + up.weight->view().rows <= outputs, "its second product makes more outputs");
  require(change.gain.empty() || int64_t(change.gain.size()) == outputs, "its gain has another length");
  require(change.shift.empty() || int64_t(change.shift.size()) == outputs, "its bias has another length");
  if (change.weight) {
    const MatrixView own = change.weight->view();
    require(own.rows == view.rows && own.cols == view.cols && !own.gated && !view.gated &&
                op->activation == Activation::none && op->kind != OpKind::experts,
            "its weight has another shape, or stands before an activation");
  }
  const bool activated = view.gated || (op->kind == OpKind::linear && op->activation != Activation::none);
  require(change.bias.empty() || (op->kind == OpKind::linear && int(change.bias.size()) == view.panels() * 16 && !activated),
          "its whole bias has another length, or stands before an activation");
  require(!activated || op->residual < 0, "a residual after an activation");
}

void Plan::set_adapter(int slot, std::shared_ptr<const AdapterChanges> changes) {
  const std::lock_guard<std::mutex> lock(running_);
  adapters_.set(slot, std::move(changes));
}

// What activations need beside the arena: products before their activation.
size_t Plan::raw_floats() const {
  size_t floats = 0;
  if (limits_.max_adapters > 0)
    for (const Op& op : ops_) {
      size_t width = op.kind == OpKind::linear && needs_raw(*op.weight, op.activation) ? size_t(op.weight->view().rows) : 0;
      for (const ExpertWeights& e : op.experts)
        if (e.up) width = std::max(width, size_t(e.up->view().rows));
      floats = std::max(floats, width * max_rows(buffers_[size_t(op.out)].rows));
    }
  return floats;
}

bool Plan::needs_raw(const PackedMatrix& weight, Activation activation) {
  return weight.view().gated || activation != Activation::none;
}

std::vector<ChangedRows> Plan::changes(int place, RowKind kind) const {
  return place < 0 ? std::vector<ChangedRows>{} : adapters_.changes({place, 0}, kind, head_start_, head_rows_);
}

// The norm of each of `rows` rows; null: that of the base for all.
const Norm* Plan::row_norms(const Op& op, int rows, RowKind kind) {
  row_norms_.clear();
  for (const ChangedRows& c : changes(op.norm_place, kind)) {
    if (row_norms_.empty()) row_norms_.assign(size_t(rows), op.norm.view());
    std::fill_n(row_norms_.begin() + c.first, c.count, c.change->norm->view());
  }
  return row_norms_.empty() ? nullptr : row_norms_.data();
}

void Plan::execute_adapted(const Op& op, LinearArgs args) {
  const RowKind kind = buffers_[size_t(op.out)].rows;
  args.row_norms = row_norms(op, args.rows, kind);
  const std::vector<ChangedRows> changed = changes(op.out, kind);
  const bool logits = op.out == logits_ && !best_.empty();
  add_inside(args, changed);
  keep_raw(args, changed);
  if (logits) find_best(args, changed.empty());
  else kernels_.linear(args, *pool_);
  adapt(args, changed);
  if (logits)
    for (const ChangedRows& c : changed) std::fill_n(best_.begin() + c.first, c.count, -1);
}

void Plan::run_product(LinearArgs args, const std::vector<ChangedRows>& changed) {
  add_inside(args, changed);
  keep_raw(args, changed);
  kernels_.linear(args, *pool_);
  adapt(args, changed);
}

// Computes the low-rank parts that the product adds itself, before its activation.
void Plan::add_inside(LinearArgs& args, const std::vector<ChangedRows>& changed) {
  std::vector<AdapterTarget> targets;
  for (const ChangedRows& c : changed)
    if (is_inside(args, *c.change)) targets.push_back({c, nullptr, size_t(args.weight.rows)});
  if (targets.empty()) return;
  const size_t width = size_t(args.weight.rows);
  raw_.resize(std::max(raw_.size(), size_t(args.rows) * width));
  added_.assign(size_t(args.rows), nullptr);
  for (AdapterTarget& t : targets) {
    t.y = raw_.data() + size_t(t.rows.first) * width;
    t.fresh = makes_all(*t.rows.change, args.weight.rows);
    if (!t.fresh) std::fill_n(t.y, size_t(t.rows.count) * width, 0.0f);
    for (int r = 0; r < t.rows.count; ++r) added_[size_t(t.rows.first + r)] = t.y + size_t(r) * width;
  }
  add_low_rank(args, targets);
  args.added = added_.data();
}

// Lets the product leave its sums as they are before bias and activation, if an adapter needs them.
void Plan::keep_raw(LinearArgs& args, const std::vector<ChangedRows>& changed) {
  const bool needed = std::any_of(changed.begin(), changed.end(), [&](const ChangedRows& c) {
    return (is_activated(args) && !is_inside(args, *c.change)) || !c.change->gain.empty();
  });
  if (!needed) return;
  args.raw_stride = size_t(args.weight.rows);
  raw_.resize(std::max(raw_.size(), size_t(args.rows) * args.raw_stride));
  args.raw = raw_.data();
}

// What the product has not added itself.
void Plan::adapt(const LinearArgs& args, const std::vector<ChangedRows>& all) {
  std::vector<ChangedRows> changed;
  std::copy_if(all.begin(), all.end(), std::back_inserter(changed),
               [&](const ChangedRows& c) { return !is_inside(args, *c.change); });
  if (changed.empty()) return;
  const bool activated = is_activated(args);
  auto finish_rows = [&](const ChangedRows& c, Finish kind) {
    const AdapterChange& change = *c.change;
    float* raw = args.raw ? args.raw + size_t(c.first) * args.raw_stride : nullptr;
    kernels_.finish({kind, c.count, args.weight.gated ? args.weight.rows / 2 : args.weight.rows, args.weight.gated,
                     args.activation, args.bias, data_of(change.gain), data_of(change.shift), raw, args.raw_stride,
                     args.y + size_t(c.first) * args.y_stride, args.y_stride, args.limit},
                    *pool_);
  };
  for (const ChangedRows& c : changed) {
    if (c.change->weight || !c.change->bias.empty()) replace_product(args, c);
    if (activated) continue;
    if (!c.change->gain.empty()) finish_rows(c, Finish::prepare);
    else if (!c.change->shift.empty()) finish_rows(c, Finish::shift);
  }
  std::vector<AdapterTarget> targets;
  for (const ChangedRows& c : changed) {
    const bool to_raw = activated || !c.change->gain.empty();
    const size_t stride = to_raw ? args.raw_stride : args.y_stride;
    targets.push_back({c, (to_raw ? args.raw : args.y) + size_t(c.first) * stride, stride});
  }
  add_low_rank(args, targets);
  for (const ChangedRows& c : changed)
    if (activated) finish_rows(c, Finish::activate);
    else if (!c.change->gain.empty()) finish_rows(c, Finish::add);
}

// The product of rows whose adapter has a whole weight or bias of its own.
void Plan::replace_product(const LinearArgs& args, const ChangedRows& c) {
  LinearArgs own = args;
  if (c.change->weight) own.weight = c.change->weight->view();
  if (!c.change->bias.empty()) own.bias = c.change->bias.data();
  own.rows = c.count;
  own.x += size_t(c.first) * args.x_stride;
  own.y += size_t(c.first) * args.y_stride;
  if (own.row_norms) own.norm = own.row_norms[c.first];
  own.row_norms = nullptr;
  own.raw = nullptr, own.maxima = nullptr, own.added = nullptr;
  const size_t bytes = kernels_.linear_workspace(own.weight, own.rows);
  if (own_workspace_bytes_ < bytes) own_workspace_ = HugeBuffer(bytes), own_workspace_bytes_ = bytes;
  own.workspace = own_workspace_.data();
  kernels_.linear(own, *pool_);
}

// Adds (x down') up' to each target.
void Plan::add_low_rank(const LinearArgs& args, const std::vector<AdapterTarget>& targets) {
  size_t floats = 0;
  for (const AdapterTarget& t : targets) floats += size_t(t.rows.count) * size_t(t.rows.change->rank);
  if (floats == 0) return;
  low_.resize(std::max(low_.size(), floats));
  products_.clear();
  std::vector<size_t> starts;  // of each target's products: the first, which makes h, then those that read it
  float* low = low_.data();
  size_t work = 0, most = 0;
  for (const AdapterTarget& t : targets) {
    const AdapterChange& change = *t.rows.change;
    if (change.rank == 0) continue;
    starts.push_back(products_.size());
    LinearArgs down{};
    down.x = args.x + size_t(t.rows.first) * args.x_stride;
    down.x_stride = args.x_stride;
    down.rows = t.rows.count;
    down.norm = args.row_norms ? args.row_norms[t.rows.first] : args.norm;
    down.weight = change.down->view();
    down.y = low;
    down.y_stride = size_t(change.rank);
    products_.push_back(down);
    push_ups(t, low);
    low += size_t(t.rows.count) * size_t(change.rank);
    const size_t own = size_t(t.rows.count) * size_t(change.rank) * size_t(args.weight.cols + args.weight.rows);
    work += own, most = std::max(most, own);
  }
  starts.push_back(products_.size());
  if (most * size_t(2 * pool_->threads()) <= work) {  // a thread for each target: no one waits between its products
    for (size_t i = 0; i + 1 < starts.size(); ++i) {
      push_tasks(starts[i], starts[i + 1]);
      task_ends_.push_back(int(tasks_.size()));
    }
    return run_tasks();
  }
  for (size_t i = 0; i + 1 < starts.size(); ++i) push_tasks(starts[i], starts[i] + 1);
  run_tasks();
  for (size_t i = 0; i + 1 < starts.size(); ++i) push_tasks(starts[i] + 1, starts[i + 1]);
  run_tasks();
}

// The products that add h up' to a target, where `low` has its rows of h.
void Plan::push_ups(const AdapterTarget& t, const float* low) {
  for (const AdapterUp& part : t.rows.change->ups) {
    LinearArgs up{};
    up.x = low + part.first;
    up.x_stride = size_t(t.rows.change->rank);
    up.rows = t.rows.count;
    up.weight = part.weight->view();
    up.y = t.y + part.start;
    up.y_stride = up.residual_stride = t.stride;
    up.residual = t.fresh ? nullptr : up.y;
    products_.push_back(up);
  }
}

void Plan::push_tasks(size_t first, size_t last) {
  for (size_t i = first; i < last; ++i) add_tasks(products_[i], kernels_.product_rows, tasks_);
}

// Runs the tasks in their groups, or each by itself if there are none.
void Plan::run_tasks() {
  if (task_ends_.empty()) {
    task_ends_.resize(tasks_.size());
    std::iota(task_ends_.begin(), task_ends_.end(), 1);
  }
  if (!tasks_.empty()) kernels_.products(tasks_.data(), task_ends_.data(), int(task_ends_.size()), *pool_);
  tasks_.clear(), task_ends_.clear();
}

void Plan::adapt_embedding(const Op& op, float* out, size_t width) {
  std::vector<AdapterTarget> targets;
  size_t floats = 0;
  const std::vector<ChangedRows> changed = changes(op.out, RowKind::tokens);
  for (const ChangedRows& c : changed) {
    float* y = out + size_t(c.first) * width;
    if (c.change->weight)
      kernels_.embed({step_.tokens + c.first, c.count, c.change->weight->view(), op.scale, y, width}, *pool_);
    if (c.change->rank == 0) continue;
    targets.push_back({c, y, width});
    floats += size_t(c.count) * size_t(c.change->rank);
  }
  low_.resize(std::max(low_.size(), floats));
  products_.clear();
  float* low = low_.data();
  for (const AdapterTarget& t : targets) {
    const size_t rank = size_t(t.rows.change->rank);
    push_ups(t, low);
    for (int r = 0; r < t.rows.count; ++r, low += rank) {
      const float* row = t.rows.change->lookup.data() + size_t(step_.tokens[t.rows.first + r]) * rank;
      for (size_t i = 0; i < rank; ++i) low[i] = row[i] * op.scale;
    }
  }
  push_tasks(0, products_.size());
  run_tasks();
  for (const ChangedRows& c : changed)
    for (int r = 0; r < c.count && !c.change->gain.empty(); ++r)
      for (size_t i = 0; i < width; ++i) out[size_t(c.first + r) * width + i] *= c.change->gain[i];
}

}  // namespace quire
