// Products of activations in int8 with weights of blocks.
#include "kernels/parts.h"
#include "linear/blocks/rounded_product.h"

namespace quire::QUIRE_ISA {

void blocks_product_i8(const LinearArgs* a, int count, ThreadPool& pool) {
  make_products<BlockProduct<RoundedBlocks>>(a, count, pool);
}

size_t blocks_workspace_i8(const MatrixView& w, int max_rows) { return RoundedBlocks::workspace(w, max_rows); }

}  // namespace quire::QUIRE_ISA
