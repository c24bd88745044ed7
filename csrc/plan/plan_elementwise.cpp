// Ops of a plan that change each element of a row by itself: recording and running. Knows ops and buffers.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "plan/plan.h"

namespace quire {

namespace {

// XIELU (Huang and Schlag 2024, arXiv:2411.13010): alpha_p x^2 + beta x above 0, alpha_n (e^x - 1 - x) + beta x below.
float xielu_of(float x, const std::vector<float>& p) {
  if (x > 0) return p[0] * x * x + p[2] * x;
  return (std::expm1(std::min(x, p[3])) - x) * p[1] + p[2] * x;
}

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

}  // namespace

int Plan::multiply(int x, int factors) {
  const Buffer in = checked(x, "the input of multiply"), by = checked(factors, "the factors of multiply");
  require(in.rows == by.rows && in.width % by.width == 0, "multiply: the factors do not fit the input");
  return add_op(Op{.kind = OpKind::multiply, .in = x, .other = factors}, in.width, in.rows);
}

int Plan::clamp(int x, float limit) {
  const Buffer in = checked(x, "the input of clamp");
  require(limit > 0, "clamp: the limit must be greater than 0");
  Op op{.kind = OpKind::clamp, .in = x};
  op.cap = limit;
  return add_op(std::move(op), in.width, in.rows);
}

int Plan::temper(int x, float beta, int length, int offset) {
  const Buffer in = checked(x, "the input of temper");
  require(in.rows == RowKind::tokens && length > 0 && offset >= 0, "temper needs one row per token, and a length");
  Op op{.kind = OpKind::temper, .in = x};
  op.scale = beta;
  op.length = length;
  op.offset = offset;
  return add_op(std::move(op), in.width, in.rows);
}

int Plan::xielu(int x, std::vector<float> params) {
  const Buffer in = checked(x, "the input of xielu");
  require(params.size() == 4, "xielu has four parameters");
  Op op{.kind = OpKind::xielu, .in = x};
  op.vector = std::move(params);
  return add_op(std::move(op), in.width, in.rows);
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
    if (op.kind == OpKind::multiply) {
      for (size_t f = 0; f < factors; ++f)
        for (size_t i = 0; i < group; ++i) y[f * group + i] = x[f * group + i] * by[r * factors + f];
    } else if (op.kind == OpKind::clamp) {
      for (size_t i = 0; i < width; ++i) y[i] = std::min(op.cap, std::max(-op.cap, x[i]));
    } else if (op.kind == OpKind::temper) {
      const float steps = std::floor(float(step_.positions[r] + op.offset) / float(op.length));
      const float scale = 1 + op.scale * std::log(1 + steps);
      for (size_t i = 0; i < width; ++i) y[i] = x[i] * scale;
    } else {
      for (size_t i = 0; i < width; ++i) y[i] = xielu_of(x[i], op.vector);
    }
  };
  pool_->parallel_for((rows + per_task - 1) / per_task, [&](int task, int) {
    for (int r = task * per_task; r < std::min(rows, (task + 1) * per_task); ++r) row(size_t(r));
  });
}

}  // namespace quire
