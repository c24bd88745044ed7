// The sparse part of a weight of blocks: values that are added to those of the blocks (SqueezeLLM, arXiv:2306.07629).
// Behind the panels and the inputs: where the entries of each packed row begin, then all entries. Knows memory only.
#pragma once

#include <vector>

#include "linear/format.h"

namespace quire {

// Entries of row r are starts[r] .. starts[r + 1] - 1.
struct SourceSparse {
  const int32_t* starts;
  const int32_t* columns;
  const float* values;
  size_t rows;
};

// Writes view.sparse_bytes(). Throws std::invalid_argument if the parts have other rows, or more entries than the format.
void put_sparse(const MatrixView& view, const std::vector<SourceSparse>& parts, char* out);

// Throws std::invalid_argument if an entry is outside of the weight or not finite.
void check_sparse(const MatrixView& view);

}  // namespace quire
