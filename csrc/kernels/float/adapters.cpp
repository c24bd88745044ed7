// What adapters add to products (LoRA, Hu et al. 2021, arXiv:2106.09685): many small products in one job of the pool, and
// the last step of the rows that changed. Knows no adapter and no plan.
#include "kernels/parts.h"
#include "linear/product.h"

namespace quire::QUIRE_ISA {

template Micro micro_for<DotWide, Prefetch::weights>(int, int);

template <class Dot>
inline void run_product_task(const ProductTask& task, float* scratch) {
  LinearArgs a = *task.product;
  const size_t begin = size_t(task.begin);
  a.x += begin * a.x_stride, a.y += begin * a.y_stride, a.rows = task.rows;
  if (a.residual) a.residual += begin * a.residual_stride;
  float* packed = scratch + size_t(a.rows) * size_t(a.weight.padded_cols());
  pack_tile<Dot>(normed(a, 0, a.rows, scratch), tiles_for<Dot>(a.rows), 0, packed);
  stream_panels<Dot>(a, packed, task.first, task.last);
}

// A row's bits do not depend on the tasks: each output is one chain of multiply-adds (linear/micro/loops.h).
void products(const ProductTask* tasks, const int* ends, int groups, ThreadPool& pool) {
  pool.parallel_for(groups, [&](int group, int thread) {
    float* scratch = static_cast<float*>(pool.scratch(thread));
    for (int i = group ? ends[group - 1] : 0; i < ends[group]; ++i) {
      if (tasks[i].product->weight.format.layout == Layout::float32) run_product_task<DotF32>(tasks[i], scratch);
      else run_product_task<DotWide>(tasks[i], scratch);
    }
  });
}

// gain * raw + bias + shift of up to 16 outputs.
inline V changed_product(const float* raw, const float* gain, const float* bias, const float* shift, int n) {
  V v = load_first(raw, n);
  if (gain) v = v * load_first(gain, n);
  if (bias) v = v + load_first(bias, n);
  return shift ? v + load_first(shift, n) : v;
}

inline void finish_row(const FinishArgs& a, float* raw, float* y) {
  auto at = [](const float* p, int i) { return p ? p + i : nullptr; };
  for (int i = 0; i < a.width; i += 16) {
    const int n = min_of(16, a.width - i), up = a.width + i;
    if (a.kind == Finish::activate) {
      const V v = changed_product(raw + i, at(a.gain, i), at(a.bias, a.gated ? 2 * i : i), at(a.shift, i), n);
      if (a.gated)
        store_first(y + i, gate(a.activation, v, changed_product(raw + up, at(a.gain, up), at(a.bias, 2 * i + 16),
                                                                 at(a.shift, up), n), a.limit), n);
      else store_first(y + i, activate(a.activation, v), n);
      continue;
    }
    V v = load_first(y + i, n);
    if (a.kind == Finish::prepare) {
      v = v + (load_first(a.gain + i, n) - set1(1)) * load_first(raw + i, n);
      store_first(raw + i, set1(0), n);
    } else if (a.kind == Finish::add) {
      v = v + load_first(a.gain + i, n) * load_first(raw + i, n);
    }
    if (a.shift && a.kind != Finish::add) v = v + load_first(a.shift + i, n);
    store_first(y + i, v, n);
  }
}

void finish(const FinishArgs& a, ThreadPool& pool) {
  const int per_task = max_of(1, 8192 / max_of(1, a.width));
  pool.parallel_for((a.rows + per_task - 1) / per_task, [&](int task, int) {
    for (int r = task * per_task; r < min_of(a.rows, (task + 1) * per_task); ++r)
      finish_row(a, a.raw + size_t(r) * a.raw_stride, a.y + size_t(r) * a.y_stride);
  });
}

}  // namespace quire::QUIRE_ISA
