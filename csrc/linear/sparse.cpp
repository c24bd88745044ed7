#include "linear/sparse.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace quire {

void put_sparse(const MatrixView& view, const std::vector<SourceSparse>& parts, char* out) {
  std::vector<std::pair<const SourceSparse*, size_t>> rows;
  for (const SourceSparse& part : parts)
    for (size_t r = 0; r < part.rows; ++r) rows.emplace_back(&part, r);
  if (rows.size() != size_t(view.rows)) throw std::invalid_argument("the sparse part of a weight has other rows");
  std::memset(out, 0, view.sparse_bytes());
  int32_t* starts = reinterpret_cast<int32_t*>(out);
  SparseEntry* entries = reinterpret_cast<SparseEntry*>(out + view.sparse_starts_bytes());
  int32_t count = 0;
  for (int i = 0; i < view.panels() * 16; ++i) {
    starts[i] = count;
    const int row = source_row(view, i / 16, i % 16);
    if (row < 0) continue;
    const auto& [part, r] = rows[size_t(row)];
    for (int32_t j = part->starts[r]; j < part->starts[r + 1]; ++j) {
      if (count == view.format.nonzeros) throw std::invalid_argument("the sparse part of a weight has too many values");
      entries[count++] = {part->columns[j], part->values[j]};
    }
  }
  starts[view.panels() * 16] = count;
}

void check_sparse(const MatrixView& view) {
  const int32_t *starts = view.sparse_starts(), rows = view.panels() * 16;
  bool right = starts[0] == 0 && starts[rows] == view.format.nonzeros;
  for (int i = 0; i < rows; ++i) right = right && starts[i] <= starts[i + 1];
  for (int32_t j = 0; right && j < view.format.nonzeros; ++j) {
    const SparseEntry& entry = view.sparse_entries()[j];
    right = entry.column >= 0 && entry.column < view.cols && std::isfinite(entry.value);
  }
  if (!right) throw std::invalid_argument("the sparse part of a weight has values outside of it, or that are not finite");
}

}  // namespace quire
