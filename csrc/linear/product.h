// Matrix products with packed weights, from one row to many, with bias, activation, gate and residual fused.
// Knows the packing and the pool; knows no plan.
#pragma once

#include <type_traits>

#include "kernels/kernels.h"
#include "linear/argmax.h"
#include "linear/argmax_candidates.h"
#include "linear/micro/loops.h"
#include "linear/micro/unpack.h"
#include "linear/rounded_rows.h"
#include "rowwise/activation.h"
#include "simd/simd.h"

// Compiled once for all groups of kernels that a set combines (kernels/float).
namespace quire::QUIRE_FLOAT_ISA {

// The same product for rows [begin, end) after the norm, in the order of the weight's columns and rounded, which are in
// `memory`; at most kMaxRows, and one more.
LinearArgs normed(LinearArgs a, int begin, int end, float* memory);

// full_epilogue<Unscaled>.
void unscaled_epilogue(const LinearArgs& a, const float* c, size_t c_stride, int first_row, int rows, int first,
                       int panels);

}  // namespace quire::QUIRE_FLOAT_ISA

namespace quire::QUIRE_ISA {

using QUIRE_FLOAT_ISA::normed;
using QUIRE_FLOAT_ISA::unscaled_epilogue;

// Rows and columns (in panels) of a block, so that it stays in L2.
constexpr int kBlockRows = 12 * kMaxRows;
constexpr int kBlockPanels = 16;
// The task that writes outputs notes their maxima, so tasks begin at multiples of a block of maxima.
constexpr int kMaximaPanels = kMaximaColumns / 16;
static_assert(kBlockPanels % kMaximaPanels == 0);
constexpr int kWidenTiles = 5;
// Outputs of at most so many bytes stay in cache: the next product reads them there.
constexpr size_t kNearOutput = size_t{1} << 20;
// The caller packs fewer elements than this alone: a fork and join costs more.
constexpr int kSerialPack = 16384;
// Bytes that one task of a product with a single tile reads, roughly.
constexpr size_t kTaskBytes = size_t{512} << 10;

inline size_t float_workspace(const MatrixView& weight, int max_rows) {
  const size_t rows = size_t(max_rows), padded = size_t(weight.padded_cols());
  return rows * (padded + 1 + size_t(groups_of(weight))) * 4 + 128;
}

// Of weights of blocks with float activations.
inline size_t blocks_workspace(const MatrixView& weight, int max_rows) {
  return size_t(max_rows) * size_t(weight.padded_cols()) * 4 + 128;
}

// Packs a block of K of a tile; `cols` of its `padded` columns exist. x points to the block's first column. Pairs of
// bfloat16 may be in crossed order (simd_values.h).
template <bool Crossed>
inline void pack_block(const float* x, size_t x_stride, int rows, int cols, int padded, float* out) {
  transpose(x, x_stride, rows, cols, out, size_t(rows));
  for (int i = cols * rows; i < padded * rows; ++i) out[i] = 0;
}

#if defined(QUIRE_BF16_DOT)
template <bool Crossed>
inline void pack_block(const float* x, size_t x_stride, int rows, int cols, int padded, uint32_t* out) {
  constexpr int most = 32;  // columns at a time
  alignas(64) uint32_t pairs[kMaxRows][most / 2];
  for (int k = 0; k < padded; k += most) {
    const int first = min_of(16, max_of(cols - k, 0)), second = min_of(16, max_of(cols - k - 16, 0));
    for (int r = 0; r < rows; ++r) {
      const float* row = x + size_t(r) * x_stride + k;
      uint16_t* to = reinterpret_cast<uint16_t*>(pairs[r]);
      store_halves(to, load_first(row, first));
      store_halves(to + 16, load_first(row + 16, second));
      if constexpr (Crossed) istore(to, crossed(iload(to)));
    }
    transpose(pairs[0], most / 2, rows, min_of(most, padded - k) / 2, out + k / 2 * rows, size_t(rows));
  }
}
#endif

// The place of a tile's block of K in the packed activations: blocks of K, each with its tiles one after the other.
template <class Dot>
inline size_t packed_offset(const Tiles& tiles, int tile, int k, int columns) {
  const size_t elements = size_t(k) * size_t(tiles.rows) + size_t(tiles.begin(tile)) * size_t(columns);
  return elements / Dot::kStepK * Dot::kStepA;
}

template <class Dot>
inline void pack_tile(const LinearArgs& a, const Tiles& tiles, int tile, typename Dot::A* packed) {
  const BlocksOfK blocks(a.weight);
  const int begin = tiles.begin(tile), rows = tiles.begin(tile + 1) - begin;
  for (int k = 0; k < blocks.padded; k += blocks.size) {
    const int columns = blocks.columns(k);
    pack_block<Dot::kCrossed>(a.x + size_t(begin) * a.x_stride + k, a.x_stride, rows, min_of(columns, a.weight.cols - k),
                              columns, packed + packed_offset<Dot>(tiles, tile, k, columns));
  }
}

// Sums c of `rows` rows times panels [first, first + panels) to y. Of a gated weight panels come in pairs. `Plain`: no
// bias, activation or gate.
template <class Scaling, bool Plain>
QUIRE_INLINE void epilogue_as(const LinearArgs& a, const float* c, size_t c_stride, int first_row, int rows, int first,
                        int panels) {
  // Copies, so that the compiler knows that stores don't change them.
  const bool gated = !Plain && a.weight.gated;
  const float *const biases = Plain ? nullptr : a.bias, *const residual = a.residual;
  float* const raws = Plain ? nullptr : a.raw;
  const float* const* const added = Plain ? nullptr : a.added;
  const size_t y_stride = a.y_stride, residual_stride = a.residual_stride, raw_stride = a.raw_stride;
  const Activation activation = Plain ? Activation::none : a.activation;
  const float limit = a.limit;
  const int per_group = gated ? 2 : 1, width = gated ? a.weight.rows / 2 : a.weight.rows;
  for (int panel = first; panel < first + panels; panel += per_group) {
    const int column = (gated ? panel / 2 : panel) * 16, n = min_of(16, width - column);
    const Scaling scaled(a, panel), scaled_up(a, gated ? panel + 1 : panel);
    const V bias = biases ? load(biases + panel * 16) : set1(0);
    const V bias_up = biases && gated ? load(biases + panel * 16 + 16) : set1(0);
    const float* sums = c + (panel - first) * 16;
    float* y = a.y + size_t(first_row) * y_stride + column;
    for (int row = first_row; row < first_row + rows; ++row, sums += c_stride, y += y_stride) {
      V v = scaled(sums, size_t(row));
      const float* const more = added ? added[row] : nullptr;
      if (more) v = v + load_first(more + column, n);
      else if (raws) store_first(raws + size_t(row) * raw_stride + column, v, n);
      if (biases) v = v + bias;
      if (gated) {
        V up = scaled_up(sums + 16, size_t(row));
        if (more) up = up + load_first(more + width + column, n);
        else if (raws) store_first(raws + size_t(row) * raw_stride + width + column, up, n);
        if (biases) up = up + bias_up;
        v = gate(activation, v, up, limit);
      } else {
        v = activate(activation, v);
      }
      if (residual) v = v + load_first(residual + size_t(row) * residual_stride + column, n);
      if (n == 16) store(y, v);
      else store_first(y, v, n);
    }
  }
}

// Out of line: with every activation inlined into every loop, it was half of the code and of the time to compile.
template <class Scaling>
__attribute__((noinline)) void full_epilogue(const LinearArgs& a, const float* c, size_t c_stride, int first_row,
                                             int rows, int first, int panels) {
  epilogue_as<Scaling, false>(a, c, c_stride, first_row, rows, first, panels);
}

template <class Dot>
inline void epilogue(const LinearArgs& a, const float* c, size_t c_stride, int first_row, int rows, int first,
                     int panels) {
  using Scale = typename Scaling<Dot>::type;
  if constexpr (std::is_same_v<Dot, DotI8>)
    if (a.screening) return note_candidates(a, c, c_stride, first_row, rows, first, panels);
  if (!(a.weight.gated || a.bias || a.activation != Activation::none || a.raw || a.added))
    epilogue_as<Scale, true>(a, c, c_stride, first_row, rows, first, panels);
  else if constexpr (std::is_same_v<Scale, Unscaled>)
    unscaled_epilogue(a, c, c_stride, first_row, rows, first, panels);
  else
    full_epilogue<Scale>(a, c, c_stride, first_row, rows, first, panels);
}

// Panels [first, last) for a single tile of rows: weights stream once through the registers.
template <class Dot>
inline void stream_panels(const LinearArgs& a, const typename Dot::A* tile, int first, int last) {
  const MatrixView& w = a.weight;
  const int rows = a.rows, unit = w.gated ? 2 : 1;
  const int group = max_of(max_panels(rows), unit);
  alignas(64) float c[max_of(kMaxRows * 2, 16) * 16];
  const size_t panel_bytes = w.panel_bytes(), c_stride = size_t(group) * 16;
  const ptrdiff_t tail = ptrdiff_t(w.tail_bytes());
  MicroArgs m{.a = tile, .panel_bytes = panel_bytes, .steps = w.padded_cols() / Dot::kStepK, .c_stride = c_stride};
  m.group = w.format.group, m.offsets = w.format.offsets, m.narrow = w.format.narrow;
  if (a.x_sums) m.sums = a.x_sums;
  for (int panel = first; panel < last;) {
    const int count = min_of(group, last - panel);
    for (int done = 0; done < count;) {
      int width = stream_width<Dot>(rows);
      while (width > count - done) width /= 2;
      m.b = w.data + panel_bytes * size_t(panel + done);
      m.panel_bytes = width < max_panels(rows) && rows > kExactRows ? 0 : panel_bytes;
      m.c = c + done * 16;
      m.next_block = ptrdiff_t(panel_bytes) * (width - 1) + tail;
      CompactPanel compact[max_panels(1)];
      if constexpr (Dot::kLoop == Loop::compact) {
        for (int p = 0; p < max_panels(rows); ++p) {
          compact[p] = compact_panel(w, panel + done + min_of(p, width - 1), 0);
          __builtin_prefetch(compact[p].at() + panel_bytes * size_t(width), 0, 3);
        }
        m.compact = compact;
      }
      micro_for<Dot, Prefetch::weights>(rows, width)(m);
      done += width;
    }
    epilogue<Dot>(a, c, c_stride, 0, rows, panel, count);
    panel += count;
  }
}

// Calls multiply(first, last, thread) for the panels of a weight that streams from memory once, `group` of them at a
// time.
template <class F>
inline void for_panels(const LinearArgs& a, int group, ThreadPool& pool, F&& multiply) {
  const MatrixView& w = a.weight;
  if (a.maxima) group = kMaximaPanels;
  const int groups = (w.panels() + group - 1) / group;
  // Small weights: one task per thread, because a few tasks would not be even.
  const int by_size = int(w.nbytes() / kTaskBytes);
  const int tasks = min_of(groups, by_size >= 4 * pool.threads() ? by_size : pool.threads());
  pool.parallel_shares(tasks, [&](int task, int thread) {
    const int first = int(int64_t(groups) * task / tasks) * group;
    const int last = min_of(w.panels(), int(int64_t(groups) * (task + 1) / tasks) * group);
    multiply(first, last, thread);
    if (a.maxima) note_maxima(a, 0, a.rows, first * 16, min_of(w.rows, last * 16));
  });
}

// Tiles [tile0, tile1) times panels [first, last), in blocks of K that are unpacked once for all tiles.
template <class Dot, class Unpacked>
inline void block_product(const LinearArgs& a, const typename Dot::A* packed, const Tiles& tiles, int tile0, int tile1,
                          int first, int last, float* scratch) {
  const MatrixView& w = a.weight;
  const int row0 = tiles.begin(tile0);
  constexpr int step_panels = BlockTile<Dot>::panels;
  const BlocksOfK blocks(w);
  // Sums that are finished at once (and a gate's with its pair) share one place, which stays in L1.
  const bool at_once = blocks.size >= blocks.padded && step_panels > 1;
  const bool far = size_t(a.rows) * a.y_stride * 4 > kNearOutput;
  const size_t panel_bytes = w.panel_bytes();
  const size_t c_stride = at_once ? size_t(step_panels) * 16 : size_t(last - first + 1) / 2 * 32;
  float* c = scratch + size_t(step_panels) * 16 * size_t(blocks.size);  // after what is unpacked
  const char* following = w.data + panel_bytes * size_t(tile1 < tiles.count ? first : last);  // the next task's
  for (int k = 0; k < blocks.padded; k += blocks.size) {
    const int columns = blocks.columns(k);
    const bool last_block = k + columns == blocks.padded;
    for (int panel = first, count; panel < last; panel += count) {
      count = min_of(step_panels, last - panel);
      if (count == 3) count = 2;  // loops make 1, 2 or 4
      const char* b = w.data + panel_bytes * size_t(panel) + w.offset(k);
      const char* next = panel + count < last ? b + panel_bytes * size_t(count)
                         : last_block         ? following
                                              : w.data + panel_bytes * size_t(first) + w.offset(k + columns);
      MicroArgs m{.c_stride = c_stride, .accumulate = k > 0};
      m.group = w.format.group, m.offsets = w.format.offsets, m.narrow = w.format.narrow;
      m.out_stride = a.y_stride, m.out_lines = far && last_block ? w.gated ? (count + 1) / 2 : count : 0;
      const bool same = count < step_panels && BlockTile<Dot>::rows > kExactRows;  // one panel stands for both
      auto read_from = [&](const char* panels, size_t bytes, int step_columns) {
        m.b = panels, m.panel_bytes = same ? 0 : bytes, m.steps = columns / step_columns;
      };
      auto read_unpacked = [&] {
        read_from(reinterpret_cast<const char*>(scratch), size_t(columns) * Unpacked::kColumnBytes, Dot::kStepK);
      };
      constexpr bool by_first = std::is_same_v<Unpacked, ExpandedByFirst>;
      CompactPanel compact[step_panels];
      if constexpr (by_first) {
        for (int p = 0; p < step_panels; ++p) compact[p] = compact_panel(w, panel + min_of(p, count - 1), k);
        m.compact = compact, m.first_step = uint32_t(k / kCompactColumns);
        m.expanded = reinterpret_cast<ExpandedStep*>(scratch);
        if (k == 0) fetch_escapes(w, panel + count, count);
        read_from(b, panel_bytes, kCompactColumns);
      } else if constexpr (Unpacked::kColumnBytes > 0) {
        Unpacked::unpack(w, panel, count, k, columns, reinterpret_cast<char*>(scratch));
        read_unpacked();
      } else {
        read_from(b, panel_bytes, Dot::kStepK);
      }
      for (int tile = tile0; tile < tile1; ++tile) {
        const int begin = tiles.begin(tile);
        m.next = next + panel_bytes * size_t(min_of(tile - tile0, count - 1));
        m.a = packed + packed_offset<Dot>(tiles, tile, k, columns);
        if (a.x_sums) m.sums = a.x_sums + group_sums_offset(w, begin, tiles.begin(tile + 1) - begin, k);
        m.out = a.y + size_t(begin) * a.y_stride + (w.gated ? panel / 2 : panel) * 16;
        m.c = at_once ? c : c + size_t(begin - row0) * c_stride + (panel - first) * 16;
        const int rows = tiles.begin(tile + 1) - begin;
        const bool expands = by_first && tile == tile0;
        if constexpr (by_first)
          if (expands) {
            micro_for<Compact<Dot>, Prefetch::activations>(rows, count)(m);
            read_unpacked();  // in place: a copy would wait for what was just written
          }
        if (!expands) micro_for<Dot, Prefetch::activations>(rows, count)(m);
        // Finished sums go out while they are in L1; a gate waits for its pair.
        const int from = w.gated ? panel / 2 * 2 : panel, done = panel + count - from;
        if (last_block && !(w.gated && done % 2))
          epilogue<Dot>(a, m.c - (panel - from) * 16, c_stride, begin, rows, from, done);
      }
    }
  }
}

// Calls multiply(first tile, last tile, first panel, last panel, thread) for blocks of a product with many tiles; they
// begin at multiples of `step` panels.
template <class F>
inline void for_blocks(const LinearArgs& a, const Tiles& tiles, int step, ThreadPool& pool, F&& multiply) {
  const MatrixView& w = a.weight;
  int row_blocks = (tiles.rows + kBlockRows - 1) / kBlockRows;
  // If there are few blocks of columns, make them narrower, so that every thread has several tasks; then lower them, so
  // that all threads have equally many.
  const int wanted = 4 * pool.threads();
  const int least = a.maxima ? kMaximaPanels : step;
  const int width = max_of(least, min_of(kBlockPanels, w.panels() * row_blocks / wanted / step * step));
  const int column_blocks = (w.panels() + width - 1) / width;
  auto few = [&](int tasks) { return tasks < wanted || (tasks < 4 * wanted && tasks % pool.threads() != 0); };
  while (row_blocks < tiles.count / 2 && few(row_blocks * column_blocks)) ++row_blocks;
  auto run = [&](int task, int thread) {
    const int rows = task % row_blocks, columns = task / row_blocks;
    const int tile0 = int(int64_t(tiles.count) * rows / row_blocks);
    const int tile1 = int(int64_t(tiles.count) * (rows + 1) / row_blocks);
    const int first = columns * width, last = min_of(w.panels(), first + width);
    multiply(tile0, tile1, first, last, thread);
    if (a.maxima) note_maxima(a, tiles.begin(tile0), tiles.begin(tile1), first * 16, min_of(w.rows, last * 16));
  };
  // Neighbouring tasks share a block of weights, so it is read from memory once. With one block of rows they have
  // neighbouring weights, and a thread prefetches those of its next task.
  if (row_blocks > 1) pool.parallel_for(row_blocks * column_blocks, run);
  else pool.parallel_shares(column_blocks, run);
}

template <class Dot, class Unpacked>
inline void linear_blocks(const LinearArgs& a, const typename Dot::A* packed, const Tiles& tiles, ThreadPool& pool) {
  for_blocks(a, tiles, max_of(2, BlockTile<Dot>::panels), pool,
             [&](int tile0, int tile1, int first, int last, int thread) {
               block_product<Dot, Unpacked>(a, packed, tiles, tile0, tile1, first, last,
                                            static_cast<float*>(pool.scratch(thread)));
             });
}

// Calls pack(tile, thread) for each tile, within a job of the pool even if the caller does it alone: another caller's
// job would use the same scratch memory.
template <class F>
inline void for_tiles(const LinearArgs& a, const Tiles& tiles, ThreadPool& pool, F&& pack) {
  const bool alone = int64_t(a.rows) * a.weight.padded_cols() < kSerialPack;
  pool.parallel_for(alone ? 1 : tiles.count, [&](int task, int thread) {
    for (int tile = task; tile < (alone ? tiles.count : task + 1); ++tile) pack(tile, thread);
  });
}

// A product with weights of floats, or of codes that are widened. The tiles of activations are packed first; a single
// row of float32 activations without a norm is used in place. If there is one tile, panels stream; else `multiply` makes
// the product.
template <class Dot>
struct FloatProduct {
  using A = typename Dot::A;
  using Product = typename ManyTiles<Dot>::Product;
  using Many = typename ManyTiles<Dot>::Many;

