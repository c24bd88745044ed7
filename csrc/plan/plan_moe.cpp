// Products of a plan with one weight per head or expert: routing, tokens grouped by expert, heads of latent attention.
// Knows ops and buffers; the linear kernel makes every product, in the weight's layout.
//
// Exactness: a token's routes depend on its scores alone; its experts' results are added in ascending order of expert.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "plan/plan.h"

namespace quire {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kTaskElements = 16384;     // that one task gathers or adds, about
constexpr int kFewRows = 8;              // of an expert, on average: all experts run together
constexpr size_t kExpertWorkspace = 512;  // what rounding up adds to the workspaces of an expert's products, at most

// Indices of the `count` largest values, largest first; the lower index first among equals.
void greatest(const float* values, int n, int count, std::vector<int>& chosen) {
  chosen.clear();
  for (int rank = 0; rank < count; ++rank) {
    int best = -1;
    for (int i = 0; i < n; ++i)
      if ((best < 0 || values[i] > values[best]) && std::find(chosen.begin(), chosen.end(), i) == chosen.end())
        best = i;
    chosen.push_back(best);
  }
}

void softmax(float* x, int n) {
  const float top = *std::max_element(x, x + n);
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - top);
  for (int i = 0; i < n; ++i) x[i] /= sum;
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// One token's experts and their weights. Working memory is kept between tokens.
class Router {
 public:
  explicit Router(const RoutingParams& params)
      : p_(params), weights_(size_t(p_.num_experts)), ranks_(weights_.size()) {}

  // out: ids, then weights. `given` are the ids, or null: scores choose them.
  void route(const float* scores, const float* given, float* out) {
    const int E = p_.num_experts, chosen = p_.chosen();
    std::copy(scores, scores + E, weights_.begin());
    if (p_.sparse_mixer > 0) return mix(scores, out);
    if (p_.sigmoid) {
      for (float& w : weights_) w = sigmoid(w);
    } else if (p_.root_softplus) {
      for (float& w : weights_) w = std::sqrt(std::max(w, 0.0f) + std::log1p(std::exp(-std::abs(w))));
    } else if (!p_.softmax_after) {
      softmax(weights_.data(), E);
    }
    if (given) take(given);
    else choose(scores);
    float* w = out + chosen;
    for (int i = 0; i < p_.top_k; ++i) {
      out[i] = float(picked_[size_t(i)]);
      w[i] = weights_[size_t(picked_[size_t(i)])];
    }
    if (p_.softmax_after) softmax(w, p_.top_k);
    float sum = 1;
    if (p_.renormalize) {
      sum = p_.floor;
      for (int i = 0; i < p_.top_k; ++i) sum += w[i];
    }
    for (int i = 0; i < p_.top_k; ++i) w[i] = w[i] / sum * p_.scale;
    for (int i = 0; i < p_.top_k && !p_.weight_scales.empty(); ++i) w[i] *= p_.weight_scales[size_t(picked_[size_t(i)])];
    if (p_.shared) {
      out[p_.top_k] = float(E);
      w[p_.top_k] = p_.shared_gate ? sigmoid(scores[E]) : 1.0f;
    }
  }

 private:
  // SparseMixer (Liu et al. 2023, arXiv:2310.00811): experts one by one, each by the largest remaining score; its
  // weight is its share of the remaining scores that are within the threshold.
  void mix(const float* scores, float* out) {
    const int E = p_.num_experts;
    for (int rank = 0; rank < p_.top_k; ++rank) {
      greatest(weights_.data(), E, 1, picked_);
      const int best = picked_[0];
      const float top = weights_[size_t(best)];
      float sum = 0;
      for (int e = 0; e < E; ++e) {
        const float w = weights_[size_t(e)];
        if ((top - scores[e]) / std::max(std::abs(scores[e]), top) <= 2 * p_.sparse_mixer) sum += std::exp(w - top);
      }
      out[rank] = float(best);
      out[p_.chosen() + rank] = 1 / sum * p_.scale;
      weights_[size_t(best)] = kNone;
    }
  }

