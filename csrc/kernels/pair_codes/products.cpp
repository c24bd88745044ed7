// Products of activations in bfloat16 with weights in int4 and of blocks.
#include "kernels/parts.h"
#include "linear/blocks/pair_product.h"

namespace quire::QUIRE_ISA {

void int4_product_bf16(const LinearArgs* a, int count, ThreadPool& pool) {
  make_products<FloatProduct<DotI4Pairs>>(a, count, pool);
}
void blocks_product_bf16(const LinearArgs* a, int count, ThreadPool& pool) {
  make_products<BlockProduct<PairBlocks>>(a, count, pool);
}

bool multiplies_pairs(const MatrixView& w) { return has_pairs(w); }

}  // namespace quire::QUIRE_ISA
