// Times the probe kernels (kernels/probe_loops.h) on a pool of their own. Knows no model.
#include "simd/probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "simd/isa.h"
#include "kernels/kernels.h"
#include "plan/memory.h"
#include "plan/thread_pool.h"

namespace quire {

namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Calls pass() until `budget` seconds are over, at least twice; returns the best work / time.
template <class F>
double best_rate(double work, double budget, F&& pass) {
  double best = 0;
  const double end = seconds() + budget;
  for (int i = 0; i < 2 || seconds() < end; ++i) {
    const double start = seconds();
    pass();
    best = std::max(best, work / std::max(seconds() - start, 1e-9));
  }
  return best;
}

}  // namespace

double measure_read_bandwidth(size_t bytes, int threads) {
  if (threads < 1 || bytes < size_t(threads) * 4096)
    throw std::invalid_argument("measure_read_bandwidth needs at least one thread and 4096 bytes for each");
  const Kernels& kernels = kernels_for(resolve_isa("auto"));
  ThreadPool pool(threads);
  const HugeBuffer buffer(bytes);
  char* data = static_cast<char*>(buffer.data());
  constexpr size_t chunk = size_t{128} << 10;
  const int chunks = int((bytes + chunk - 1) / chunk);
  auto length = [&](int i) { return std::min(chunk, bytes - size_t(i) * chunk); };
  pool.parallel_for(chunks, [&](int i, int) { std::memset(data + size_t(i) * chunk, i & 0xff, length(i)); });
  return best_rate(double(bytes), 0.1, [&] {
    pool.parallel_for(chunks, [&](int i, int thread) {
      *static_cast<volatile uint32_t*>(pool.scratch(thread)) = kernels.probe_read(data + size_t(i) * chunk, length(i));
    });
  });
}

double measure_peak(const std::string& kind, int threads, const std::string& isa) {
  if (threads < 1) throw std::invalid_argument("measure_peak needs at least one thread");
  if (kind != "fp32" && kind != "bf16" && kind != "int8")
    throw std::invalid_argument("measure_peak knows fp32, bf16 and int8, not '" + kind + "'");
  const Kernels& kernels = kernels_for(resolve_isa(isa));
  const auto probe = kind == "fp32" ? kernels.probe_fp32 : kind == "bf16" ? kernels.probe_bf16 : kernels.probe_int8;
  constexpr int64_t steps = 200000;
  const double operations = probe(1);
  if (operations == 0) return 0;
  ThreadPool pool(threads);
  return best_rate(operations * double(steps) * threads, 0.1, [&] {
    pool.parallel_for(threads, [&](int, int) { probe(steps); });
  });
}

namespace {

constexpr double kTurnSeconds = 0.02;  // the shortest turn: longer than a time slice of the operating system

// Repeats f() for at least `least` seconds; returns the mean seconds of a call.
template <class F>
double mean_seconds(double least, F&& f) {
  const double start = seconds();
  int count = 0;
  double passed = 0;
  do {
    f();
    ++count;
    passed = seconds() - start;
  } while (passed < least);
  return passed / count;
}

// The inputs, outputs and working memory of products with a list of weights.
class Products {
 public:
  Products(const Kernels& kernels, const std::vector<std::shared_ptr<PackedMatrix>>& weights, int rows)
      : kernels_(kernels), weights_(weights), rows_(size_t(rows)) {
    size_t columns = 0, outputs = 0, workspace = 0;
    for (const auto& weight : weights) {
      columns = std::max(columns, size_t(weight->view().cols));
      outputs = std::max(outputs, size_t(weight->view().rows));
      workspace = std::max(workspace, kernels.linear_workspace(weight->view(), rows));
    }
    x_ = HugeBuffer(columns * rows_ * 4);
    y_ = HugeBuffer(outputs * rows_ * 4);
    workspace_ = HugeBuffer(workspace);
    std::fill_n(static_cast<float*>(x_.data()), columns * rows_, 0.5f);
  }

  void run(ThreadPool& pool) const {
    for (const auto& weight : weights_) {
      const MatrixView& view = weight->view();
      LinearArgs args{};
      args.x = static_cast<const float*>(x_.data());
      args.x_stride = size_t(view.cols);
      args.rows = int(rows_);
      args.weight = view;
      args.activation = view.gated ? Activation::silu : Activation::none;
      args.y = static_cast<float*>(y_.data());
      args.y_stride = size_t(view.rows) / (view.gated ? 2 : 1);
      args.workspace = workspace_.data();
      kernels_.linear(args, pool);
    }
  }

 private:
  const Kernels& kernels_;
  const std::vector<std::shared_ptr<PackedMatrix>>& weights_;
  size_t rows_;
  HugeBuffer x_, y_, workspace_;
};

}  // namespace

std::vector<Turn> compare_linear(const std::string& isa, ThreadPool& pool,
                                 const std::vector<std::shared_ptr<PackedMatrix>>& weights, int rows,
                                 const std::string& kind, int rounds) {
  if (weights.empty() || rows < 1 || rounds < 1)
    throw std::invalid_argument("compare_linear needs at least one weight, one row and one round");
  if (kind != "read" && kind != "fp32" && kind != "bf16" && kind != "int8")
    throw std::invalid_argument("compare_linear knows read, fp32, bf16 and int8, not '" + kind + "'");
  const Kernels& kernels = kernels_for(resolve_isa(isa));
  const Products products(kernels, weights, rows);
  constexpr int tasks = 64;
  constexpr size_t chunk = size_t{2} << 20;
  constexpr int64_t steps = 1000;
  const HugeBuffer buffer(kind == "read" ? tasks * chunk : 0);
  if (buffer.size() > 0) std::memset(buffer.data(), 1, buffer.size());
  const auto probe = kind == "bf16" ? kernels.probe_bf16 : kind == "int8" ? kernels.probe_int8 : kernels.probe_fp32;
  const double work = kind == "read" ? double(buffer.size()) : probe(1) * double(steps) * tasks;
  auto limit_pass = [&] {
    pool.parallel_for(tasks, [&](int i, int thread) {
      if (kind == "read")
        *static_cast<volatile uint32_t*>(pool.scratch(thread)) =
            kernels.probe_read(static_cast<const char*>(buffer.data()) + size_t(i) * chunk, chunk);
      else
        probe(steps);
    });
  };
  products.run(pool);  // touches all memory
  std::vector<Turn> turns;
  for (int round = 0; round < rounds; ++round) {
    const double pass = mean_seconds(kTurnSeconds, [&] { products.run(pool); });
    const double limit = work / mean_seconds(std::max(pass, kTurnSeconds), limit_pass);
    turns.push_back({pass / double(weights.size()), limit});
  }
  return turns;
}

}  // namespace quire