  void choose(const float* scores) {
    const int E = p_.num_experts;
    if (p_.correct_logits) std::copy(scores, scores + E, ranks_.begin());
    else ranks_ = weights_;
    for (int e = 0; e < E && !p_.correction.empty(); ++e) ranks_[size_t(e)] += p_.correction[size_t(e)];
    if (p_.num_groups > 1) keep_groups();
    greatest(ranks_.data(), E, p_.top_k, picked_);
  }

  void take(const float* ids) {
    picked_.clear();
    for (int i = 0; i < p_.top_k; ++i) picked_.push_back(int(std::min(std::max(0.0f, ids[i]), float(p_.num_experts - 1))));
  }

  // Only experts of the best groups can be chosen; a group is as good as its best expert, or its two best together.
  void keep_groups() {
    const int size = p_.num_experts / p_.num_groups;
    group_scores_.resize(size_t(p_.num_groups));
    for (int g = 0; g < p_.num_groups; ++g) {
      const float* scores = ranks_.data() + g * size;
      greatest(scores, size, p_.group_sum ? std::min(2, size) : 1, picked_);
      float total = 0;
      for (const int i : picked_) total += scores[i];
      group_scores_[size_t(g)] = total;
    }
    greatest(group_scores_.data(), p_.num_groups, p_.top_groups, picked_);
    for (int e = 0; e < p_.num_experts; ++e)
      if (std::find(picked_.begin(), picked_.end(), e / size) == picked_.end()) ranks_[size_t(e)] = kNone;
  }

  const RoutingParams& p_;
  std::vector<float> weights_, ranks_, group_scores_;
  std::vector<int> picked_;
};

int inner_width(const ExpertWeights& e) { return e.down ? e.down->view().cols : 0; }

int widest_inner(const std::vector<ExpertWeights>& experts) {
  int most = 0;
  for (const ExpertWeights& e : experts) most = std::max(most, inner_width(e));
  return most;
}

}  // namespace

void Plan::execute_route(const Op& op) {
  const int rows = rows_of(op.out), per_task = std::max(1, 4096 / op.routing.num_experts);
  const size_t in_width = size_t(buffers_[size_t(op.in)].width), width = size_t(buffers_[size_t(op.out)].width);
  const float *scores = data(op.in), *ids = op.other < 0 ? nullptr : data(op.other);
  const size_t top_k = size_t(op.routing.top_k);
  float* out = data(op.out);
  pool_->parallel_for((rows + per_task - 1) / per_task, [&](int task, int) {
    Router router(op.routing);
    for (int r = task * per_task; r < std::min(rows, (task + 1) * per_task); ++r)
      router.route(scores + size_t(r) * in_width, ids ? ids + size_t(r) * top_k : nullptr, out + size_t(r) * width);
  });
}

LinearArgs Plan::product_args(const PackedMatrix& weight, const std::vector<float>& bias, Activation activation,
                              const float* x, size_t x_stride, int rows, float* y, size_t y_stride,
                              void* workspace) const {
  LinearArgs args{};
  args.x = x;
  args.x_stride = x_stride;
  args.rows = rows;
  args.weight = weight.view();
  args.bias = bias.empty() ? nullptr : bias.data();
  args.activation = activation;
  args.y = y;
  args.y_stride = y_stride;
  args.workspace = workspace;
  return args;
}

void Plan::execute_head_linear(const Op& op) {
  const MatrixView& first = op.weights.front()->view();
  const size_t heads = op.weights.size(), x_stride = size_t(first.cols) * heads, y_stride = size_t(first.rows) * heads;
  for (size_t n = 0; n < heads; ++n) {
    LinearArgs args =
        product_args(*op.weights[n], {}, op.activation, data(op.in) + n * size_t(first.cols), x_stride, rows_of(op.out),
                     data(op.out) + n * size_t(first.rows), y_stride, workspace_.data());
    if (!op.vector.empty()) args.bias = op.vector.data() + n * (op.vector.size() / heads);
    kernels_.linear(args, *pool_);
  }
}

