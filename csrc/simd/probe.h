// Short measurements of this machine's limits, for plans and benchmarks. Knows no model.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "linear/matrix.h"
#include "plan/thread_pool.h"

namespace quire {

// Bytes per second: the best of a few passes over one buffer.
double measure_read_bandwidth(size_t bytes, int threads);

// Operations per second of independent multiply-adds; kind "fp32", "bf16" or "int8". 0: no such instruction.
double measure_peak(const std::string& kind, int threads, const std::string& isa);

// A product and a limit, measured in turns of equal length so that a shared machine disturbs both alike.
struct Turn {
  double seconds;  // of one product, the mean over passes through all weights
  double limit;    // bytes (kind "read") or operations per second, the mean over the turn
};

// Measures products of `rows` rows with each of the weights, in `rounds` turns. To measure what a model sees, pass more
// weights than fit in the caches. `kind` as in measure_peak, or "read".
std::vector<Turn> compare_linear(const std::string& isa, ThreadPool& pool,
                                 const std::vector<std::shared_ptr<PackedMatrix>>& weights, int rows,
                                 const std::string& kind, int rounds);

}  // namespace quire
