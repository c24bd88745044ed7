// Products of one row of float activations with panels of blocks.
#include "linear/blocks/value_row.h"

namespace quire::QUIRE_ISA {

template <BlockKind kind, int P>
constexpr MultiplyValues* value_multiplier() {
  if constexpr (kHasValues<kind> && P <= kValuePanels) return multiply_values<kind, P>;
  else return nullptr;
}

extern MultiplyValues* const kMultiplyValues[][3] = {
#define QUIRE_ROW(name, columns, bytes, head, head_bytes)                                  \
  {value_multiplier<BlockKind::name, 1>(), value_multiplier<BlockKind::name, 2>(), value_multiplier<BlockKind::name, 4>()},
    QUIRE_BLOCK_KINDS(QUIRE_ROW)
#undef QUIRE_ROW
};

}  // namespace quire::QUIRE_ISA
