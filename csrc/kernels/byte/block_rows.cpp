// Products of one row of activations in int8 with panels of blocks.
#include "linear/blocks/row.h"

namespace quire::QUIRE_ISA {

template <BlockKind kind>
constexpr MultiplyRow* row_multiplier() {
  if constexpr (holds_floats(kind)) return nullptr;
  else return multiply_row<kind>;
}

extern MultiplyRow* const kMultiplyRow[] = {
#define QUIRE_ROW(name, columns, bytes, head, head_bytes) row_multiplier<BlockKind::name>(),
    QUIRE_BLOCK_KINDS(QUIRE_ROW)
#undef QUIRE_ROW
};

}  // namespace quire::QUIRE_ISA