  LinearArgs a;
  bool widens;
  Tiles tiles;
  A* packed;
  int32_t* sums;

  explicit FloatProduct(const LinearArgs& args)
      : a(args),
        widens(!std::is_void_v<Many> && tiles_for<Product>(a.rows).count >= kWidenTiles),
        tiles(widens ? tiles_for<DotF32>(a.rows) : tiles_for<Product>(a.rows)),
        packed(static_cast<A*>(a.workspace)),
        sums(static_cast<int32_t*>(a.workspace) + (size_t(a.rows) * size_t(a.weight.padded_cols()) + 15) / 16 * 16) {
    if (a.weight.format.offsets) a.x_sums = sums;
  }

  static constexpr bool kPlain = sizeof(A) == sizeof(float) && Dot::kStepA == Dot::kStepK;
  bool in_place() const {
    const Format& format = a.weight.format;
    return kPlain && a.rows == 1 && a.weight.padded_cols() == a.weight.cols && !a.norm.weight && !format.offsets &&
           !format.inputs && !format.rounding.present();
  }
  void pack(int tile, void* scratch) const {
    const int begin = tiles.begin(tile), end = tiles.begin(tile + 1);
    const LinearArgs rows = normed(a, begin, end, static_cast<float*>(scratch));
    if (a.weight.format.offsets) sum_groups<Product>(rows, begin, end, sums);
    pack_tile<Product>(rows, tiles, tile, packed);
  }
  int group() const { return max_of(max_panels(a.rows), a.weight.gated ? 2 : 1); }
  void stream(int first, int last, void*) const {
    const A* tile = packed;
    if constexpr (kPlain)
      if (in_place()) tile = a.x;
    stream_panels<Dot>(a, tile, first, last);
  }
  void multiply(ThreadPool& pool) const {
    if constexpr (!std::is_void_v<Many>)
      if (widens) return linear_blocks<DotF32, Many>(a, packed, tiles, pool);
    linear_blocks<Product, typename ManyTiles<Dot>::Few>(a, packed, tiles, pool);
  }
};

// The same with activations that are rounded to int8.
template <class Dot>
struct QuantizedProduct {
  LinearArgs a;
  Tiles tiles;
  QuantizedRows rows;

