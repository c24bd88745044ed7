// Writing bfloat16 in 12 bits. Knows the layout; knows no matrix.
#include "linear/compact_writer.h"

#include <cstring>
#include <numeric>

namespace quire {

namespace {

constexpr int kMagnitudes = kCompactTable / 2;  // the table has each magnitude with both signs
typedef uint8_t Bytes __attribute__((vector_size(16)));

Bytes load_bytes(const void* p) {
  Bytes v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

Bytes even_bytes(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}

Bytes odd_bytes(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

}  // namespace

void CompactWriter::sample(const uint16_t* values) {
  for (int i = 0; i < kCompactColumns; ++i) ++counts_[values[i] >> 8 & 127];
}

// Eight consecutive magnitudes, or seven and zero, whichever cover more of the sample.
void CompactWriter::choose_table() {
  uint32_t best = 0;
  for (int width = kMagnitudes; width >= kMagnitudes - 1; --width) {
    uint32_t sum = std::accumulate(counts_, counts_ + width, uint32_t{0});
    const uint32_t zeros = width == kMagnitudes ? 0 : counts_[0];
    for (int first = 0; first + width < 128; ++first) {
      if (sum + zeros > best && (width == kMagnitudes || first > 0))
        best = sum + zeros, least_ = uint8_t(first), width_ = uint8_t(width);
      sum += counts_[first + width] - counts_[first];
    }
  }
  uint8_t table[kCompactTable];
  for (int i = 0; i < kCompactTable; ++i) {
    const int slot = i % kMagnitudes;
    table[i] = uint8_t((slot < width_ ? least_ + slot : 0) | i / kMagnitudes << 7);
  }
  std::memcpy(tail(), table, sizeof(table));
}

void CompactWriter::step(const uint32_t (&pairs)[kCompactPairs][16]) {
  const uint8_t zero_mask = width_ < kMagnitudes ? 255 : 0;
  const Bytes none = {}, has_zero = none + zero_mask;
  Bytes missing = none;
  for (int at = 0; at < 64; at += 16) {
    Bytes codes = none;
    for (int half = 0; half < 2; ++half) {
      const Bytes first = load_bytes(pairs[2 * half] + at / 4), second = load_bytes(pairs[2 * half + 1] + at / 4);
      const Bytes low = even_bytes(first, second), high = odd_bytes(first, second);
      const Bytes magnitude = high & 127, from_least = magnitude - least_;
      const Bytes in_row = Bytes(from_least < width_), zero = Bytes(magnitude == 0) & has_zero;
      const Bytes slot = (from_least & in_row) | (zero & ~in_row & uint8_t(kMagnitudes - 1));
      missing |= ~(in_row | zero);
      codes |= (slot | (high >> 4 & uint8_t(kMagnitudes))) << uint8_t(4 * half);
      std::memcpy(to_ + 64 + 64 * half + at, &low, sizeof(low));
    }
    std::memcpy(to_ + at, &codes, sizeof(codes));
  }
  uint64_t any[2];
  std::memcpy(any, &missing, sizeof(any));
  if (any[0] | any[1]) {
    const uint32_t begin = uint32_t((to_ - panel_) / ptrdiff_t(kCompactBytes)) * kCompactValues;
    for (int i = 0; i < kCompactValues; ++i) {
      const uint16_t bits = uint16_t(pairs[i / 32][i % 16] >> (i / 16 % 2 * 16));
      if (compact_bits(to_, tail(), i / 16, i % 16) != bits) escapes_.push_back({begin + uint32_t(i), bits});
    }
  }
  to_ += kCompactBytes;
}

bool CompactWriter::finish(int most) {
  if (escapes_.size() > size_t(most)) return false;
  escapes_.resize(size_t(max_escapes(columns_)), {kNoEscape, 0});
  std::memcpy(tail() + kCompactTable, escapes_.data(), escapes_.size() * sizeof(Escape));
  return true;
}

}  // namespace quire
