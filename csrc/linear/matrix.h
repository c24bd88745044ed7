// Packed weights: from rows of float32, float16 or bfloat16 to panels of 16 (kernels.h, MatrixView) and back.
// Knows bytes and shapes; knows no kernel and no model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simd/kernels.h"
#include "plan/memory.h"
#include "plan/thread_pool.h"

namespace quire {

enum class ElementType : int { float32, float16, bfloat16 };

// Rows [rows, K] of a source array: elements of a row are adjacent, rows `row_bytes` apart.
struct SourceRows {
  const char* data;
  size_t rows, row_bytes;
  ElementType type;
};

class PackedMatrix {
 public:
  // The shape without values, to plan with: `view().data` is null and no memory is taken.
  PackedMatrix(size_t rows, size_t cols, Format format, bool gated);

  // Stacks the parts on O. With `gated` there are two parts of equal shape: gate, then up. Sources are read in place
  // (they may be memory-mapped files). Throws std::invalid_argument on shapes that do not fit.
  PackedMatrix(const std::vector<SourceRows>& parts, size_t cols, Format format, bool gated, const Kernels& kernels,
               ThreadPool& pool);

  // Values that lie in memory already, packed by the same version; the caller keeps `data` alive. Throws
  // std::invalid_argument where its size or alignment is not this shape's.
  PackedMatrix(size_t rows, size_t cols, Format format, bool gated, const char* data, size_t nbytes);

  const MatrixView& view() const { return view_; }

  // Row-major float32 [O, K] in the order in which the parts came.
  void unpack(float* out, ThreadPool& pool) const;

 private:
  HugeBuffer memory_;
  MatrixView view_;
};

// Source row that lands on lane `lane` of panel `panel`: its index on O, or -1 where the panel is padding.
int source_row(const MatrixView& view, int panel, int lane);

}  // namespace quire
