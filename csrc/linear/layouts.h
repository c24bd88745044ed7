// All layouts of packed weights, and the one place that chooses between them. A layout is a traits struct with
//   kHolds                             the kind of its elements: floats (a screen may follow them), codes, or blocks
//   check(format)                      throws std::invalid_argument if the layout has no such format
//   geometry(format, cols)
// and, if it does not hold blocks,
//   pack_panel(rows, view, out)        packs floats; false if they do not fit (the weight becomes bfloat16)
//   read_lane(view, panel, lane, put)  calls put(column, value) for each column; a second call overrides the first
// and, if it holds codes,
//   quantize(view, values, codes)      rounds a row of floats
//   put_lane(view, panel, lane, codes) places a row of codes in its panel
// The files of csrc/kernels multiply it.
#pragma once

#include "linear/format.h"
#include "linear/layouts/bfloat16.h"
#include "linear/layouts/bfloat16_12.h"
#include "linear/layouts/blocks.h"
#include "linear/layouts/float16.h"
#include "linear/layouts/float32.h"
#include "linear/layouts/int4.h"
#include "linear/layouts/int8.h"

namespace quire {

// Calls f with the traits of a layout. f must be always_inline: code of an instruction set must not leak into others.
template <class F>
QUIRE_INLINE decltype(auto) with_layout(Layout layout, F&& f) {
  switch (layout) {
#define QUIRE_LAYOUT_CASE(name, Traits) \
  case Layout::name:                    \
    return f(Traits{});
    QUIRE_LAYOUTS(QUIRE_LAYOUT_CASE)
#undef QUIRE_LAYOUT_CASE
  }
  __builtin_unreachable();
}

// The values of one row of a packed weight that does not hold blocks: `put` as in the traits.
template <class Put>
QUIRE_INLINE void read_lane(const MatrixView& w, int panel, int lane, Put&& put) {
  with_layout(w.format.layout, [&](auto layout) QUIRE_INLINE_LAMBDA {
    if constexpr (layout.kHolds != Holds::blocks) layout.read_lane(w, panel, lane, put);
  });
}

}  // namespace quire
