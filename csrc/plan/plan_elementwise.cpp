// Ops of a plan that change the elements of a row by themselves: recording and running. Knows ops and buffers.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "plan/lane_sum.h"
#include "plan/plan.h"

namespace quire {

namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

void clamp_row(const float* x, float* y, size_t n, const float* p, int32_t) {
  for (size_t i = 0; i < n; ++i) y[i] = std::min(p[0], std::max(-p[0], x[i]));
}

// Times 1 + beta * log(1 + floor((position + offset) / length)).
void temper_row(const float* x, float* y, size_t n, const float* p, int32_t position) {
  const float scale = 1 + p[0] * std::log(1 + std::floor((float(position) + p[2]) / p[1]));
  for (size_t i = 0; i < n; ++i) y[i] = x[i] * scale;
}

// XIELU (Huang and Schlag 2024, arXiv:2411.13010): alpha_p x^2 + beta x above 0, alpha_n (e^x - 1 - x) + beta x below.
void xielu_row(const float* x, float* y, size_t n, const float* p, int32_t) {
  for (size_t i = 0; i < n; ++i)
    y[i] = x[i] > 0 ? p[0] * x[i] * x[i] + p[2] * x[i] : (std::expm1(std::min(x[i], p[3])) - x[i]) * p[1] + p[2] * x[i];
}

void gelu_row(const float* x, float* y, size_t n, const float*, int32_t) {
  for (size_t i = 0; i < n; ++i) y[i] = 0.5f * x[i] * (1 + std::erf(x[i] * 0.70710678f));
}

void scale_columns_row(const float* x, float* y, size_t n, const float* p, int32_t) {
  for (size_t i = 0; i < n; ++i) y[i] = x[i] * p[i];
}

// The number of parts of a row, then the growth of each, then the base of each.
void scale_parts_row(const float* x, float* y, size_t n, const float* p, int32_t position) {
  const size_t parts = size_t(p[0]), each = n / parts;
  const double log = std::log1p(double(position));
  for (size_t i = 0; i < parts; ++i) {
    const float factor = float(double(p[1 + i]) * log + double(p[1 + parts + i]));
    for (size_t j = i * each; j < (i + 1) * each; ++j) y[j] = x[j] * factor;
  }
}

// GELU (tanh form) of what exceeds the row's mean by more than p[0] standard deviations.
void sparse_gelu_row(const float* x, float* y, size_t n, const float* p, int32_t) {
  const double mean = lane_sum(n, [&](size_t i) { return double(x[i]); }) / double(n);
  const double squares = lane_sum(n, [&](size_t i) { return (double(x[i]) - mean) * (double(x[i]) - mean); });
  const double bound = mean + double(p[0]) * std::sqrt(squares / double(n));
  for (size_t i = 0; i < n; ++i) {
    const float v = float(double(x[i]) - bound);
    y[i] = v > 0 ? 0.5f * v * (1 + std::tanh(0.7978845608f * (v + 0.044715f * v * v * v))) : 0.0f;
  }
}

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// Each of n groups of n elements, `apart` from each other, is divided by its sum plus eps.
void divide_by_sums(float* x, size_t n, size_t group, size_t apart, float eps) {
  for (size_t i = 0; i < n; ++i) {
    float* own = x + i * group;
    double sum = 0;
    for (size_t j = 0; j < n; ++j) sum += double(own[j * apart]);
    const float by = float(sum) + eps;
    for (size_t j = 0; j < n; ++j) own[j * apart] /= by;
  }
}

// n x n shares of streams: softmax by row, Sinkhorn's iterations, transposed.
void mix_streams(float* x, size_t n, int iterations, float eps) {
  for (size_t i = 0; i < n; ++i) {
    float* own = x + i * n;
    const float most = *std::max_element(own, own + n);
    for (size_t j = 0; j < n; ++j) own[j] = std::exp(own[j] - most);
  }
  divide_by_sums(x, n, n, 1, 0);
  for (size_t i = 0; i < n * n; ++i) x[i] += eps;
  divide_by_sums(x, n, 1, n, eps);
  for (int i = 1; i < iterations; ++i) {
    divide_by_sums(x, n, n, 1, eps);
    divide_by_sums(x, n, 1, n, eps);
  }
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < i; ++j) std::swap(x[i * n + j], x[j * n + i]);
}