// Tokens of one expert, or of all experts that run together: their inputs gathered, their inner activations, and their
// results.
size_t Plan::expert_floats(const Op& op) const {
  const size_t width = size_t(buffers_[size_t(op.in)].width) + size_t(buffers_[size_t(op.out)].width);
  return (size_t(expert_rows(op)) * (width + size_t(widest_inner(op.experts))) + 15) / 16 * 16;
}

// Rows that there is memory for: all tokens for one expert, or few for each.
int Plan::expert_rows(const Op& op) const {
  const int chosen = buffers_[size_t(op.other)].width / 2;
  return std::max(limits_.max_tokens, std::min(limits_.max_tokens * chosen, kFewRows * int(op.experts.size())));
}

Plan::ExpertMemory Plan::expert_memory(const Op& op) const {
  const size_t width = size_t(buffers_[size_t(op.in)].width), out_width = size_t(buffers_[size_t(op.out)].width);
  float *in = static_cast<float*>(workspace_.data()), *out = in + size_t(expert_rows(op)) * width;
  return {width, out_width, size_t(widest_inner(op.experts)), in, out, out + size_t(expert_rows(op)) * out_width,
          reinterpret_cast<char*>(in + expert_floats(op))};
}

// Working memory of experts and their products.
size_t Plan::expert_workspace(const Op& op) const {
  size_t bytes = 0;
  for (const ExpertWeights& e : op.experts)
    for (const auto& weight : {e.up, e.down})
      if (weight) bytes = std::max(bytes, kernels_.linear_workspace(weight->view(), expert_rows(op)));
  return expert_floats(op) * sizeof(float) + bytes + op.experts.size() * kExpertWorkspace;
}

void Plan::execute_experts(const Op& op) {
  const int rows = rows_of(op.out), chosen = buffers_[size_t(op.other)].width / 2;
  const size_t out_width = size_t(buffers_[size_t(op.out)].width);
  const float* routes = data(op.other);
  // Counting sort of (token, place among its choices) by expert.
  expert_begin_.assign(op.experts.size() + 1, 0);
  expert_rows_.resize(size_t(rows) * size_t(chosen));
  auto expert_of = [&](int row, int place) { return size_t(routes[size_t(row) * 2 * size_t(chosen) + size_t(place)]); };
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < chosen; ++i) ++expert_begin_[expert_of(r, i) + 1];
  for (size_t e = 0; e < op.experts.size(); ++e) expert_begin_[e + 1] += expert_begin_[e];
  std::vector<int32_t> next(expert_begin_.begin(), expert_begin_.end() - 1);
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < chosen; ++i) expert_rows_[size_t(next[expert_of(r, i)]++)] = r * chosen + i;

  std::memset(data(op.out), 0, size_t(rows) * out_width * sizeof(float));
  const int routed = rows * chosen;
  if (routed <= kFewRows * int(op.experts.size()) && !adapters_.active()) return run_together(op, routed);
  const ExpertMemory memory = expert_memory(op);
  for (size_t e = 0; e < op.experts.size(); ++e) {
    const int first = expert_begin_[e], count = expert_begin_[e + 1] - first;
    if (count > 0) run_expert(op, int(e), first, count, memory);
  }
}

// Gathers the inputs of routes [first, first + count), sorted by expert.
void Plan::gather_routes(const Op& op, int first, int count, const ExpertMemory& memory) {
  const size_t width = memory.width;
  const int chosen = buffers_[size_t(op.other)].width / 2, per_task = std::max(1, kTaskElements / int(width));
  const float *x = data(op.in), *routes = data(op.other);
  pool_->parallel_for((count + per_task - 1) / per_task, [&](int task, int) {
    for (int r = task * per_task; r < std::min(count, (task + 1) * per_task); ++r) {
      const int route = expert_rows_[size_t(first + r)], place = route % chosen;
      const size_t token = size_t(route / chosen);
      const float weight = op.weigh_inputs ? routes[(token * 2 + 1) * size_t(chosen) + size_t(place)] : 1.0f;
      for (size_t i = 0; i < width; ++i) memory.in[size_t(r) * width + i] = weight * x[token * width + i];
    }
  });
}