  explicit QuantizedProduct(const LinearArgs& args) : a(args), tiles(tiles_for<Dot>(a.rows)), rows(a) {
    a.x_scale = rows.scale, a.x_sums = rows.sums;
  }

  uint32_t* packed() const { return static_cast<uint32_t*>(a.workspace); }
  bool in_place() const { return false; }
  void pack(int tile, void* scratch) const {
    const int begin = tiles.begin(tile), end = tiles.begin(tile + 1);
    float* memory = static_cast<float*>(scratch) + kMaxRows * BlocksOfK(a.weight).size;
    quantize_tile<Dot>(normed(a, begin, end, memory), rows, begin, end, static_cast<uint32_t*>(scratch),
                       [&](int k, int columns) { return packed() + packed_offset<Dot>(tiles, tile, k, columns); });
  }
  int group() const { return max_of(max_panels(a.rows), a.weight.gated ? 2 : 1); }
  void stream(int first, int last, void*) const { stream_panels<Dot>(a, packed(), first, last); }
  void multiply(ThreadPool& pool) const { linear_blocks<Dot, AsPacked>(a, packed(), tiles, pool); }
};

template <class Product>
void make_product(const LinearArgs& args, ThreadPool& pool) {
  const Product product(args);
  if (!product.in_place())
    for_tiles(product.a, product.tiles, pool, [&](int tile, int thread) { product.pack(tile, pool.scratch(thread)); });
  if (product.tiles.count > 1) return product.multiply(pool);
  for_panels(product.a, product.group(), pool,
             [&](int first, int last, int thread) { product.stream(first, last, pool.scratch(thread)); });
}

// Products that do not depend on each other, each with its own workspace and without maxima. Those of one tile are made
// together: threads meet twice for all of them, and weights stream without a pause.
template <class Product>
void make_products(const LinearArgs* args, int count, ThreadPool& pool) {
  if (count == 1) return make_product<Product>(*args, pool);
  pool.parallel_for(count, [&](int i, int thread) {
    const Product product(args[i]);
    if (product.tiles.count == 1 && !product.in_place()) product.pack(0, pool.scratch(thread));
  });
  size_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += args[i].weight.nbytes();
  const size_t piece = max_of(min_of(kTaskBytes, bytes / size_t(8 * pool.threads())), size_t{1});
  int begin[kMostProducts + 1] = {};  // the first task of each product
  for (int i = 0; i < count; ++i) {
    const Product product(args[i]);
    const int groups = (product.a.weight.panels() + product.group() - 1) / product.group();
    const int tasks = min_of(groups, max_of(1, int(product.a.weight.nbytes() / piece)));
    begin[i + 1] = begin[i] + (product.tiles.count == 1 ? tasks : 0);
  }
  pool.parallel_shares(begin[count], [&](int task, int thread) {
    int i = 0;
    while (task >= begin[i + 1]) ++i;
    const Product product(args[i]);
    const int panels = product.a.weight.panels(), group = product.group(), groups = (panels + group - 1) / group;
    const int64_t part = task - begin[i], parts = begin[i + 1] - begin[i];
    product.stream(int(groups * part / parts) * group, min_of(panels, int(groups * (part + 1) / parts) * group),
                   pool.scratch(thread));
  });
  for (int i = 0; i < count; ++i)
    if (begin[i] == begin[i + 1]) make_product<Product>(args[i], pool);
}

}  // namespace quire::QUIRE_ISA
