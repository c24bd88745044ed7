// Names of instruction sets, and those that this CPU and operating system can run. Knows no kernel.
#pragma once

#include <string>
#include <vector>

namespace quire {

// Quickest first. "avx512_bf16_emulated" (for tests) is never chosen by "auto" and comes last.
std::vector<std::string> available_isas();

// Resolves "auto"; throws std::invalid_argument if the CPU cannot run `name`.
std::string resolve_isa(const std::string& name);

}  // namespace quire
