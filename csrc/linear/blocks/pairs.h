// Blocks of FP8 and FP4 as crossed pairs of bfloat16, which holds their numbers exactly: products with activations rounded to
// bfloat16 are summed by group of columns, and scaled together. Knows panels (layouts/blocks.h); knows no thread.
//
// A group adds scale * (its sum, a chain over ascending pairs of columns) to an output, in the order of groups. No tile
// shape changes that.
#pragma once

#include "linear/blocks/micro.h"

#if defined(QUIRE_BF16_DOT)

namespace quire::QUIRE_ISA {

// A struct here holds a block: scale(g) is the scale of its group g, and run(i, put) calls put(j, pairs) for the pairs j = 0
// to kRun / 2 - 1 of its i-th run of columns, in order.

template <int columns, int first>
struct E4m3Pairs {
  static constexpr int kGroup = columns, kRun = 4;
  PackedBlock b;
  V by;

  QUIRE_INLINE E4m3Pairs(const PackedBlock& block, V scale) : b(block), by(scale) {}
  QUIRE_INLINE V scale(int) const { return by; }
  template <class Put>
  QUIRE_INLINE void run(int i, Put&& put) const {
    crossed_e4m3(b.word(first + i), put);
  }
};
struct E4m3PairsOfRow : E4m3Pairs<32, 0> {
  QUIRE_INLINE explicit E4m3PairsOfRow(const PackedBlock& b) : E4m3Pairs(b, row_scale(b)) {}
};
template <int columns>
struct E4m3PairsOfBlock : E4m3Pairs<columns, 1> {
  QUIRE_INLINE explicit E4m3PairsOfBlock(const PackedBlock& b) : E4m3Pairs<columns, 1>(b, float_of(b.word(0))) {}
};
struct E4m3PairsOfPower : E4m3Pairs<32, 0> {
  QUIRE_INLINE explicit E4m3PairsOfPower(const PackedBlock& b)
      : E4m3Pairs(b, power_of_exponent<0>(load_bytes(b.head))) {}
};

// The numbers of FP4 (E2M1) as bfloat16, and twice them.
alignas(32) constexpr uint16_t kFp4Pairs[16] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                0, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
alignas(32) constexpr uint16_t kTwiceFp4Pairs[16] = {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140,
                                                     0, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140};

struct Mxfp4Pairs {
  static constexpr int kGroup = 32, kRun = 4;
  PackedBlock b;

  QUIRE_INLINE explicit Mxfp4Pairs(const PackedBlock& block) : b(block) {}
  QUIRE_INLINE V scale(int) const { return power_of_exponent<1>(load_bytes(b.head)); }
  // The low halves of the bytes hold the first 16 columns.
  template <class Put>
  QUIRE_INLINE void run(int i, Put&& put) const {
    const PairTable table = pair_table(kTwiceFp4Pairs);
    const I w = i < 4 ? b.word(i) : shr<4>(iload(b.words + (i - 4) * 64));
    put(0, pick_pairs(table, crossed_half<0>(w)));
    put(1, pick_pairs(table, crossed_half<1>(w)));
  }
};

template <bool divides>
struct Nvfp4Pairs {
  static constexpr int kGroup = 16, kRun = 8;
  PackedBlock b;
  I scales[2];
  V outer;

