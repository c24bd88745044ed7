// Packing and unpacking of weights, parallel over panels. Knows shapes; the layouts know bytes.
#include "linear/matrix.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "linear/layouts.h"
#include "linear/pack_codes.h"

namespace quire {

namespace {

constexpr int kLanes = PanelRows::kLanes;
constexpr int kMostOrderedColumns = 28 << 10;  // rows of a tile are put in order in scratch memory
constexpr float kNoBound = 1e20f;  // the rounding of padding rows in a screen, so that they bound nothing

// Rows of all parts, which are two of equal shape if gated.
template <class Part>
size_t stacked_rows(const std::vector<Part>& parts, bool gated) {
  if (gated && (parts.size() != 2 || parts[0].rows != parts[1].rows))
    throw std::invalid_argument("a gated weight needs a gate and an up projection of equal shape");
  size_t rows = 0;
  for (const Part& part : parts) rows += part.rows;
  return rows;
}

// Makes a panel of the screen of a weight with elements of type `of`. False if a value is too large, or NaN.
bool pack_screen_panel(const PanelRows& rows, const MatrixView& view, ElementType of, const Kernels& kernels,
                       char* out) {
  const int columns = (view.cols + kLanes - 1) / kLanes * kLanes;
  std::vector<float> values(static_cast<size_t>(columns));
  std::vector<char> bytes(static_cast<size_t>(columns));
  for (int lane = 0; lane < kLanes; ++lane) {
    const SourceRow& source = rows.lanes[lane];
    read_row(source, view.cols, columns, values.data());
    if (of != ElementType::float32 && source.type != of)
      for (float& v : values) v = of == ElementType::float16 ? f16_to_float(float_to_f16(v)) : widened(float_to_bf16(v));
    const ScreenWeightRow row = kernels.screen_weight_row(values.data(), columns, bytes.data());
    if (!(row.rounding < kNoBound)) return false;
    float scale = row.scale;
    Int8::put_lane(view, out, lane, {reinterpret_cast<uint8_t*>(bytes.data()), &scale, nullptr});
    float* bounds = reinterpret_cast<float*>(out + view.geometry.columns_bytes) + kLanes + lane;
    bounds[0] = row.length;
    bounds[kLanes] = source.data ? row.rounding : kNoBound;
  }
  return true;
}

}  // namespace

void check_plain(const Format& format, const char* name) {
  if (format.group != 0 || format.offsets || format.narrow)
    throw std::invalid_argument(std::string(name) + " weights have no groups, offsets or scales in bfloat16");
}

MatrixView make_view(size_t rows, size_t cols, const Format& format, bool gated) {
  constexpr size_t limit = size_t(std::numeric_limits<int>::max()) / 64;
  if (rows == 0 || cols == 0) throw std::invalid_argument("a weight needs at least one row and one column");
  if (rows > limit || cols > limit) throw std::invalid_argument("a weight has more rows or columns than fit");
  if (gated && rows % 2) throw std::invalid_argument("a gated weight needs an even number of rows");
  // Sums of products of bytes, 255 x 127 each, have to fit in 32 bits.
  if (format.layout == Layout::int8 && format.int8_rows && cols > 65536)
    throw std::invalid_argument("a weight of int8 that is multiplied with int8 has at most 65536 columns");
  if ((format.inputs || format.rounding.present()) && cols > size_t(kMostOrderedColumns))
    throw std::invalid_argument("a weight whose inputs are ordered or rounded first has at most 28672 columns");
  const InputRounding& r = format.rounding;
  if (r.present() && format.int8_rows &&
      (format.layout == Layout::blocks || r.number != RoundedNumber::int8 || r.scales != RoundedScale::fixed || r.zero != 0))
    throw std::invalid_argument("activations in int8 are rounded by rows, or with one scale for all");
  if (format.nonzeros < 0 || (format.nonzeros > 0 && (format.layout != Layout::blocks || format.inputs || format.int8_rows)))
    throw std::invalid_argument("only weights of blocks that are multiplied as floats have a sparse part");
  MatrixView view;
  view.rows = int(rows), view.cols = int(cols);
  view.format = format;
  view.gated = gated;
  with_layout(format.layout, [&](auto layout) QUIRE_INLINE_LAMBDA {
    layout.check(format);
    if (format.inputs && layout.kHolds == Holds::floats)
      throw std::invalid_argument("columns of weights of floats have no order of their own");
    view.geometry = layout.geometry(format, view.cols);
    view.panels_bytes = view.panel_bytes() * size_t(view.panels());
  });
  if (format.layout == Layout::blocks) {
    Blocks::check_parts(view);
    view.panels_bytes = Blocks::nbytes(view);
  }
  return view;
}

MatrixView MatrixView::screen() const {
  const Format screen{.layout = Layout::int8, .int8_rows = true, .screened = true, .blocks = {}, .nonzeros = 0, .rounding = {}};
  MatrixView view = make_view(size_t(rows), size_t(cols), screen, false);
  view.data = data ? data + panels_bytes : nullptr;
  return view;
}

size_t MatrixView::nbytes() const {
  return panels_bytes + (has_screen() ? screen().nbytes() : 0) + inputs_bytes() + sparse_bytes();
}

PackedMatrix::PackedMatrix(size_t rows, size_t cols, const Format& format, bool gated)
    : view_(make_view(rows, cols, format, gated)) {
  const bool floats = with_layout(format.layout, [](auto layout) QUIRE_INLINE_LAMBDA { return layout.kHolds == Holds::floats; });
  if (format.screened && (gated || !floats))
    throw std::invalid_argument("only weights of floats that are not gated have a screen");
  if (format.layout == Layout::bfloat16_12) {  // with few columns its tail takes more than it saves
    Format wide = format;
    wide.layout = Layout::bfloat16;
    const MatrixView plain = make_view(rows, cols, wide, gated);
    if (plain.panel_bytes() <= view_.panel_bytes()) view_ = plain;
  }
}

PackedMatrix::PackedMatrix(size_t rows, size_t cols, const Format& format, bool gated, const char* data, size_t nbytes)
    : PackedMatrix(rows, cols, format, gated) {
  if (nbytes != view_.nbytes()) throw std::invalid_argument("a packed weight has another size than its shape needs");
  if (reinterpret_cast<uintptr_t>(data) % 64 != 0)
    throw std::invalid_argument("a packed weight must be 64-byte aligned");
  view_.data = data;
  if (view_.has_screen()) check_screen();
  if (view_.format.inputs) check_inputs();
  if (view_.format.nonzeros > 0) check_sparse(view_);
}

void PackedMatrix::check_inputs() const {
  std::vector<bool> seen(size_t(view_.cols));
  for (int k = 0; k < view_.cols; ++k) {
    const int from = view_.order()[k];
    if (from < 0 || from >= view_.cols || seen[size_t(from)] || !std::isfinite(view_.factors()[k]))
      throw std::invalid_argument("the order of a weight's columns names each of them once, with a finite factor");
    seen[size_t(from)] = true;
  }
}

void PackedMatrix::put_inputs(const ColumnInputs& inputs) {
  if ((inputs.order != nullptr) != view_.format.inputs)
    throw std::invalid_argument("inputs of columns must be given for a format that has them, and for no other");
  if (!inputs.order) return;
  char* to = bytes_of(view_.data + view_.panels_bytes);
  std::memset(to, 0, view_.inputs_bytes());
  std::memcpy(to, inputs.order, size_t(view_.cols) * 4);
  std::memcpy(bytes_of(reinterpret_cast<const char*>(view_.factors())), inputs.factors, size_t(view_.cols) * 4);
  check_inputs();
}

// A screen's bounds decide which rows a greedy step reads.
void PackedMatrix::check_screen() const {
  const MatrixView screen = view_.screen();
  for (int panel = 0; panel < screen.panels(); ++panel) {
    const float* tail = reinterpret_cast<const float*>(screen.tail(panel));
    for (int i = 0; i < 3 * kLanes; ++i)  // scales, lengths, roundings
      if (!std::isfinite(tail[i]) || tail[i] < 0)
        throw std::invalid_argument("a screen holds bounds that are negative or not finite");
  }
}

void PackedMatrix::allocate() {
  memory_ = HugeBuffer(view_.nbytes());
  view_.data = static_cast<const char*>(memory_.data());
}

PackedMatrix::PackedMatrix(const std::vector<SourceRows>& parts, size_t cols, const Format& format, bool gated,
                           const Kernels& kernels, ThreadPool& pool)
    : PackedMatrix(stacked_rows(parts, gated), cols, format, gated) {
  if (format.layout == Layout::blocks) throw std::invalid_argument("floats are not rounded to blocks");
  std::vector<SourceRow> table;
  table.reserve(size_t(view_.rows));
  for (const SourceRows& part : parts)
    for (size_t r = 0; r < part.rows; ++r) table.push_back({part.data + r * part.row_bytes, part.type});

  std::atomic<bool> fits = true, screens = true;
  auto pack_all = [&] {
    const ElementType held = view_.format.layout == Layout::float32   ? ElementType::float32
                             : view_.format.layout == Layout::float16 ? ElementType::float16
                                                                      : ElementType::bfloat16;
    allocate();
    const MatrixView screen = view_.has_screen() ? view_.screen() : MatrixView{};
    pool.parallel_for(view_.panels(), [&](int panel, int) {
      PanelRows rows;
      for (int lane = 0; lane < kLanes; ++lane)
        if (const int row = source_row(view_, panel, lane); row >= 0) rows.lanes[lane] = table[size_t(row)];
      if (screens && view_.has_screen() &&
          !pack_screen_panel(rows, screen, held, kernels, bytes_of(screen.panel(panel))))
        screens = false;
      char* out = bytes_of(view_.panel(panel));
      const bool packed = with_layout(view_.format.layout, [&](auto layout) QUIRE_INLINE_LAMBDA {
        if constexpr (layout.kHolds == Holds::blocks) return false;
        else return !fits || layout.pack_panel(rows, view_, out);
      });
      if (!packed) fits = false;
    });
  };
  pack_all();
  if (!fits) {
    Format plain = view_.format;
    plain.layout = Layout::bfloat16;
    view_ = make_view(size_t(view_.rows), cols, plain, gated);
    fits = true;
    pack_all();
  }
  view_.format.screened = view_.format.screened && screens;
}

PackedMatrix::PackedMatrix(const std::vector<SourceCodes>& parts, size_t cols, const Format& format, bool gated,
                           const ColumnInputs& inputs, ThreadPool& pool)
    : PackedMatrix(stacked_rows(parts, gated), cols, format, gated) {
  std::vector<std::pair<const SourceCodes*, size_t>> table;
  table.reserve(size_t(view_.rows));
  for (const SourceCodes& part : parts)
    for (size_t r = 0; r < part.rows; ++r) table.emplace_back(&part, r);
  allocate();
  put_inputs(inputs);
  with_layout(format.layout, [&](auto layout) {
    if constexpr (layout.kHolds != Holds::codes) {
      throw std::invalid_argument("only weights of int8 and int4 are packed from codes");
    } else {
      pool.parallel_for(view_.panels(), [&](int panel, int) {
        RowBuffer buffer(view_);
        char* out = bytes_of(view_.panel(panel));
        for (int lane = 0; lane < kLanes; ++lane)
          if (const int row = source_row(view_, panel, lane); row >= 0)
            layout.put_lane(view_, out, lane, buffer.copy(*table[size_t(row)].first, table[size_t(row)].second, view_.cols));
      });
    }
  });
}

PackedMatrix::PackedMatrix(const std::vector<SourceBlocks>& parts, size_t cols, const Format& format, bool gated,
                           const ColumnInputs& inputs, const std::vector<SourceSparse>& sparse, ThreadPool& pool)
    : PackedMatrix(stacked_rows(parts, gated), cols, format, gated) {
  if (format.layout != Layout::blocks) throw std::invalid_argument("blocks are not packed as another layout");
  std::vector<const char*> table;
  table.reserve(size_t(view_.rows));
  for (const SourceBlocks& part : parts)
    for (size_t r = 0; r < part.rows; ++r) table.push_back(part.data + r * part.row_bytes);
  allocate();
  put_inputs(inputs);
  if (view_.format.nonzeros > 0) {
    put_sparse(view_, sparse, bytes_of(reinterpret_cast<const char*>(view_.sparse_starts())));
    check_sparse(view_);
  }
  pool.parallel_for(view_.panels(), [&](int panel, int) {
    const char* rows[kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane)
      if (const int row = source_row(view_, panel, lane); row >= 0) rows[lane] = table[size_t(row)];
    const BlockPanel to = Blocks::panel(view_, panel);
    Blocks::pack_panel(rows, view_, to.kind, bytes_of(to.data));
  });
}

void PackedMatrix::unpack(float* out, const Kernels& kernels, ThreadPool& pool) const {
  const size_t cols = size_t(view_.cols);
  pool.parallel_for(view_.panels(), [&](int panel, int) {
    if (view_.format.layout == Layout::blocks) {
      float* rows[kLanes] = {};
      for (int lane = 0; lane < kLanes; ++lane)
        if (const int row = source_row(view_, panel, lane); row >= 0) rows[lane] = out + size_t(row) * cols;
      kernels.unpack_blocks(view_, panel, rows);
      for (int lane = 0; lane < kLanes && view_.format.nonzeros > 0; ++lane) {
        const int32_t* starts = view_.sparse_starts() + panel * kLanes + lane;
        for (int32_t j = starts[0]; j < starts[1]; ++j) rows[lane][view_.sparse_entries()[j].column] += view_.sparse_entries()[j].value;
      }
      return;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = source_row(view_, panel, lane);
      if (row < 0) continue;
      read_lane(view_, panel, lane, [to = out + size_t(row) * cols](int k, float value) { to[k] = value; });
    }
  });
  if (!view_.format.inputs) return;
  pool.parallel_for(view_.rows, [&](int row, int) {
    float* to = out + size_t(row) * cols;
    const std::vector<float> packed(to, to + cols);
    for (size_t k = 0; k < cols; ++k) to[view_.order()[k]] = packed[k] * view_.factors()[k];
  });
}

}  // namespace quire
