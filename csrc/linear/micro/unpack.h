// What weights are unpacked to before many tiles of rows are multiplied with them. Knows panels; knows no threads.
#pragma once

#include <type_traits>

#include "kernels/kernels.h"
#include "linear/micro/expand.h"
#include "linear/micro/dots.h"
#include "simd/simd.h"

namespace quire::QUIRE_ISA {

inline CompactPanel compact_panel(const MatrixView& w, int panel, int k) {
  return {w.tail(panel), w.padded_cols(), k / kCompactColumns};
}

// Prefetches the tables and first escapes of panels in 12 bits, which no loop over columns does. (Inlined, because g++
// takes it for a function without effect.)
QUIRE_INLINE void fetch_escapes(const MatrixView& w, int panel, int count) {
  for (int p = panel; p < min_of(panel + count, w.panels()); ++p)
    for (int at = 0; at < 128; at += 64) __builtin_prefetch(w.tail(p) + at, 0, 2);
}

// Unpacks a block of K of some panels before many tiles of rows are multiplied by it: columns [k, k + columns) of
// `count` panels from `panel` on, to `out`, `kColumnBytes` per column of a panel.
struct AsPacked {
  static constexpr int kColumnBytes = 0;
};

// bfloat16 in 12 bits: the first tile's loop expands it to 16 bits; the others find it in cache.
struct ExpandedByFirst {
  static constexpr int kColumnBytes = 32;
};

// bfloat16 widened to float32.
struct Widened {
  static constexpr int kColumnBytes = 64;
  static void unpack(const MatrixView& w, int panel, int count, int k, int columns, char* out) {
    for (int p = 0; p < count; ++p, out += columns * kColumnBytes)
      widen(w.data + w.panel_bytes() * size_t(panel + p) + w.offset(k), columns / 2, reinterpret_cast<float*>(out));
  }
  static void widen(const char* packed, int pairs, float* out) {
    for (int i = 0; i < pairs; ++i) {
      const I both = iload(packed + i * 64);
      store(out + i * 32, pair_first(both));
      store(out + i * 32 + 16, pair_second(both));
    }
  }
};

// float16 widened to float32.
struct WidenedHalves {
  static constexpr int kColumnBytes = 64;
  static void unpack(const MatrixView& w, int panel, int count, int k, int columns, char* out) {
    for (int p = panel; p < panel + count; ++p) {
      const char* from = w.data + w.panel_bytes() * size_t(p) + w.offset(k);
      for (int i = 0; i < columns; ++i, out += kColumnBytes) store(reinterpret_cast<float*>(out), load_halves(from + i * 32));
    }
  }
};

// bfloat16 in 12 bits expanded and widened to float32.
struct ExpandedWide {
  static constexpr int kColumnBytes = 64;
  static void unpack(const MatrixView& w, int panel, int count, int k, int columns, char* out) {
    for (int p = panel; p < panel + count; ++p) {
      const char* at = w.data + w.panel_bytes() * size_t(p);
      CompactPanel from = compact_panel(w, p, k);
      for (int i = k; i < k + columns; i += kCompactColumns, out += kCompactColumns * kColumnBytes) {
        ExpandedStep step;
        store(step, expand(at + w.offset(i), from.table()));
        from.patch(uint32_t(i / kCompactColumns), step);
        Widened::widen(reinterpret_cast<const char*>(step.pairs), kCompactPairs, reinterpret_cast<float*>(out));
      }
    }
  }
};

// The product of more than one tile of rows with weights packed for `Dot`: with few tiles, `Product` of weights
// unpacked as `Few`; with kWidenTiles or more, float32 products of weights unpacked as `Many`, unless that is void.
template <class Dot>
struct ManyTiles {
  using Product = Dot;
  using Few = AsPacked;
  using Many = void;
};
template <>
struct ManyTiles<DotWide> {
  using Product = DotWide;
  using Few = AsPacked;
  using Many = Widened;
};
template <>
struct ManyTiles<DotHalves> {
  using Product = DotHalves;
  using Few = AsPacked;
  using Many = WidenedHalves;
};
template <class Pairs>
struct ManyTiles<Compact<Pairs>> {
  using Product = Pairs;
  using Few = ExpandedByFirst;
  using Many = std::conditional_t<std::is_void_v<typename ManyTiles<Pairs>::Many>, void, ExpandedWide>;
};

}  // namespace quire::QUIRE_ISA