  QUIRE_INLINE explicit Nvfp4Pairs(const PackedBlock& block) : b(block), outer(row_scale(b)) {
    crossed_e4m3(b.word(0), [&](int j, I pairs) QUIRE_INLINE_LAMBDA { scales[j] = pairs; });
  }
  QUIRE_INLINE V scale(int g) const {
    const V inner = g < 2 ? pair_first(scales[g]) : pair_second(scales[g - 2]);
    return divides ? inner / outer : inner * outer;
  }
  template <class Put>
  QUIRE_INLINE void run(int i, Put&& put) const {
    const PairTable table = pair_table(kFp4Pairs);
    const I w = b.word(1 + i);
    unrolled<4>([&](auto j) QUIRE_INLINE_LAMBDA { put(j.value, pick_pairs(table, crossed_half<j.value>(w))); });
  }
};

// The pairs of each kind; void: bfloat16 does not hold its numbers, or it is rare.
template <BlockKind kind>
struct PairsOf {
  using type = void;
};
#define QUIRE_PAIRS(name, ...)       \
  template <>                        \
  struct PairsOf<BlockKind::name> {  \
    using type = __VA_ARGS__;        \
  };
QUIRE_PAIRS(e4m3, E4m3PairsOfRow)
QUIRE_PAIRS(e4m3_32, E4m3PairsOfBlock<32>)
QUIRE_PAIRS(e4m3_128, E4m3PairsOfBlock<128>)
QUIRE_PAIRS(mxfp8, E4m3PairsOfPower)
QUIRE_PAIRS(mxfp4, Mxfp4Pairs)
QUIRE_PAIRS(nvfp4, Nvfp4Pairs<false>)
QUIRE_PAIRS(nvfp4_div, Nvfp4Pairs<true>)
#undef QUIRE_PAIRS

template <BlockKind kind>
using Pairs = typename PairsOf<kind>::type;
template <BlockKind kind>
constexpr bool kHasPairs = !std::is_void_v<Pairs<kind>>;

// An unpacked group of a panel: scale [16] in float32, then its pairs [group / 2][16][2].
constexpr size_t pair_group_bytes(int group) { return 64 + size_t(group) * 32; }

// The pairs of columns [k, k + columns) of a panel; k is a multiple of kChunkColumns.
template <BlockKind kind>
void unpack_pairs(const char* panel, int k, int columns, char* out) {
  constexpr int group = Pairs<kind>::kGroup, run = Pairs<kind>::kRun;
  for_panel_blocks<kind>(panel, k, columns, [&](const PackedBlock& packed, int) QUIRE_INLINE_LAMBDA {
    const Pairs<kind> block(packed);
    unrolled<shape_of(kind).columns / group>([&](auto g) QUIRE_INLINE_LAMBDA {
      store(reinterpret_cast<float*>(out), block.scale(g.value));
      out += 64;
      for_runs<group / run>([&](int r) QUIRE_INLINE_LAMBDA {
        block.run(g.value * (group / run) + r, [&](int j, I pairs) QUIRE_INLINE_LAMBDA { istore(out + j * 64, pairs); });
        out += run * 32;
      });
    });
  });
}

// A panel times a row [columns / 2] of pairs; its 16 outputs to c. The CPU works on several groups at once, and reads one
// panel faster from memory than several.
template <BlockKind kind>
void multiply_pairs(const char* panel, int columns, const uint32_t* x, float* c) {
  constexpr int group = Pairs<kind>::kGroup, run = Pairs<kind>::kRun;
  V sum = set1(0);
  for_panel_blocks<kind>(panel, 0, columns, [&](const PackedBlock& packed, int k) QUIRE_INLINE_LAMBDA {
    const Pairs<kind> block(packed);
    unrolled<shape_of(kind).columns / group>([&](auto g) QUIRE_INLINE_LAMBDA {
      V part = set1(0);
      for_runs<group / run>([&](int r) QUIRE_INLINE_LAMBDA {
        const int at = g.value * (group / run) + r;
        const uint32_t* a = x + (k + at * run) / 2;
        block.run(at, [&](int j, I pairs) QUIRE_INLINE_LAMBDA {
          part = dot_pairs(part, held(iset1(int32_t(a[j]))), pairs);
        });
      });
      sum = fma(block.scale(g.value), part, sum);
    });
  });
  store(c, sum);
}

// Columns of a tile times P unpacked panels.
struct PairArgs {
  const uint32_t* a;   // [columns / 2][R]
  const char* b;       // first panel, unpacked
  size_t panel_bytes;  // from panel to panel
  int groups, steps;   // of `steps` pairs
  float* c;            // [R][c_stride], continued
  size_t c_stride;
};

template <int R, int P>
void micro_pairs(const PairArgs& args) {
  const PairArgs m = args;  // a copy, which stores cannot change
  const size_t stride = 64 + size_t(m.steps) * 64;
  const uint32_t* a = m.a;
  V total[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) total[r][p] = load(m.c + size_t(r) * m.c_stride + p * 16);
  for (int g = 0; g < m.groups; ++g) {
    const char* b = m.b + size_t(g) * stride;
    V acc[R][P];
    clear(acc);
    int s = 0;
    do {
      I w[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) w[p] = iload(b + size_t(p) * m.panel_bytes + 64 + s * 64);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const I x = iset1(int32_t(a[r]));
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) acc[r][p] = dot_pairs(acc[r][p], x, w[p]);
      }
      a += R;
    } while (++s < m.steps);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const V scale = load(reinterpret_cast<const float*>(b + size_t(p) * m.panel_bytes));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) total[r][p] = fma(scale, acc[r][p], total[r][p]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) store(m.c + size_t(r) * m.c_stride + p * 16, total[r][p]);
}

using PairMicro = void (*)(const PairArgs&);

// The loop for 1 to kBlockTileRows rows and a power of two of panels, at most block_panels(rows).
template <int R = kBlockTileRows>
inline PairMicro pair_micro(int rows, int panels) {
  if constexpr (R > 1)
    if (rows < R) return pair_micro<R - 1>(rows, panels);
  constexpr int most = block_panels(R);
  if constexpr (most >= 4)
    if (panels == 4) return micro_pairs<R, 4>;
  if constexpr (most >= 2)
    if (panels == 2) return micro_pairs<R, 2>;
  return micro_pairs<R, 1>;
}

// What a kind needs; null: it has no pairs.
struct PairKernel {
  int group = 0;
  UnpackCodes* unpack = nullptr;
  void (*multiply)(const char* panel, int columns, const uint32_t* x, float* c) = nullptr;
};
template <BlockKind kind>
constexpr PairKernel pair_kernel() {
  if constexpr (kHasPairs<kind>)
    return {Pairs<kind>::kGroup, unpack_pairs<kind>, multiply_pairs<kind>};
  else return {};
}
constexpr PairKernel kPairKernels[] = {
#define QUIRE_PAIR_KERNEL(name, columns, bytes, head, head_bytes) pair_kernel<BlockKind::name>(),
    QUIRE_BLOCK_KINDS(QUIRE_PAIR_KERNEL)
#undef QUIRE_PAIR_KERNEL
};

// Whether all of a weight can be multiplied as pairs.
inline bool has_pairs(const MatrixView& w) {
  if (w.format.nonzeros > 0) return false;
  for (int i = 0; i < w.format.blocks.count; ++i)
    if (!kPairKernels[int(w.format.blocks.parts[i].kind)].unpack) return false;
  return true;
}

}  // namespace quire::QUIRE_ISA
#endif
