// Blocks whose rows have tables of their own, which lie row by row (layouts/blocks.h): their values, and the inner loops of
// products with float activations. Knows panels; knows no thread.
//
// Lane i of a vector takes the columns 16 j + i. Each output is 16 chains of multiply-adds, one per lane, over ascending j,
// added in the end by reduce_add. No tile shape changes that.
#pragma once

#include "linear/layouts/blocks.h"
#include "simd/simd_values.h"

namespace quire::QUIRE_ISA {

constexpr int kTableColumns = 128;  // of a unit
constexpr int kTableChunk = 256;    // unpacked at a time

// Calls put(j, values) for the columns 16 j to 16 j + 15 of a row of a unit.
template <int bits, class Put>
QUIRE_INLINE void table_values(const char* row, const float* table, Put&& put) {
  const Table16 values = bits == 4 ? table16(table) : twice8(table);
  const I codes = bits == 4 ? iload(row) : load_bytes(row) | shl<8>(load_bytes(row + 16)) | shl<16>(load_bytes(row + 32));
  unrolled<8>([&](auto j) QUIRE_INLINE_LAMBDA { put(j.value, pick(values, shr<bits * j.value>(codes))); });
}

// Calls f(row of 16, its codes, its table, first column) for the units of columns [k, k + columns) of a panel.
template <int bits, class F>
QUIRE_INLINE void for_table_rows(const char* panel, int k, int columns, F&& f) {
  constexpr size_t row_bytes = kTableColumns / 8 * bits;
  const float* tables = reinterpret_cast<const float*>(panel);
  const char* unit = panel + (64 << bits) + size_t(k / kTableColumns) * 16 * row_bytes;
  for (int column = 0; column < columns; column += kTableColumns)
    repeated<16>([&](int r) QUIRE_INLINE_LAMBDA {
      __builtin_prefetch(unit + 4096, 0, 3);
      f(r, unit, tables + (r << bits), k + column);
      unit += row_bytes;
    });
}

// The values of columns [k, k + columns) of a panel, as other kinds are unpacked: [columns][16].
template <int bits>
void unpack_tables(const char* panel, int k, int columns, float* out) {
  for_table_rows<bits>(panel, k, columns, [&](int r, const char* row, const float* table, int first) QUIRE_INLINE_LAMBDA {
    alignas(64) float values[kTableColumns];
    table_values<bits>(row, table, [&](int j, V v) QUIRE_INLINE_LAMBDA { store(values + 16 * j, v); });
    for (int i = 0; i < kTableColumns; ++i) out[(first - k + i) * 16 + r] = values[i];
  });
}

// The same row by row: [16][kTableChunk].
template <int bits>
void unpack_table_rows(const char* panel, int k, int columns, float* out) {
  for_table_rows<bits>(panel, k, columns, [&](int r, const char* row, const float* table, int first) QUIRE_INLINE_LAMBDA {
    float* to = out + r * kTableChunk + (first - k);
    table_values<bits>(row, table, [&](int j, V v) QUIRE_INLINE_LAMBDA { store(to + 16 * j, v); });
  });
}

// A panel times a row of activations; its 16 outputs to c.
template <int bits>
void multiply_tables(const char* panel, int columns, const float* x, float* c) {
  V sums[16];
  repeated<16>([&](int r) QUIRE_INLINE_LAMBDA { sums[r] = set1(0); });
  for_table_rows<bits>(panel, 0, columns, [&](int r, const char* row, const float* table, int k) QUIRE_INLINE_LAMBDA {
    V sum = sums[r];
    table_values<bits>(row, table, [&](int j, V v) QUIRE_INLINE_LAMBDA { sum = fma(load(x + k + 16 * j), v, sum); });
    sums[r] = sum;
  });
  repeated<16>([&](int r) QUIRE_INLINE_LAMBDA { c[r] = reduce_add(sums[r]); });
}

// Tiles for which all sums stay in registers: rows of activations times rows of a panel.
#if defined(QUIRE_AVX512)
constexpr int kLaneTileRows = 6, kLaneOutputs = 4;
#elif defined(QUIRE_AVX2)
constexpr int kLaneTileRows = 2, kLaneOutputs = 2;
#else
constexpr int kLaneTileRows = 1, kLaneOutputs = 1;
#endif

// sums [R][16][16] += x [R][x_stride] times values [16][kTableChunk], lane by lane, in `columns` of them.
template <int R>
void add_lanes(const float* x, size_t x_stride, const float* values, int columns, float* sums) {
  constexpr int P = kLaneOutputs;
  for (int output = 0; output < 16; output += P, values += P * kTableChunk) {
    V acc[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = load(sums + (r * 16 + output + p) * 16);
    for (int k = 0; k < columns; k += 16) {
      V w[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) w[p] = load(values + p * kTableChunk + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const V v = load(x + size_t(r) * x_stride + k);
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) acc[r][p] = fma(v, w[p], acc[r][p]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) store(sums + (r * 16 + output + p) * 16, acc[r][p]);
  }
}

using AddLanes = void(const float* x, size_t x_stride, const float* values, int columns, float* sums);
template <int R = kLaneTileRows>
inline AddLanes* lane_adder(int rows) {
  if constexpr (R > 1)
    if (rows < R) return lane_adder<R - 1>(rows);
  return add_lanes<R>;
}

}  // namespace quire::QUIRE_ISA
