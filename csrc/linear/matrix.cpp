// Packing and unpacking of weights, parallel over panels. Knows the layout; knows no kernel.
#include "linear/matrix.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "linear/lane.h"

namespace quire {

namespace {

constexpr int kPanel = 16;
constexpr int kBlock = 128;  // columns converted at a time: 16 rows of them stay in L1, and are runs to prefetch

constexpr int kSampled = 16;  // steps of a panel in 12 bits whose values choose its table

constexpr float kNoBound = 1e20f;  // the rounding of a screen's rows that are padding: they tell nothing

constexpr float kLeast = 1e-30f;  // smaller magnitudes are held as zero: their reciprocal may not be a number

float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

uint32_t to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = float(mantissa) * 0x1p-24f;  // zero and subnormals, exact
    return from_bits(to_bits(magnitude) | sign);
  }
  if (exponent == 31) return from_bits(sign | 0x7f800000u | (mantissa << 13));
  return from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Round to nearest even; NaN stays NaN.
uint16_t float_to_bf16(float f) {
  const uint32_t bits = to_bits(f);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

float load(const char* p, size_t i, ElementType type) {
  if (type == ElementType::float32) {
    float f;
    std::memcpy(&f, p + i * 4, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, p + i * 2, 2);
  return type == ElementType::bfloat16 ? from_bits(uint32_t{h} << 16) : half_to_float(h);
}

// The nearest whole number, ties to even, of a magnitude under 2^22: what is added leaves no bits for a fraction. (On
// CPUs without an instruction for it std::nearbyint is a call.)
int nearest(float f) {
  constexpr float whole = 12582912.0f;  // 1.5 * 2^23
  return int(to_bits(f + whole)) - int(to_bits(whole));
}

// Columns [k, k + n) of one row as bfloat16 bits; n is at most kBlock.
void read_bf16(const char* row, size_t k, int n, ElementType type, uint16_t* out) {
  if (type == ElementType::bfloat16) {
    std::memcpy(out, row + k * 2, size_t(n) * 2);
  } else if (type == ElementType::float32) {
    float values[kBlock];
    std::memcpy(values, row + k * 4, size_t(n) * 4);
    for (int i = 0; i < n; ++i) out[i] = float_to_bf16(values[i]);
  } else {
    for (int i = 0; i < n; ++i) out[i] = float_to_bf16(load(row, k + size_t(i), type));
  }
}

void read_f32(const char* row, size_t k, int n, ElementType type, float* out) {
  if (type == ElementType::float32) {
    std::memcpy(out, row + k * 4, size_t(n) * 4);
  } else if (type == ElementType::bfloat16) {
    uint16_t halves[kBlock];
    std::memcpy(halves, row + k * 2, size_t(n) * 2);
    for (int i = 0; i < n; ++i) out[i] = from_bits(uint32_t{halves[i]} << 16);
  } else {
    for (int i = 0; i < n; ++i) out[i] = load(row, k + size_t(i), type);
  }
}

struct Row {
  const char* data;  // null: padding
  ElementType type;
};

struct alignas(64) Bf16Block {
  uint16_t lanes[kPanel][kBlock];
};

// Columns [k, k + most) of all rows, zero from `cols` on; returns how many there are.
int read_block(const Row (&rows)[kPanel], int cols, int k, int most, Bf16Block& block) {
  const int n = std::min(most, cols - k);
  for (int lane = 0; lane < kPanel; ++lane) {
    uint16_t* to = block.lanes[lane];
    if (n < most || !rows[lane].data) std::memset(to, 0, sizeof(block.lanes[lane]));
    if (rows[lane].data) read_bf16(rows[lane].data, size_t(k), n, rows[lane].type, to);
  }
  return n;
}

void pack_panel_bf16(const Row (&rows)[kPanel], int cols, uint32_t* out) {
  Bf16Block block;
  for (int k = 0; k < cols; k += kBlock) {
    const int pairs = (read_block(rows, cols, k, kBlock, block) + 1) / 2;
    for (int pair = 0; pair < pairs; ++pair)
      for (int lane = 0; lane < kPanel; ++lane)
        std::memcpy(out + (k / 2 + pair) * kPanel + lane, &block.lanes[lane][2 * pair], 4);
  }
}

// False where there are more escapes than a panel may have.
bool pack_panel_compact(const Row (&rows)[kPanel], const MatrixView& view, char* out) {
  Bf16Block block;
  const int padded = view.padded_cols();
  // A sample's table is good enough for most panels; one that has many escapes gets the table of all its values.
  auto write = [&](int apart, int most_escapes) {
    CompactWriter writer(padded, out);
    for (int k = 0; k < view.cols; k += apart) {
      read_block(rows, view.cols, k, kCompactColumns, block);
      for (const auto& lane : block.lanes) writer.sample(lane);
    }
    writer.choose_table();
    for (int k = 0; k < padded; k += kBlock) {
      read_block(rows, view.cols, k, kBlock, block);
      for (int first = 0; first < std::min(kBlock, padded - k); first += kCompactColumns) {
        uint32_t pairs[kCompactPairs][kPanel];
        for (int lane = 0; lane < kPanel; ++lane)
          for (int pair = 0; pair < kCompactPairs; ++pair)
            std::memcpy(&pairs[pair][lane], &block.lanes[lane][first + 2 * pair], 4);
        writer.step(pairs);
      }
    }
    return writer.finish(most_escapes);
  };
  const int apart = std::max(kCompactColumns, view.cols / kSampled);
  return write(apart, max_escapes(padded) / 4) || write(kCompactColumns, max_escapes(padded));
}

void pack_panel_f32(const Row (&rows)[kPanel], int cols, float* out) {
  alignas(64) float block[kPanel][kBlock];
  for (int k = 0; k < cols; k += kBlock) {
    const int n = std::min(kBlock, cols - k);
    for (int lane = 0; lane < kPanel; ++lane) {
      if (!rows[lane].data) std::memset(block[lane], 0, sizeof(block[lane]));
      if (rows[lane].data) read_f32(rows[lane].data, size_t(k), n, rows[lane].type, block[lane]);
    }
    for (int i = 0; i < n; ++i)
      for (int lane = 0; lane < kPanel; ++lane) out[size_t(k + i) * kPanel + size_t(lane)] = block[lane][i];
  }
}

// The values of one row as float32, zero from `cols` to `padded` and everywhere if it is padding itself.
void read_row(const Row& row, int cols, int padded, float* out) {
  std::memset(out, 0, size_t(padded) * 4);
  if (row.data)
    for (int k = 0; k < cols; k += kBlock) read_f32(row.data, size_t(k), std::min(kBlock, cols - k), row.type, out + k);
}

void put_lane_i8(const std::vector<char>& bytes, int columns, int lane, char* out) {
  for (int k = 0; k < columns; k += 4) std::memcpy(out + k * kPanel + lane * 4, bytes.data() + k, 4);
}

// A scale a row: the largest magnitude becomes 127. Bytes have no sign: they are held plus 128.
void pack_panel_i8(const Row (&rows)[kPanel], const MatrixView& view, char* out) {
  const int padded = view.padded_cols();
  std::vector<float> values(static_cast<size_t>(padded));
  std::vector<char> bytes(static_cast<size_t>(padded));
  float scales[kPanel];
  for (int lane = 0; lane < kPanel; ++lane) {
    read_row(rows[lane], view.cols, padded, values.data());
    int top = 0;  // bits of magnitudes have the order of the numbers
    for (const float v : values) top = std::max(top, int(to_bits(v) & 0x7fffffffu));
    const float most = from_bits(uint32_t(top)), inverse = most >= kLeast ? 127.0f / most : 0.0f;
    for (size_t k = 0; k < bytes.size(); ++k) bytes[k] = char(nearest(values[k] * inverse) + 128);
    put_lane_i8(bytes, padded, lane, out);
    scales[lane] = most / 127.0f;
  }
  std::memcpy(out + view.offset(padded), scales, sizeof(scales));
}

// A panel of the screen of a weight of type `of`. False where a value is too large for it, or no number.
bool pack_screen_panel(const Row (&rows)[kPanel], const MatrixView& view, ElementType of, const Kernels& kernels,
                       char* out) {
  const int columns = (view.cols + kPanel - 1) / kPanel * kPanel;
  std::vector<float> values(static_cast<size_t>(columns));
  std::vector<char> bytes(static_cast<size_t>(columns));
  float fields[3][kPanel];
  for (int lane = 0; lane < kPanel; ++lane) {
    read_row(rows[lane], view.cols, columns, values.data());
    if (of == ElementType::bfloat16 && rows[lane].type != of)
      for (float& v : values) v = from_bits(uint32_t{float_to_bf16(v)} << 16);
    const ScreenWeightRow row = kernels.screen_weight_row(values.data(), columns, bytes.data());
    if (!(row.rounding < kNoBound)) return false;
    put_lane_i8(bytes, view.padded_cols(), lane, out);
    fields[0][lane] = row.scale;
    fields[1][lane] = row.length;
    fields[2][lane] = rows[lane].data ? row.rounding : kNoBound;
  }
  std::memcpy(out + view.offset(view.padded_cols()), fields, sizeof(fields));
  return true;
}

// A scale for each group of columns of a row. Without offsets the largest magnitude becomes -8, so that all sixteen
// values are used; with them the range from least to largest becomes 0 to 15.
void pack_panel_i4(const Row (&rows)[kPanel], const MatrixView& view, char* out) {
  const int padded = view.padded_cols(), group = view.format.group;
  const bool narrow = view.format.narrow;
  std::vector<float> values(static_cast<size_t>(padded));
  std::memset(out, 0, view.panel_bytes());
  for (int lane = 0; lane < kPanel; ++lane) {
    read_row(rows[lane], view.cols, padded, values.data());
    for (int g = 0; g * group < padded; ++g) {
      const float* v = values.data() + g * group;
      float least = 0, largest = 0;
      for (int k = 0; k < group; ++k) least = std::min(least, v[k]), largest = std::max(largest, v[k]);
      const float furthest = -least > largest ? least : largest;
      const float exact = view.format.offsets ? (largest - least) / 15.0f : furthest / -8.0f;
      const float scale = narrow ? from_bits(uint32_t{float_to_bf16(exact)} << 16) : exact;
      const float inverse = std::abs(scale) >= kLeast ? 1.0f / scale : 0.0f;
      const int zero = view.format.offsets ? nearest(-least * inverse) : 8;
      auto put = [&](char* field, float value) {
        const uint16_t half = float_to_bf16(value);
        if (narrow) std::memcpy(field + lane * 4 + g % 2 * 2, &half, 2);
        else std::memcpy(field + lane * 4, &value, 4);
      };
      char *header = out + view.header_offset(g), *bytes = out + view.columns_offset(g);
      put(header, scale);
      if (view.format.offsets) put(header + 64, narrow ? float(zero) : scale * float(zero));
      uint8_t quanta[128];
      for (int k = 0; k < group; ++k)
        quanta[k] = uint8_t(std::min(15, std::max(0, nearest(v[k] * inverse) + zero)));
      for (int k = 0; k < group; k += 8) {
        char four[4];
        for (int i = 0; i < 4; ++i) four[i] = char(quanta[k + i] | quanta[k + 4 + i] << 4);
        std::memcpy(bytes + k * 8 + lane * 4, four, 4);
      }
    }
  }
}

size_t total_rows(const std::vector<SourceRows>& parts) {
  size_t rows = 0;
  for (const SourceRows& part : parts) rows += part.rows;
  return rows;
}

}  // namespace

int source_row(const MatrixView& view, int panel, int lane) {
  if (!view.gated) {
    const int row = panel * kPanel + lane;
    return row < view.rows ? row : -1;
  }
  const int half = view.rows / 2, row = panel / 2 * kPanel + lane;
  return row < half ? row + (panel % 2) * half : -1;
}

PackedMatrix::PackedMatrix(size_t rows, size_t cols, Format format, bool gated) {
  constexpr size_t limit = size_t(std::numeric_limits<int>::max()) / 64;
  if (rows == 0 || cols == 0) throw std::invalid_argument("a weight needs at least one row and one column");
  if (rows > limit || cols > limit) throw std::invalid_argument("a weight has more rows or columns than fit");
  view_.rows = int(rows);
  view_.cols = int(cols);
  if (format.layout == Layout::i4 && format.group != 32 && format.group != 64 && format.group != 128)
    throw std::invalid_argument("int4 weights have groups of 32, 64 or 128 columns");
  if (format.narrow && format.layout != Layout::i4)
    throw std::invalid_argument("only int4 weights have scales in bfloat16");
  if (format.screened && (gated || format.layout == Layout::i8 || format.layout == Layout::i4))
    throw std::invalid_argument("only float32 and bfloat16 weights that are not gated have a screen");
  view_.format = format;
  view_.gated = gated;
  if (format.layout == Layout::bf16_12) {  // with few columns the list behind them takes more than it saves
    MatrixView plain = view_;
    plain.format.layout = Layout::bf16;
    if (plain.panel_bytes() <= view_.panel_bytes()) view_ = plain;
  }
}

PackedMatrix::PackedMatrix(size_t rows, size_t cols, Format format, bool gated, const char* data, size_t nbytes)
    : PackedMatrix(rows, cols, format, gated) {
  if (nbytes != view_.nbytes()) throw std::invalid_argument("a packed weight has another size than its shape needs");
  if (reinterpret_cast<uintptr_t>(data) % 64 != 0)
    throw std::invalid_argument("a packed weight must be 64-byte aligned");
  view_.data = data;
}

PackedMatrix::PackedMatrix(const std::vector<SourceRows>& parts, size_t cols, Format format, bool gated,
                           const Kernels& kernels, ThreadPool& pool)
    : PackedMatrix(total_rows(parts), cols, format, gated) {
  if (gated && (parts.size() != 2 || parts[0].rows != parts[1].rows))
    throw std::invalid_argument("a gated weight needs a gate and an up projection of equal shape");
  std::vector<Row> table;
  table.reserve(size_t(view_.rows));
  for (const SourceRows& part : parts)
    for (size_t r = 0; r < part.rows; ++r) table.push_back({part.data + r * part.row_bytes, part.type});

  std::atomic<bool> fits = true, screens = true;
  const ElementType held = format.layout == Layout::f32 ? ElementType::float32 : ElementType::bfloat16;
  auto pack_all = [&] {
    memory_ = HugeBuffer(view_.nbytes());
    view_.data = static_cast<const char*>(memory_.data());
    pool.parallel_for(view_.panels(), [&](int panel, int) {
      Row lanes[kPanel];
      for (int lane = 0; lane < kPanel; ++lane) {
        const int row = source_row(view_, panel, lane);
        lanes[lane] = row < 0 ? Row{nullptr, ElementType::float32} : table[size_t(row)];
      }
      char* out = static_cast<char*>(memory_.data()) + view_.panel_bytes() * size_t(panel);
      if (screens && view_.has_screen()) {
        const MatrixView screen = view_.screen();
        char* behind = static_cast<char*>(memory_.data()) + (screen.data - view_.data);
        behind += screen.panel_bytes() * size_t(panel);
        if (!pack_screen_panel(lanes, screen, held, kernels, behind)) screens = false;
      }
      switch (view_.format.layout) {
        case Layout::f32:
          return pack_panel_f32(lanes, view_.cols, reinterpret_cast<float*>(out));
        case Layout::bf16:
          return pack_panel_bf16(lanes, view_.cols, reinterpret_cast<uint32_t*>(out));
        case Layout::i8:
          return pack_panel_i8(lanes, view_, out);
        case Layout::i4:
          return pack_panel_i4(lanes, view_, out);
        case Layout::bf16_12:
          if (fits && !pack_panel_compact(lanes, view_, out)) fits = false;
      }
    });
  };
  pack_all();
  if (!fits) {
    view_.format.layout = Layout::bf16;
    pack_all();
  }
  view_.format.screened = view_.format.screened && screens;
}

void PackedMatrix::unpack(float* out, ThreadPool& pool) const {
  const size_t cols = size_t(view_.cols);
  pool.parallel_for(view_.panels(), [&](int panel, int) {
    for (int lane = 0; lane < kPanel; ++lane) {
      const int row = source_row(view_, panel, lane);
      if (row < 0) continue;
      read_lane(view_, panel, lane, [to = out + size_t(row) * cols](int k, float value) { to[k] = value; });
    }
  });
}

}  // namespace quire
