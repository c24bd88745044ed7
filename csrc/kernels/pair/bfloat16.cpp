// Products with weights in bfloat16, also in 12 bits.
#include "kernels/parts.h"
#include "linear/layout_dots.h"
#include "linear/product.h"

namespace quire::QUIRE_ISA {

void bfloat16_product(const LinearArgs* a, int count, ThreadPool& pool) {
  make_products<FloatProduct<DotBf16>>(a, count, pool);
}
void bfloat16_12_product(const LinearArgs* a, int count, ThreadPool& pool) {
  make_products<FloatProduct<Compact<DotBf16>>>(a, count, pool);
}

}  // namespace quire::QUIRE_ISA
