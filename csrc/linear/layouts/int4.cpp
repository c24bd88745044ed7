#include "linear/layouts/int4.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "linear/pack_codes.h"

namespace quire {

void Int4::check(const Format& format) {
  if (format.group != 32 && format.group != 64 && format.group != 128)
    throw std::invalid_argument("int4 weights have groups of 32, 64 or 128 columns");
}

void Int4::quantize(const MatrixView& view, const float* values, const RowCodes& codes) {
  const Format& format = view.format;
  for (int g = 0; g * format.group < view.padded_cols(); ++g) {
    const float* v = values + g * format.group;
    float least = 0, largest = 0;
    for (int k = 0; k < format.group; ++k) least = std::min(least, v[k]), largest = std::max(largest, v[k]);
    const float furthest = -least > largest ? least : largest;
    const float exact = format.offsets ? (largest - least) / 15.0f : furthest / -8.0f;
    const float scale = format.narrow ? widened(float_to_bf16(exact)) : exact;
    const float inverse = std::abs(scale) >= kLeastScale ? 1.0f / scale : 0.0f;
    const int zero = format.offsets ? nearest(-least * inverse) : 8;
    for (int k = 0; k < format.group; ++k)
      codes.codes[g * format.group + k] = uint8_t(std::min(15, std::max(0, nearest(v[k] * inverse) + zero)));
    codes.scales[g] = scale;
    codes.offsets[g] = format.narrow ? float(zero) : scale * float(zero);
  }
}

void Int4::put_lane(const MatrixView& view, char* panel, int lane, const RowCodes& codes) {
  const Format& format = view.format;
  for (int g = 0; g * format.group < view.padded_cols(); ++g) {
    auto put = [&](char* field, float value) {
      const uint16_t half = float_to_bf16(value);
      if (format.narrow) std::memcpy(field + lane * 4 + g % 2 * 2, &half, 2);
      else std::memcpy(field + lane * 4, &value, 4);
    };
    char *header = panel + header_offset(view, g), *bytes = panel + columns_offset(view, g);
    put(header, codes.scales[g]);
    if (format.offsets) put(header + 64, codes.offsets[g]);
    const uint8_t* from = codes.codes + g * format.group;
    for (int k = 0; k < format.group; k += 8) {
      char four[4];
      for (int i = 0; i < 4; ++i) four[i] = char(from[k + i] | from[k + 4 + i] << 4);
      std::memcpy(bytes + k * 8 + lane * 4, four, 4);
    }
  }
}

bool Int4::pack_panel(const PanelRows& rows, const MatrixView& view, char* out) {
  return pack_codes<Int4>(rows, view, out);
}

}  // namespace quire
