// Short measurements of what this machine can do, for plans and benchmarks. Knows no model.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "matrix.h"
#include "thread_pool.h"

namespace quire {

// Bytes per second, best of a few passes over one buffer.
double measure_read_bandwidth(size_t bytes, int threads);

// Operations per second of independent multiply-adds; kind "fp32", "bf16" or "int8". 0: no such instruction.
double measure_peak(const std::string& kind, int threads);

// Seconds that a product of `rows` rows with each of the weights takes: the mean over a pass through all of them, the
// best of the passes of 0.1 s, as the limits are. Pass enough weights that together they do not fit in a cache, to measure what a model sees.
double time_linear(const std::string& isa, ThreadPool& pool, const std::vector<std::shared_ptr<PackedMatrix>>& weights,
                   int rows);

}  // namespace quire