// Adds the results of routes to their tokens, in the order of experts: a task adds some columns of all.
void Plan::scatter_routes(const Op& op, int first, int count, const ExpertMemory& memory) {
  const size_t width = memory.out_width, tasks = std::max<size_t>(1, std::min(size_t(count) * width / kTaskElements, width / 64));
  const int chosen = buffers_[size_t(op.other)].width / 2;
  const float* routes = data(op.other);
  float* y = data(op.out);
  pool_->parallel_for(int(tasks), [&](int task, int) {
    const size_t begin = width * size_t(task) / tasks, end = width * size_t(task + 1) / tasks;
    for (int r = 0; r < count; ++r) {
      const int route = expert_rows_[size_t(first + r)], place = route % chosen;
      const size_t token = size_t(route / chosen);
      const float weight = op.weigh_inputs ? 1.0f : routes[(token * 2 + 1) * size_t(chosen) + size_t(place)];
      for (size_t i = begin; i < end; ++i) y[token * width + i] += weight * memory.out[size_t(r) * width + i];
    }
  });
}

// All experts of a step of few tokens: the products of all up projections together, then those of all down projections.
void Plan::run_together(const Op& op, int routed) {
  const ExpertMemory m = expert_memory(op);
  gather_routes(op, 0, routed, m);
  std::vector<LinearArgs> up, down;
  char* workspace = m.products;
  for (size_t e = 0; e < op.experts.size(); ++e) {
    const ExpertWeights& expert = op.experts[e];
    const size_t first = size_t(expert_begin_[e]);
    const int count = expert_begin_[e + 1] - expert_begin_[e];
    float *in = m.in + first * m.width, *inner = m.inner + first * m.inner_width, *out = m.out + first * m.out_width;
    if (count > 0 && !expert.up) std::memcpy(out, in, size_t(count) * m.width * sizeof(float));
    if (count == 0 || !expert.up) continue;
    up.push_back(product_args(*expert.up, expert.up_bias, op.activation, in, m.width, count, inner, m.inner_width, workspace));
    up.back().limit = expert.limit;
    down.push_back(product_args(*expert.down, expert.down_bias, Activation::none, inner, m.inner_width, count, out,
                                m.out_width, workspace));
    workspace += (std::max(kernels_.linear_workspace(expert.up->view(), count),
                           kernels_.linear_workspace(expert.down->view(), count)) + 63) / 64 * 64;
  }
  kernels_.linear(up.data(), int(up.size()), *pool_);
  kernels_.linear(down.data(), int(down.size()), *pool_);
  scatter_routes(op, 0, routed, m);
}

void Plan::run_expert(const Op& op, int expert, int first, int rows, const ExpertMemory& m) {
  const ExpertWeights& e = op.experts[size_t(expert)];
  const int chosen = buffers_[size_t(op.other)].width / 2;
  gather_routes(op, first, rows, m);
  if (e.up) {
    auto changed = [&](int which) {
      if (!adapters_.active()) return std::vector<ChangedRows>{};
      return adapters_.changes_of({op.out, 2 * expert + which}, buffers_[size_t(op.out)].rows, rows,
                                  [&](int r) { return expert_rows_[size_t(first + r)] / chosen; });
    };
    const size_t inner = size_t(inner_width(e));
    LinearArgs up = product_args(*e.up, e.up_bias, op.activation, m.in, m.width, rows, m.inner, inner, m.products);
    up.limit = e.limit;
    run_product(up, changed(0));
    run_product(product_args(*e.down, e.down_bias, Activation::none, m.inner, inner, rows, m.out, m.out_width, m.products),
                changed(1));
  } else {
    std::memcpy(m.out, m.in, size_t(rows) * m.width * sizeof(float));
  }
  scatter_routes(op, first, rows, m);
}

}  // namespace quire