// Streams, iterations, eps, magnitude, floor; factors and biases by column (Xie et al. 2025, arXiv:2512.24880).
void stream_gates_row(const float* x, float* y, size_t width, const float* p, int32_t) {
  const size_t n = std::min(width, size_t(p[0]));
  const float *factors = p + 5, *biases = factors + width;
  for (size_t i = 0; i < width; ++i) y[i] = x[i] * factors[i] + biases[i];
  for (size_t i = 0; i < n; ++i) y[i] = sigmoid(y[i]) + p[2];
  for (size_t i = n; i < std::min(width, 2 * n); ++i) y[i] = p[3] * sigmoid(y[i]) + p[4];
  if (width == n * (n + 2)) mix_streams(y + 2 * n, n, int(p[1]), p[2]);
}

// By the names and fields of the structs that are an Elementwise (devices/elementwise.py).
constexpr size_t kByPart = ~size_t(0);  // the number of equal parts of a row, and two for each of them
struct Elementwise {
  const char* name;
  size_t params, by_column;  // in all, and then for each column
  bool by_position;  // reads the position of its row's token
  void (*row)(const float* x, float* y, size_t n, const float* params, int32_t position);
};
constexpr Elementwise kElementwise[] = {
    {"Clamp", 1, 0, false, clamp_row},
    {"Temperature", 3, 0, true, temper_row},
    {"PositionScale", kByPart, 0, true, scale_parts_row},
    {"XIELU", 4, 0, false, xielu_row},
    {"GELU", 0, 0, false, gelu_row},
    {"ColumnScale", 0, 1, false, scale_columns_row},
    {"SparseGELU", 1, 0, false, sparse_gelu_row},
    {"StreamGates", 5, 2, false, stream_gates_row},
};

}  // namespace

int Plan::multiply(int x, int factors) {
  const Buffer in = checked(x, "the input of multiply"), by = checked(factors, "the factors of multiply");
  require(in.rows == by.rows && in.width % by.width == 0, "multiply: the factors do not fit the input");
  return add_op(Op{.kind = OpKind::multiply, .in = x, .other = factors}, in.width, in.rows);
}

int Plan::elementwise(const std::string& name, int x, std::vector<float> params) {
  const auto* function = std::find_if(std::begin(kElementwise), std::end(kElementwise),
                                      [&](const Elementwise& f) { return name == f.name; });
  require(function != std::end(kElementwise), "there is no function " + name);
  const Buffer in = checked(x, "the input of an element-wise function");
  size_t wanted = function->params + function->by_column * size_t(in.width);
  if (function->params == kByPart) {
    require(!params.empty() && params[0] >= 1 && params[0] <= float(in.width) && in.width % int(params[0]) == 0,
            name + " needs equal parts of a row");
    wanted = 1 + 2 * size_t(params[0]);
  }
  require(params.size() == wanted, name + " has " + std::to_string(wanted) + " parameters");
  require(!function->by_position || in.rows == RowKind::tokens, name + " needs one row per token");
  Op op{.kind = OpKind::elementwise, .in = x};
  op.function = int(function - kElementwise);
  op.vector = std::move(params);
  return add_op(std::move(op), in.width, in.rows);
}

bool Plan::reads_positions(const Op& op) const {
  return op.kind == OpKind::elementwise && kElementwise[op.function].by_position;
}

void Plan::execute_elementwise(const Op& op) {
  const size_t width = size_t(buffers_[size_t(op.out)].width);
  const int rows = rows_of(op.out), per_task = std::max(1, 16384 / int(width));
  const float *in = data(op.in), *by = op.other < 0 ? nullptr : data(op.other);
  const size_t factors = by ? size_t(buffers_[size_t(op.other)].width) : 1, group = width / factors;
  float* out = data(op.out);
  auto row = [&](size_t r) {
    const float* x = in + r * width;
    float* y = out + r * width;
    if (op.kind == OpKind::elementwise) {
      const int32_t position = kElementwise[op.function].by_position ? step_.positions[r] : 0;
      return kElementwise[op.function].row(x, y, width, op.vector.data(), position);
    }
    for (size_t f = 0; f < factors; ++f)
      for (size_t i = 0; i < group; ++i) y[f * group + i] = x[f * group + i] * by[r * factors + f];
  };
  pool_->parallel_for((rows + per_task - 1) / per_task, [&](int task, int) {
    for (int r = task * per_task; r < std::min(rows, (task + 1) * per_task); ++r) row(size_t(r));
  });
}

}  // namespace quire
