// Products of float activations with weights in int8 and int4.
#include "kernels/parts.h"
#include "linear/product.h"

namespace quire::QUIRE_ISA {

void int8_product(const LinearArgs* a, int count, ThreadPool& pool) {
  make_products<FloatProduct<DotI8Wide>>(a, count, pool);
}
void int4_product(const LinearArgs* a, int count, ThreadPool& pool) {
  make_products<FloatProduct<DotI4Wide>>(a, count, pool);
}

}  // namespace quire::QUIRE_ISA
