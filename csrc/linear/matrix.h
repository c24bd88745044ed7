// Packed weights: from rows of floats or codes to panels of 16, and back. Knows shapes and memory; the layouts know
// bytes.
#pragma once

#include <cstddef>
#include <vector>

#include "linear/format.h"
#include "linear/source_rows.h"
#include "linear/sparse.h"
#include "plan/memory.h"
#include "plan/thread_pool.h"
#include "kernels/kernels.h"

namespace quire {

// The input that each column multiplies, and its factor: as many as there are columns. Null: none.
struct ColumnInputs {
  const int32_t* order = nullptr;
  const float* factors = nullptr;
};

class PackedMatrix {
 public:
  // A shape without values, for planning: `view().data` is null, and no memory is taken.
  PackedMatrix(size_t rows, size_t cols, const Format& format, bool gated);

  // Stacks the parts along O. With `gated` there are two parts of equal shape: gate, then up. Sources are read in place
  // (they may be memory-mapped files). Throws std::invalid_argument if shapes do not fit.
  PackedMatrix(const std::vector<SourceRows>& parts, size_t cols, const Format& format, bool gated,
               const Kernels& kernels, ThreadPool& pool);

  // The same for codes, which are kept bit for bit.
  PackedMatrix(const std::vector<SourceCodes>& parts, size_t cols, const Format& format, bool gated,
               const ColumnInputs& inputs, ThreadPool& pool);

  // The same for whole blocks; the format's parts are those of the sources. `sparse` has one for each part, or none.
  PackedMatrix(const std::vector<SourceBlocks>& parts, size_t cols, const Format& format, bool gated,
               const ColumnInputs& inputs, const std::vector<SourceSparse>& sparse, ThreadPool& pool);

  // Uses bytes in memory that the same version packed; the caller keeps `data` alive. Throws std::invalid_argument if
  // its size or alignment is not this shape's, or a screen has impossible bounds.
  PackedMatrix(size_t rows, size_t cols, const Format& format, bool gated, const char* data, size_t nbytes);

  const MatrixView& view() const { return view_; }

  // Row-major float32 [O, K], parts in their original order.
  void unpack(float* out, const Kernels& kernels, ThreadPool& pool) const;

 private:
  void allocate();
  void check_screen() const;
  void check_inputs() const;
  void put_inputs(const ColumnInputs& inputs);
  char* bytes_of(const char* place) { return static_cast<char*>(memory_.data()) + (place - view_.data); }

  HugeBuffer memory_;
  MatrixView view_;
};

}  // namespace quire
