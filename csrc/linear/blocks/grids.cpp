// The grids are packed in a file that the Python package reads too (weights/layouts/blocks/grids.bin): the 16 bits of
// an entry are the indices of eight values into a list of three, or of four values into a list of eight.
#include "linear/blocks/grids.h"

#include <cstddef>

namespace quire {

namespace {

constexpr uint8_t kPacked[] = {
#include "block_grids.inc"
};

constexpr uint8_t kTernary[] = {0, 8, 16}, kSteps2[] = {8, 25, 43};
constexpr uint8_t kSteps3xxs[] = {4, 12, 20, 28, 36, 44, 52, 62}, kSteps3s[] = {1, 3, 5, 7, 9, 11, 13, 15};

class Reader {
 public:
  template <size_t N, size_t M>
  constexpr void pairs(uint32_t (&grid)[N][2], const uint8_t (&values)[M]) {
    for (auto& entry : grid) {
      const uint32_t packed = next();
      for (int i = 0; i < 8; ++i) entry[i / 4] |= uint32_t{values[packed >> (2 * i) & 3]} << (i % 4 * 8);
    }
  }
  template <size_t N>
  constexpr void words(uint32_t (&grid)[N], const uint8_t (&values)[8]) {
    for (uint32_t& entry : grid) {
      const uint32_t packed = next();
      for (int i = 0; i < 4; ++i) entry |= uint32_t{values[packed >> (3 * i) & 7]} << (i * 8);
    }
  }

 private:
  constexpr uint32_t next() {
    const uint32_t packed = uint32_t(kPacked[at_] | kPacked[at_ + 1] << 8);
    at_ += 2;
    return packed;
  }
  size_t at_ = 0;
};

constexpr BlockGrids unpacked() {
  BlockGrids grids{};
  Reader reader;
  reader.pairs(grids.iq1, kTernary);
  reader.pairs(grids.iq2_xxs, kSteps2);
  reader.pairs(grids.iq2_xs, kSteps2);
  reader.pairs(grids.iq2_s, kSteps2);
  reader.words(grids.iq3_xxs, kSteps3xxs);
  reader.words(grids.iq3_s, kSteps3s);
  return grids;
}

static_assert(sizeof(kPacked) == 2 * (2048 + 256 + 512 + 1024 + 256 + 512));

}  // namespace

constinit const BlockGrids kBlockGrids = unpacked();

}  // namespace quire
