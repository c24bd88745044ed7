// Rows of a weight as a checkpoint has them: floats of three types, or codes with scales. Knows bytes and conversions;
// knows no layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "plan/memory.h"

namespace quire {

enum class ElementType : int { float32, float16, bfloat16 };

// Rows [rows, K] of a source array: elements of a row are adjacent, rows `row_bytes` apart.
struct SourceRows {
  const char* data;
  size_t rows, row_bytes;
  ElementType type;
};

// One row. `data` null: padding, all zero.
struct SourceRow {
  const char* data = nullptr;
  ElementType type = ElementType::float32;
};

// The rows of a panel.
struct PanelRows {
  static constexpr int kLanes = 16;
  SourceRow lanes[kLanes];
};

// A row of codes with its scales and offsets. The arrays have as many elements as the layout has columns and groups.
struct RowCodes {
  uint8_t* codes;
  float* scales;
  float* offsets;  // only for layouts with offsets
};

// Codes of several rows: arrays [rows, columns] and [rows, groups], each C-contiguous.
struct SourceCodes {
  const uint8_t* codes;
  const float* scales;
  const float* offsets;  // or null
  size_t rows;
};

// Rows of blocks, `row_bytes` apart.
struct SourceBlocks {
  const char* data;
  size_t rows, row_bytes;
};

QUIRE_INLINE float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

QUIRE_INLINE uint32_t to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

QUIRE_INLINE float widened(uint16_t bfloat16) { return from_bits(uint32_t{bfloat16} << 16); }

QUIRE_INLINE float f16_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = float(mantissa) * 0x1p-24f;  // zero and subnormals, exact
    return from_bits(to_bits(magnitude) | sign);
  }
  if (exponent == 31) return from_bits(sign | 0x7f800000u | (mantissa << 13));
  return from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

QUIRE_INLINE float float_at(const char* p, int i) {
  float f;
  std::memcpy(&f, p + size_t(i) * 4, 4);
  return f;
}

// Round to nearest even; NaN stays NaN.
uint16_t float_to_bf16(float f);
uint16_t float_to_f16(float f);

// The nearest integer, ties to even, of a magnitude below 2^22.
int nearest(float f);

constexpr int kPackColumns = 128;  // columns converted at a time: 16 rows of them stay in L1, and runs are prefetched
constexpr float kLeastScale = 1e-30f;  // smaller magnitudes are held as zero: their reciprocal may overflow

// Columns [k, k + n) of a row, n at most kPackColumns.
void read_bf16(const SourceRow& row, int k, int n, uint16_t* out);
void read_f32(const SourceRow& row, int k, int n, float* out);
// False if a finite value becomes infinite.
bool read_f16(const SourceRow& row, int k, int n, uint16_t* out);

// The values of a row as float32, zero from `cols` to `padded` and everywhere in a row of padding.
void read_row(const SourceRow& row, int cols, int padded, float* out);

struct alignas(64) Bf16Block {
  uint16_t lanes[PanelRows::kLanes][kPackColumns];
};

// Columns [k, k + most) of all rows, zero from `cols` on; returns how many there are.
int read_block(const PanelRows& rows, int cols, int k, int most, Bf16Block& block);

}  // namespace quire
