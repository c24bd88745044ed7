// Ops of a plan on rows of several equal parts: linear combinations of the parts, and their magnitude. Records and runs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "plan/lane_sum.h"
#include "plan/plan.h"

namespace quire {

namespace {

constexpr size_t kBlock = 1024;  // columns that are combined at a time: the sources stay in the first cache

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

double mean_square(const float* x, size_t n) {
  return lane_sum(n, [&](size_t i) { return double(x[i]) * double(x[i]); }) / double(n);
}

// `made` parts of `width` columns from those of x, a block of columns at a time.
void combine_row(const float* x, const float* factors, const float* residual, size_t vectors, size_t made, size_t width,
                 float* y) {
  for (size_t begin = 0; begin < width; begin += kBlock) {
    const size_t n = std::min(kBlock, width - begin);
    for (size_t b = 0; b < made; ++b) {
      float* out = y + b * width + begin;
      if (!residual) std::fill_n(out, n, 0.0f);
      else if (const float* from = residual + b * width + begin; from != out) std::memcpy(out, from, n * sizeof(float));
      for (size_t a = 0; a < vectors; ++a) {
        const float factor = factors[b * vectors + a];
        const float* in = x + a * width + begin;
        if (factor != 0)
          for (size_t i = 0; i < n; ++i) out[i] += factor * in[i];
      }
    }
  }
}

}  // namespace

int Plan::add_mix(Op op, int64_t made) {
  const Buffer in = checked(op.in, "the input of mix");
  require(op.vectors > 0 && in.width % op.vectors == 0, "mix: the input is not of that many equal parts");
  require(made > 0 && made % op.vectors == 0, "mix: there are not as many factors as parts");
  const int64_t width = made / op.vectors * (in.width / op.vectors);
  if (op.residual >= 0) {
    const Buffer& r = checked(op.residual, "the residual of mix");
    require(r.width == width && r.rows == in.rows, "mix: the residual's shape is not the output's");
  }
  return add_op(std::move(op), width, in.rows);
}

int Plan::combine(int x, std::vector<float> factors, int vectors, int residual) {
  Op op{.kind = OpKind::mix, .in = x, .residual = residual};
  op.vectors = vectors;
  const int64_t made = int64_t(factors.size());
  op.vector = std::move(factors);
  return add_mix(std::move(op), made);
}

int Plan::mix(int x, int factors, int vectors, int residual) {
  const Buffer by = checked(factors, "the factors of mix");
  require(by.rows == checked(x, "the input of mix").rows, "mix: one row of factors for each row");
  Op op{.kind = OpKind::mix, .in = x, .residual = residual, .other = factors};
  op.vectors = vectors;
  return add_mix(std::move(op), by.width);
}

int Plan::match_rms(int x, int like, float floor) {
  const Buffer in = checked(x, "the input of match_rms"), model = checked(like, "the model of match_rms");
  require(in.rows == model.rows && in.width % model.width == 0, "match_rms: the parts are not as wide as the model");
  require(std::isfinite(floor) && floor > 0, "match_rms: the floor is not above 0");
  Op op{.kind = OpKind::match_rms, .in = x, .other = like};
  op.scale = floor;
  return add_op(std::move(op), in.width, in.rows);
}

int Plan::compare_parts(int x, int other, int parts, float scale, float floor) {
  const Buffer in = checked(x, "the input of compare_parts"), with = checked(other, "the second input of compare_parts");
  require(in.rows == with.rows && in.width == with.width && parts > 0 && in.width % parts == 0,
          "compare_parts: the inputs are not of that many equal parts");
  require(std::isfinite(scale) && std::isfinite(floor) && floor >= 0, "compare_parts: the floor is below 0");
  Op op{.kind = OpKind::compare_parts, .in = x, .other = other};
  op.scale = scale;
  op.limit = floor;
  return add_op(std::move(op), parts, in.rows);
}

void Plan::execute_mix(const Op& op) {
  const size_t in_width = size_t(buffers_[size_t(op.in)].width), out_width = size_t(buffers_[size_t(op.out)].width);
  const size_t vectors = size_t(op.vectors), width = in_width / vectors, made = out_width / width;
  const float *x = data(op.in), *by = op.other < 0 ? op.vector.data() : data(op.other);
  const float* residual = op.residual < 0 ? nullptr : data(op.residual);
  const size_t stride = op.other < 0 ? 0 : made * vectors;
  float* y = data(op.out);
  pool_->parallel_for(rows_of(op.out), [&](int row, int) {
    const size_t r = size_t(row);
    combine_row(x + r * in_width, by + r * stride, residual ? residual + r * out_width : nullptr, vectors, made, width,
                y + r * out_width);
  });
}

void Plan::execute_match_rms(const Op& op) {
  const size_t whole = size_t(buffers_[size_t(op.in)].width), width = size_t(buffers_[size_t(op.other)].width);
  const float *x = data(op.in), *like = data(op.other);
  float* y = data(op.out);
  pool_->parallel_for(rows_of(op.out), [&](int row, int) {
    const double wanted = mean_square(like + size_t(row) * width, width);
    for (size_t begin = 0; begin < whole; begin += width) {
      const float* in = x + size_t(row) * whole + begin;
      float* out = y + size_t(row) * whole + begin;
      const float scale = float(std::sqrt(wanted / std::max(mean_square(in, width), double(op.scale))));
      for (size_t i = 0; i < width; ++i) out[i] = in[i] * scale;
    }
  });
}

void Plan::execute_compare_parts(const Op& op) {
  const size_t whole = size_t(buffers_[size_t(op.in)].width), parts = size_t(buffers_[size_t(op.out)].width);
  const size_t width = whole / parts;
  const float *x = data(op.in), *other = data(op.other);
  float* y = data(op.out);
  pool_->parallel_for(rows_of(op.out), [&](int row, int) {
    for (size_t part = 0; part < parts; ++part) {
      const float *a = x + size_t(row) * whole + part * width, *b = other + size_t(row) * whole + part * width;
      const double z = double(op.scale) * lane_sum(width, [&](size_t i) { return double(a[i]) * double(b[i]); });
      const double root = std::copysign(std::sqrt(std::max(std::abs(z), double(op.limit))), z);
      y[size_t(row) * parts + part] = float(1 / (1 + std::exp(z == 0 ? 0.0 : -root)));
    }
  });
}

}  // namespace quire
