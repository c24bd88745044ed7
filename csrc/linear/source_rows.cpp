// Reading and rounding of source rows. Knows bytes; knows no layout.
#include "linear/source_rows.h"

#include <algorithm>

namespace quire {

namespace {

float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = float(mantissa) * 0x1p-24f;  // zero and subnormals, exact
    return from_bits(to_bits(magnitude) | sign);
  }
  if (exponent == 31) return from_bits(sign | 0x7f800000u | (mantissa << 13));
  return from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t half_at(const char* p, int i) {
  uint16_t half;
  std::memcpy(&half, p + size_t(i) * 2, 2);
  return half;
}

}  // namespace

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
    for (int i = 0; i < n; ++i) out[i] = float_to_bf16(half_to_float(half_at(row.data, k + i)));
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
    for (int i = 0; i < n; ++i) out[i] = half_to_float(half_at(row.data, k + i));
  }
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
