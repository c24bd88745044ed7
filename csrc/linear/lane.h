// What a row of a packed weight stands for, whatever its layout. Knows bytes; knows no kernel.
#pragma once

#include "linear/compact.h"
#include "simd/kernels.h"

namespace quire {

// Calls put(column, value) for the columns of lane `lane` of a panel; of some twice, the second time with their value.
template <class Put>
QUIRE_INLINE void read_lane(const MatrixView& w, int panel, int lane, Put&& put) {
  const char* data = w.data + w.panel_bytes() * size_t(panel);
  auto number = [](const char* p, int i) {
    float f;
    __builtin_memcpy(&f, p + i * 4, 4);
    return f;
  };
  auto widened = [](uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float f;
    __builtin_memcpy(&f, &wide, 4);
    return f;
  };
  switch (w.format.layout) {
    case Layout::f32:
      for (int k = 0; k < w.cols; ++k) put(k, number(data, k * 16 + lane));
      return;
    case Layout::bf16: {
      const uint16_t* pairs = reinterpret_cast<const uint16_t*>(data) + lane * 2;
      for (int k = 0; k < w.cols; ++k) put(k, widened(pairs[k / 2 * 32 + k % 2]));
      return;
    }
    case Layout::bf16_12:
      return compact_lane(data, w.padded_cols(), lane, [&](int k, uint16_t bits) {
        if (k < w.cols) put(k, widened(bits));
      });
    case Layout::i8: {
      const uint8_t* bytes = reinterpret_cast<const uint8_t*>(data) + lane * 4;
      const float scale = number(w.tail(panel), lane);
      for (int k = 0; k < w.cols; ++k) put(k, float(bytes[k / 4 * 64 + k % 4] - 128) * scale);
      return;
    }
    case Layout::i4:
      for (int group = 0; group * w.format.group < w.cols; ++group) {
        const char* header = data + w.header_offset(group);
        auto field = [&](const char* p) {
          const uint16_t* halves = reinterpret_cast<const uint16_t*>(p) + lane * 2;
          return w.format.narrow ? widened(halves[group % 2]) : number(p, lane);
        };
        const float scale = field(header), held = w.format.offsets ? field(header + 64) : 8;
        const float offset = w.format.offsets && !w.format.narrow ? held : scale * held;
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(data + w.columns_offset(group)) + lane * 4;
        const int begin = group * w.format.group;
        for (int i = 0; i < w.format.group && begin + i < w.cols; ++i) {
          const int quantum = bytes[i / 8 * 64 + i % 4] >> (i % 8 / 4 * 4) & 15;
          put(begin + i, __builtin_fmaf(scale, float(quantum), -offset));  // as products do
        }
      }
  }
}

}  // namespace quire
