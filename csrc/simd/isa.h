// Names of instruction sets, those that this CPU and operating system can run, and their kernels. Knows no kernel itself.
#pragma once

#include <string>
#include <vector>

namespace quire {

// Quickest first. "avx512_bf16_emulated" (for tests) is never chosen by "auto" and comes last.
std::vector<std::string> available_isas();

// Resolves "auto"; throws std::invalid_argument if the CPU cannot run `name`.
std::string resolve_isa(const std::string& name);

// The table of an available instruction set.
struct Kernels;
const Kernels& kernels_for(const std::string& isa);

}  // namespace quire
