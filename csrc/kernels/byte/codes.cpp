// Products of activations in int8 with weights in int8 and int4.
#include "kernels/parts.h"
#include "linear/product.h"

namespace quire::QUIRE_ISA {

void int8_product_i8(const LinearArgs* a, int count, ThreadPool& pool) {
  make_products<QuantizedProduct<DotI8>>(a, count, pool);
}
void int4_product_i8(const LinearArgs* a, int count, ThreadPool& pool) {
  make_products<QuantizedProduct<DotI4>>(a, count, pool);
}

size_t linear_workspace_i8(const MatrixView& w, int max_rows) {
  return w.format.layout == Layout::blocks ? blocks_workspace_i8(w, max_rows) : quantized_bytes(w, max_rows);
}

}  // namespace quire::QUIRE_ISA
