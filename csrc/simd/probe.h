// Short measurements of what this machine can do, for plans and benchmarks. Knows no model.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "linear/matrix.h"
#include "plan/thread_pool.h"

namespace quire {

// Bytes per second, best of a few passes over one buffer.
double measure_read_bandwidth(size_t bytes, int threads);

// Operations per second of independent multiply-adds; kind "fp32", "bf16" or "int8". 0: no such instruction.
double measure_peak(const std::string& kind, int threads, const std::string& isa);

// A product beside a limit, taken in turns of equal length so that a shared machine disturbs both alike.
struct Turn {
  double seconds;  // of one product, the mean over passes through all weights
  double limit;    // bytes (kind "read") or operations per second, the mean over the turn
};

// Products of `rows` rows with each of the weights, `rounds` turns. Pass enough weights that together they do not fit
// in a cache, to measure what a model sees. `kind` as in measure_peak, or "read".
std::vector<Turn> compare_linear(const std::string& isa, ThreadPool& pool,
                                 const std::vector<std::shared_ptr<PackedMatrix>>& weights, int rows,
                                 const std::string& kind, int rounds);

}  // namespace quire
