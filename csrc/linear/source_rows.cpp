// Reading and rounding of source rows. Knows bytes; knows no layout.
#include "linear/source_rows.h"

#include <algorithm>

namespace quire {

namespace {

uint16_t half_at(const char* p, int i) {
  uint16_t half;
  std::memcpy(&half, p + size_t(i) * 2, 2);
  return half;
}

}  // namespace

uint16_t float_to_f16(float f) {
  const uint32_t sign = to_bits(f) >> 16 & 0x8000u, bits = to_bits(f) & 0x7fffffffu;
  if (bits > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (bits < 0x38800000u) return uint16_t(sign | uint32_t(nearest(from_bits(bits) * 0x1p24f)));  // zero and subnormals
  const uint32_t rounded = (bits + 0xfffu + (bits >> 13 & 1u)) >> 13;
  return uint16_t(sign | std::min(rounded - (112u << 10), 0x7c00u));
}

uint16_t float_to_bf16(float f) {
  const uint32_t bits = to_bits(f);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

// The sum leaves no bits for a fraction. (std::nearbyint is a call on CPUs without an instruction for it.)
int nearest(float f) {
  constexpr float whole = 12582912.0f;  // 1.5 * 2^23
  return int(to_bits(f + whole)) - int(to_bits(whole));
}

void read_bf16(const SourceRow& row, int k, int n, uint16_t* out) {
  if (row.type == ElementType::bfloat16) {
    std::memcpy(out, row.data + size_t(k) * 2, size_t(n) * 2);
  } else if (row.type == ElementType::float32) {
    float values[kPackColumns];
    std::memcpy(values, row.data + size_t(k) * 4, size_t(n) * 4);
    for (int i = 0; i < n; ++i) out[i] = float_to_bf16(values[i]);
  } else {
    for (int i = 0; i < n; ++i) out[i] = float_to_bf16(f16_to_float(half_at(row.data, k + i)));
  }
}

void read_f32(const SourceRow& row, int k, int n, float* out) {
  if (row.type == ElementType::float32) {
    std::memcpy(out, row.data + size_t(k) * 4, size_t(n) * 4);
  } else if (row.type == ElementType::bfloat16) {
    uint16_t halves[kPackColumns];
    std::memcpy(halves, row.data + size_t(k) * 2, size_t(n) * 2);
    for (int i = 0; i < n; ++i) out[i] = widened(halves[i]);
  } else {
    for (int i = 0; i < n; ++i) out[i] = f16_to_float(half_at(row.data, k + i));
  }
}

bool read_f16(const SourceRow& row, int k, int n, uint16_t* out) {
  if (row.type == ElementType::float16) {
    std::memcpy(out, row.data + size_t(k) * 2, size_t(n) * 2);
    return true;
  }
  float values[kPackColumns];
  read_f32(row, k, n, values);
  bool fits = true;
  for (int i = 0; i < n; ++i) {
    out[i] = float_to_f16(values[i]);
    fits = fits && ((out[i] & 0x7fffu) != 0x7c00u || (to_bits(values[i]) & 0x7fffffffu) == 0x7f800000u);
  }
  return fits;
}

void read_row(const SourceRow& row, int cols, int padded, float* out) {
  std::memset(out, 0, size_t(padded) * 4);
  if (!row.data) return;
  for (int k = 0; k < cols; k += kPackColumns) read_f32(row, k, std::min(kPackColumns, cols - k), out + k);
}

int read_block(const PanelRows& rows, int cols, int k, int most, Bf16Block& block) {
  const int n = std::min(most, cols - k);
  for (int lane = 0; lane < PanelRows::kLanes; ++lane) {
    uint16_t* to = block.lanes[lane];
    if (n < most || !rows.lanes[lane].data) std::memset(to, 0, sizeof(block.lanes[lane]));
    if (rows.lanes[lane].data) read_bf16(rows.lanes[lane], k, n, to);
  }
  return n;
}

}  // namespace quire
