// The product of one row of float activations with panels of blocks: values are multiplied as they are unpacked, in the
// order of DotF32 on unpacked panels. Knows the values of blocks; knows no thread.
#pragma once

#include "linear/blocks/columns.h"

namespace quire::QUIRE_ISA {

// Panels that a loop takes at once: each is one chain of multiply-adds, and one chain alone waits for its own results.
#if defined(QUIRE_AVX512)
constexpr int kValuePanels = 4;
#elif defined(QUIRE_AVX2)
constexpr int kValuePanels = 2;
#else
constexpr int kValuePanels = 1;
#endif

// P adjacent panels times a row [columns]; the 16 outputs of each to c. The chains advance together, run by run.
template <BlockKind kind, int P>
void multiply_values(const char* panel, int columns, const float* x, float* c) {
  using Block = Values<kind>;
  constexpr int run = Block::kRun;
  const size_t panel_bytes = Blocks::panel_bytes(kind, columns);
  V sums[P];
  for (int p = 0; p < P; ++p) sums[p] = set1(0);
  auto add = [&]<int... p>(const PackedBlock& first, int k, std::integer_sequence<int, p...>) QUIRE_INLINE_LAMBDA {
    const Block blocks[] = {Block(first.after(size_t(p) * panel_bytes))...};
    V parts[] = {kNumbersOf<Block> ? set1(0) : sums[p]...};
    for_runs<shape_of(kind).columns / run>([&](int r) QUIRE_INLINE_LAMBDA {
      const float* a = x + k + r * run;
      (blocks[p].run(r, [&](int j, V value) QUIRE_INLINE_LAMBDA { parts[p] = fma(set1(a[j]), value, parts[p]); }), ...);
    });
    if constexpr (kNumbersOf<Block>) ((sums[p] = fma(blocks[p].scale, parts[p], sums[p])), ...);
    else ((sums[p] = parts[p]), ...);
  };
  for_panel_blocks<kind>(panel, 0, columns, [&](const PackedBlock& first, int k) QUIRE_INLINE_LAMBDA {
    add(first, k, std::make_integer_sequence<int, P>{});
  }, panel_bytes, P);
  for (int p = 0; p < P; ++p) store(c + p * 16, sums[p]);
}

using MultiplyValues = void(const char* panel, int columns, const float* x, float* c);

// By kind, for 1, 2 and 4 panels (kernels/float/block_rows.cpp); null: kinds without values, and more than kValuePanels.
extern MultiplyValues* const kMultiplyValues[][3];

}  // namespace quire::QUIRE_ISA
