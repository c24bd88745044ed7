// Short measurements of what this machine can do, for plans and benchmarks. Knows no model.
#pragma once

#include <cstddef>
#include <string>

namespace quire {

// Bytes per second, best of a few passes over one buffer.
double measure_read_bandwidth(size_t bytes, int threads);

// Operations per second of independent multiply-adds; kind "fp32", "bf16" or "int8". 0: no such instruction.
double measure_peak(const std::string& kind, int threads);

}  // namespace quire
