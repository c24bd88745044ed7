#include "linear/layouts/int8.h"

#include <algorithm>

#include "linear/pack_codes.h"

namespace quire {

void Int8::quantize(const MatrixView& view, const float* values, const RowCodes& codes) {
  const int padded = view.padded_cols();
  int top = 0;  // the bits of magnitudes compare as the numbers do
  for (int k = 0; k < padded; ++k) top = std::max(top, int(to_bits(values[k]) & 0x7fffffffu));
  const float most = from_bits(uint32_t(top)), inverse = most >= kLeastScale ? 127.0f / most : 0.0f;
  for (int k = 0; k < padded; ++k) codes.codes[k] = uint8_t(nearest(values[k] * inverse) + 128);
  codes.scales[0] = most / 127.0f;
}

void Int8::put_lane(const MatrixView& view, char* panel, int lane, const RowCodes& codes) {
  for (int k = 0; k < view.padded_cols(); k += 4) std::memcpy(panel + k * 16 + lane * 4, codes.codes + k, 4);
  std::memcpy(panel + view.geometry.columns_bytes + size_t(lane) * 4, codes.scales, 4);
}

bool Int8::pack_panel(const PanelRows& rows, const MatrixView& view, char* out) {
  return pack_codes<Int8>(rows, view, out);
}

}  // namespace quire
