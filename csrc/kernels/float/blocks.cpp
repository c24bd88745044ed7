// Products of float activations with weights of blocks.
#include "kernels/parts.h"
#include "linear/blocks/exact_product.h"

namespace quire::QUIRE_ISA {

static Linear* product_of(const MatrixView& w) {
  return has_tables(w) ? make_products<TableProduct> : make_products<BlockProduct<ExactBlocks>>;
}

void blocks_product(const LinearArgs* args, int count, ThreadPool& pool) {
  for (int first = 0, next; first < count; first = next) {
    Linear* product = product_of(args[first].weight);
    for (next = first + 1; next < count && product_of(args[next].weight) == product;) ++next;
    product(args + first, next - first, pool);
  }
}

}  // namespace quire::QUIRE_ISA
