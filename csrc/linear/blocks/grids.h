// The grids of the kinds iq1 to iq3: tables of values of eight or four neighbouring columns. Knows numbers only.
#pragma once

#include <cstdint>

namespace quire {

// The values of an entry are bytes, in the order of columns. For iq1 they are 8 + 8 * (-1, 0 or 1).
struct BlockGrids {
  uint32_t iq1[2048][2], iq2_xxs[256][2], iq2_xs[512][2], iq2_s[1024][2], iq3_xxs[256], iq3_s[512];
};

extern const BlockGrids kBlockGrids;

}  // namespace quire
