// Python bindings of packed weights, KV storage and plans. Knows numpy arrays; knows no model.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <iterator>
#include <limits>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "bind/bindings.h"
#include "simd/isa.h"
#include "kernels/kernels.h"
#include "plan/kv_cache.h"
#include "linear/matrix.h"
#include "plan/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OptionalFloats = std::optional<Floats>;
using Bytes = nb::ndarray<const uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using IntsOut = nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>>;
// (array, type of its elements): bfloat16 is passed as uint16 bits, because numpy has no name for it.
using Source = std::pair<nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>, std::string>;
using Weight = std::shared_ptr<PackedMatrix>;
// (codes [O, K], scales [O, G], offsets [O, G] or none)
using Codes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using GroupFloats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BlockTuple = std::pair<std::string, int>;  // (kind, rows)
using CodesTuple = std::tuple<Codes, GroupFloats, std::optional<GroupFloats>>;
// (number, scales, columns, outer, most, zero, asymmetric)
using RoundingTuple = std::tuple<std::string, std::string, int, float, float, int, bool>;
// (starts [rows + 1], columns [entries], values [entries])
using SparseTuple = std::tuple<Ints, Ints, Floats>;
using InputsTuple = std::tuple<Ints, Floats>;

constexpr const char* kLayouts[] = {
#define QUIRE_LAYOUT_NAME(name, Traits) #name,
    QUIRE_LAYOUTS(QUIRE_LAYOUT_NAME)
#undef QUIRE_LAYOUT_NAME
};

Layout to_layout(const std::string& name) {
  for (int i = 0; i < int(std::size(kLayouts)); ++i)
    if (name == kLayouts[i]) return Layout(i);
  throw std::invalid_argument("there is no layout '" + name + "'");
}

constexpr const char *kNumbers[] = {"", "int8", "e4m3", "e2m1"}, *kScales[] = {"float32", "powers", "e8m0", "e4m3", "fixed"};

template <class E, size_t N>
E to_enum(const char* const (&names)[N], const std::string& name) {
  for (size_t i = 0; i < N; ++i)
    if (name == names[i]) return E(i);
  throw std::invalid_argument("activations are not rounded by '" + name + "'");
}

InputRounding to_rounding(const std::optional<RoundingTuple>& tuple) {
  if (!tuple) return {};
  const auto& [number, scales, columns, outer, most, zero, asymmetric] = *tuple;
  const InputRounding r{to_enum<RoundedNumber>(kNumbers, number), to_enum<RoundedScale>(kScales, scales), columns,
                        outer, most, zero, asymmetric};
  const bool scaled = r.scales != RoundedScale::fixed && r.scales != RoundedScale::e4m3;
  if (!r.present() || columns < 0 || !(outer > 0) || !(most >= 0) || outer - outer != 0 ||
      most - most != 0 || zero < -128 || zero > 127 || (scaled && zero != 0))
    throw std::invalid_argument("activations cannot be rounded so");
  return r;
}

std::optional<RoundingTuple> from_rounding(const InputRounding& r) {
  if (!r.present()) return {};
  return RoundingTuple(kNumbers[int(r.number)], kScales[int(r.scales)], r.columns, r.outer, r.most, r.zero, r.asymmetric);
}

KVType to_kv_type(const std::string& name) {
  if (name == "float32") return KVType::f32;
  if (name == "bfloat16") return KVType::bf16;
  if (name == "int8") return KVType::i8;
  if (name == "float16") return KVType::f16;
  if (name == "fp8_e4m3") return KVType::e4m3;
  if (name == "fp8_e5m2") return KVType::e5m2;
  throw std::invalid_argument("a KV cache cannot be of type '" + name + "'");
}

std::vector<float> to_vector(const Floats& a) { return {a.data(), a.data() + a.shape(0)}; }
std::vector<float> to_vector(const OptionalFloats& a) { return a ? to_vector(*a) : std::vector<float>{}; }

int length(size_t n) {
  if (n > size_t(std::numeric_limits<int32_t>::max())) throw std::invalid_argument("an array is too long");
  return int(n);
}

SourceRows source_rows(const Source& source) {
  const auto& [array, type] = source;
  const size_t bytes = type == "float32" ? 4 : 2;
  if (type != "float32" && type != "float16" && type != "bfloat16")
    throw std::invalid_argument("weights are float32, float16 or bfloat16, not " + type);
  if (array.itemsize() != bytes) throw std::invalid_argument("the array's elements are not " + type);
  if (array.size() == 0) throw std::invalid_argument("a weight needs at least one row and one column");
  // The stride of an axis of length 1 is arbitrary.
  const int64_t stride = array.shape(0) > 1 ? array.stride(0) : 0;
  if (array.shape(1) > 1 && array.stride(1) != 1) throw std::invalid_argument("rows of a weight must be contiguous");
  const ElementType element = type == "float32"   ? ElementType::float32
                              : type == "float16" ? ElementType::float16
                                                  : ElementType::bfloat16;
  if (stride < 0) throw std::invalid_argument("rows of a weight must go forward in memory");
  return {static_cast<const char*>(array.data()), array.shape(0), size_t(stride) * bytes, element};
}

std::shared_ptr<PackedMatrix> pack(const std::vector<Source>& sources, const Format& format, bool gated,
                                   const std::string& isa, ThreadPool& pool) {
  std::vector<SourceRows> parts;
  for (const Source& source : sources) {
    parts.push_back(source_rows(source));
    if (source.first.shape(1) != sources.front().first.shape(1))
      throw std::invalid_argument("the parts of a weight have different numbers of columns");
  }
  if (parts.empty()) throw std::invalid_argument("a weight needs at least one part");
  const size_t cols = sources.front().first.shape(1);
  const Kernels& kernels = kernels_for(resolve_isa(isa));
  nb::gil_scoped_release release;
  return std::make_shared<PackedMatrix>(parts, cols, format, gated, kernels, pool);
}

// (order, factors), each with one element for each of `cols` columns.
ColumnInputs column_inputs(const std::optional<InputsTuple>& inputs, size_t cols) {
  if (!inputs) return {};
  const auto& [order, factors] = *inputs;
  if (order.shape(0) != cols || factors.shape(0) != cols)
    throw std::invalid_argument("inputs of columns need an order and a factor for each column");
  return {order.data(), factors.data()};
}

std::shared_ptr<PackedMatrix> pack_codes(const std::vector<CodesTuple>& tuples, const Format& format, bool gated,
                                         const std::optional<InputsTuple>& inputs, ThreadPool& pool) {
  if (tuples.empty()) throw std::invalid_argument("a weight needs at least one part");
  const size_t cols = std::get<0>(tuples.front()).shape(1);
  std::vector<SourceCodes> parts;
  for (const auto& [codes, scales, offsets] : tuples) {
    const size_t rows = codes.shape(0), groups = groups_of(make_view(rows, cols, format, false));
    if (codes.shape(1) != cols) throw std::invalid_argument("the parts of a weight have different numbers of columns");
    if (scales.shape(0) != rows || scales.shape(1) != groups)
      throw std::invalid_argument("a weight of codes needs one scale for each group of a row");
    if (format.offsets != offsets.has_value())
      throw std::invalid_argument("offsets of groups must be given for a format that has them, and for no other");
    if (offsets && (offsets->shape(0) != rows || offsets->shape(1) != groups))
      throw std::invalid_argument("a weight of codes needs one offset for each group of a row");
    parts.push_back({codes.data(), scales.data(), offsets ? offsets->data() : nullptr, rows});
  }
  const ColumnInputs columns = column_inputs(inputs, cols);
  nb::gil_scoped_release release;
  return std::make_shared<PackedMatrix>(parts, cols, format, gated, columns, pool);
}

BlockKind to_block_kind(const std::string& name) {
  for (int i = 0; i < kBlockKinds; ++i)
    if (name == kBlockShapes[i].name) return BlockKind(i);
  throw std::invalid_argument("there are no blocks of kind '" + name + "'");
}

// Neighbours of one kind are one part; else a part must fill its panels. Of a gated weight gate and up are two.
BlockParts to_block_parts(const std::vector<BlockTuple>& tuples) {
  BlockParts blocks;
  for (const auto& [name, rows] : tuples) {
    const BlockKind kind = to_block_kind(name);
    if (blocks.count > 0 && blocks.parts[blocks.count - 1].kind == kind) {
      blocks.parts[blocks.count - 1].rows += rows;
      continue;
    }
    if (blocks.count == BlockParts::kMost) throw std::invalid_argument("a weight has too many kinds of blocks");
    blocks.parts[blocks.count++] = {kind, rows};
  }
  return blocks;
}

std::vector<BlockTuple> from_block_parts(const BlockParts& blocks) {
  std::vector<BlockTuple> tuples;
  for (int i = 0; i < blocks.count; ++i)
    tuples.emplace_back(shape_of(blocks.parts[i].kind).name, blocks.parts[i].rows);
  return tuples;
}

SourceSparse source_sparse(const Ints& starts, const Ints& columns, const Floats& values) {
  const size_t rows = starts.shape(0) - 1, count = columns.shape(0);
  bool right = starts.shape(0) > 1 && values.shape(0) == count && starts.data()[0] == 0 &&
               size_t(starts.data()[rows]) == count;
  for (size_t r = 0; right && r < rows; ++r) right = starts.data()[r] <= starts.data()[r + 1];
  if (!right) throw std::invalid_argument("the starts of a sparse part do not ascend to the number of its values");
  return {starts.data(), columns.data(), values.data(), rows};
}

std::shared_ptr<PackedMatrix> pack_blocks(const std::vector<Codes>& arrays, size_t cols, const Format& format,
                                          bool gated, const std::optional<InputsTuple>& inputs,
                                          const std::vector<SparseTuple>& sparse, ThreadPool& pool) {
  if (arrays.empty()) throw std::invalid_argument("a weight needs at least one part");
  std::vector<SourceBlocks> parts;
  int part = 0, left = format.blocks.parts[0].rows;
  for (const Codes& array : arrays) {
    const size_t rows = array.shape(0), row_bytes = array.shape(1);
    if (left == 0 && part + 1 < format.blocks.count) left = format.blocks.parts[++part].rows;
    const BlockKind kind = format.blocks.parts[part].kind;
    if (cols % size_t(shape_of(kind).columns) || row_bytes != source_bytes(kind, cols))
      throw std::invalid_argument("rows of blocks have another size than their columns need");
    if (size_t(left) < rows) throw std::invalid_argument("the format has another number of rows of a kind");
    left -= int(rows);
    parts.push_back({reinterpret_cast<const char*>(array.data()), rows, row_bytes});
  }
  std::vector<SourceSparse> values;
  for (const auto& [starts, columns, entries] : sparse) values.push_back(source_sparse(starts, columns, entries));
  const ColumnInputs columns = column_inputs(inputs, cols);
  nb::gil_scoped_release release;
  return std::make_shared<PackedMatrix>(parts, cols, format, gated, columns, values, pool);
}

using StatesTuple = std::tuple<Ints, Ints, Ints, IntTable>;  // StateInput

void run(Plan& plan, const Ints& tokens, const Ints& positions, const Ints& cu_q, const Ints& kv_len,
         const Ints& slots, const IntTable& block_table, const Ints& logit_rows, bool greedy,
         const std::optional<FloatTable>& hidden, const std::optional<Ints>& adapters,
         const std::optional<StatesTuple>& states) {
  const size_t T = tokens.shape(0), B = kv_len.shape(0);
  if (positions.shape(0) != T || cu_q.shape(0) != B + 1 || slots.shape(0) != B)
    throw std::invalid_argument("the arrays of a step disagree on the number of tokens or sequences");
  if (adapters && adapters->shape(0) != B) throw std::invalid_argument("a step needs one adapter slot per sequence");
  if (hidden && hidden->shape(0) != T) throw std::invalid_argument("a step needs one hidden state per token");
  StepInput input{tokens.data(),      positions.data(),  cu_q.data(),
                        kv_len.data(),      slots.data(),      block_table.data(),
                        logit_rows.data(),  length(T),         length(B),
                        length(block_table.shape(0)), length(block_table.shape(1)), length(logit_rows.shape(0)),
                        greedy, hidden ? hidden->data() : nullptr, hidden ? length(hidden->shape(1)) : 0,
                        adapters ? adapters->data() : nullptr};
  if (states) {
    const auto& [rows, open, kept, marks] = *states;
    if (rows.shape(0) != B || open.shape(0) != B || kept.shape(0) != B || marks.shape(1) != 3)
      throw std::invalid_argument("the arrays of a step's states disagree on the number of sequences");
    input.state_rows = rows.data(), input.state_open = open.data(), input.state_kept = kept.data();
    input.state_marks = marks.data(), input.num_state_marks = length(marks.shape(0));
  }
  nb::gil_scoped_release release;
  plan.run(input);
}

// (buffer, place of the weight), and the fields of an AdapterChange.
using UpTuple = std::tuple<Weight, int, int>;
using ChangeTuple = std::tuple<int, int, std::optional<Weight>, std::optional<FloatTable>, std::vector<UpTuple>, OptionalFloats,
                               OptionalFloats, std::optional<Weight>, OptionalFloats, nb::object>;  // a Norm or None

AdapterChange to_change(const ChangeTuple& t) {
  const auto& [out, index, down, lookup, ups, gain, shift, weight, bias, norm] = t;
  AdapterChange change;
  if (down) change.down = *down, change.rank = (*down)->view().rows;
  if (lookup) change.lookup.assign(lookup->data(), lookup->data() + lookup->size()), change.rank = length(lookup->shape(1));
  for (const auto& [matrix, first, start] : ups) {
    if (first < 0 || start < 0 || first + matrix->view().cols > change.rank)
      throw std::invalid_argument("an adapter's second product reads more than its first makes");
    change.ups.push_back({matrix, first, start});
  }
  change.gain = to_vector(gain), change.shift = to_vector(shift), change.bias = to_vector(bias);
  change.bias.resize((change.bias.size() + 15) / 16 * 16);  // kernels read whole panels
  if (weight) change.weight = *weight;
  if (!norm.is_none()) change.norm = std::make_shared<NormParams>(norm_params(norm));
  return change;
}

// Returns the bytes that the adapter takes.
size_t set_adapter(Plan& plan, int slot, const std::optional<std::vector<ChangeTuple>>& tuples) {
  std::shared_ptr<AdapterChanges> changes;
  size_t bytes = 0;
  if (tuples) {
    changes = std::make_shared<AdapterChanges>();
    for (const ChangeTuple& t : *tuples) {
      const AdapterPlace place{std::get<0>(t), std::get<1>(t)};
      AdapterChange change = to_change(t);
      plan.check_change(place, change);
      bytes += change.nbytes();
      changes->insert_or_assign(place, std::move(change));
    }
  }
  nb::gil_scoped_release release;
  plan.set_adapter(slot, std::move(changes));
  return bytes;
}

void head(Plan& plan, int start, int stop) {
  nb::gil_scoped_release release;
  plan.head(start, stop);
}

FloatsOut view(nb::handle plan, float* data, int rows, int width) {
  return FloatsOut(data, {size_t(rows), size_t(width)}, plan);
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> dequantize(const PackedMatrix& m, ThreadPool& pool) {
  const Kernels& kernels = kernels_for(resolve_isa("auto"));  // of all of them: the values have the same bits
  const size_t rows = size_t(m.view().rows), cols = size_t(m.view().cols);
  float* out = new float[rows * cols];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  {
    nb::gil_scoped_release release;
    m.unpack(out, kernels, pool);
  }
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(out, {rows, cols}, owner);
}

// A view of a packed weight's memory; `owner` keeps it alive.
Bytes bytes(nb::handle owner) {
  const MatrixView& view = nb::cast<const PackedMatrix&>(owner).view();
  if (!view.data) throw std::invalid_argument("an outline has no values");
  return Bytes(reinterpret_cast<const uint8_t*>(view.data), {view.nbytes()}, owner);
}

// The fields of KVLayer, with (elements of a state, of an open row) of each state, of each layer.
using LayerTuples = std::vector<std::tuple<int, int, int, int, std::vector<std::pair<size_t, size_t>>>>;

std::vector<KVLayer> to_layers(const LayerTuples& tuples) {
  std::vector<KVLayer> layers;
  for (const auto& [heads, dim, value_dim, every, sizes] : tuples) {
    layers.push_back({heads, dim, value_dim, every, {}});
    for (const auto& [state, row] : sizes) layers.back().states.push_back({state, row});
  }
  return layers;
}

// KVStore::copy_blocks or copy_states.
template <void (KVStore::*copy)(const int32_t*, const int32_t*, size_t)>
void copy_rows(KVStore& kv, const Ints& source, const Ints& destination) {
  if (source.shape(0) != destination.shape(0)) throw std::invalid_argument("as many sources as destinations");
  nb::gil_scoped_release release;
  (kv.*copy)(source.data(), destination.data(), source.shape(0));
}

void place_blocks(KVStore& kv, const IntTable& rows) {
  if (kv.num_columns() == 0 || rows.shape(1) != kv.num_columns() + 1)
    throw std::invalid_argument("a row to place is a block and the slab of each column");
  kv.place_blocks(rows.data(), rows.shape(0));
}

void bind_weights(nb::module_& m) {
  nb::class_<Format>(m, "Format", "How a weight is held and what it is multiplied with (csrc/linear/format.h).")
      .def("__init__",
           [](Format* self, const std::string& layout, int group, bool offsets, bool narrow, bool int8_rows,
              bool inputs, bool screened, const std::vector<BlockTuple>& blocks,
              int nonzeros, const std::optional<RoundingTuple>& rounding) {
             new (self) Format{.layout = to_layout(layout),
                               .group = group,
                               .offsets = offsets,
                               .narrow = narrow,
                               .int8_rows = int8_rows,
                               .inputs = inputs,
                               .screened = screened,
                               .blocks = to_block_parts(blocks),
                               .nonzeros = nonzeros,
                               .rounding = to_rounding(rounding)};
           },
           nb::kw_only(), "layout"_a, "group"_a = 0, "offsets"_a = false, "narrow"_a = false, "int8_rows"_a = false,
           "inputs"_a = false, "screened"_a = false, "blocks"_a = std::vector<BlockTuple>{},
           "nonzeros"_a = 0, "rounding"_a = std::optional<RoundingTuple>{})
      .def_prop_ro("layout", [](const Format& f) { return kLayouts[int(f.layout)]; })
      .def_ro("group", &Format::group)
      .def_ro("offsets", &Format::offsets)
      .def_ro("narrow", &Format::narrow)
      .def_ro("int8_rows", &Format::int8_rows)
      .def_ro("inputs", &Format::inputs)
      .def_ro("screened", &Format::screened)
      .def_ro("nonzeros", &Format::nonzeros)
      .def_prop_ro("blocks", [](const Format& f) { return from_block_parts(f.blocks); })
      .def_prop_ro("rounding", [](const Format& f) { return from_rounding(f.rounding); });
  m.def("layouts", [] { return std::vector<std::string>(std::begin(kLayouts), std::end(kLayouts)); },
        "Names of the layouts that weights can have.");
  nb::class_<PackedMatrix>(m, "PackedMatrix", "A weight in panels of 16 rows.")
      .def_prop_ro("shape", [](const PackedMatrix& p) { return std::pair(p.view().rows, p.view().cols); })
      .def_prop_ro("gated", [](const PackedMatrix& p) { return p.view().gated; })
      .def_prop_ro("format", [](const PackedMatrix& p) { return p.view().format; })
      .def_prop_ro("nbytes", [](const PackedMatrix& p) { return p.view().nbytes(); })
      .def_prop_ro("screen_nbytes",
                   [](const PackedMatrix& p) { return p.view().has_screen() ? p.view().screen().nbytes() : 0; })
      .def("bytes", &bytes)
      .def("dequantize", &dequantize, "pool"_a);
  m.def(
      "outline",
      [](size_t rows, size_t cols, const Format& format, bool gated) {
        return std::make_shared<PackedMatrix>(rows, cols, format, gated);
      },
      "rows"_a, "cols"_a, "format"_a, "gated"_a, "The shape of a weight without values, for planning.");
  m.def(
      "packed",
      [](size_t rows, size_t cols, const Format& format, bool gated, const Bytes& data) {
        return std::make_shared<PackedMatrix>(rows, cols, format, gated, reinterpret_cast<const char*>(data.data()),
                                              data.size());
      },
      "rows"_a, "cols"_a, "format"_a, "gated"_a, "data"_a.noconvert(), nb::keep_alive<0, 5>(),
      "A weight in place in bytes that `PackedMatrix.bytes` returned.");
  m.def("pack", &pack, "parts"_a, "format"_a, "gated"_a, "isa"_a, "pool"_a,
        "Packs (array, type) parts stacked on rows; with `gated`, a gate and an up projection.");
  m.def("pack_codes", &pack_codes, "parts"_a, "format"_a, "gated"_a, "inputs"_a.none(), "pool"_a,
        "The same for (codes, scales, offsets) parts, which are kept bit for bit.");
  m.def("pack_blocks", &pack_blocks, "parts"_a, "cols"_a, "format"_a, "gated"_a, "inputs"_a.none(), "sparse"_a, "pool"_a,
        "The same for rows of blocks, whose kinds are the format's.");
}

}  // namespace

void bind_plan(nb::module_& m) {
  bind_weights(m);
  nb::class_<KVStore>(m, "KVStore", "Paged keys and values of all layers.")
      .def("__init__",
           [](KVStore* self, const LayerTuples& layers, const std::string& type, int num_blocks,
              int block_size, std::vector<std::vector<float>> scales, std::vector<int> columns, int num_slabs,
              int num_states, int num_open) {
             new (self) KVStore(to_layers(layers), to_kv_type(type), num_blocks, block_size,
                                std::move(scales), std::move(columns), num_slabs, num_states, num_open);
           },
           "layers"_a, "type"_a, "num_blocks"_a, "block_size"_a,
           "scales"_a = std::vector<std::vector<float>>{}, "columns"_a = std::vector<int>{}, "num_slabs"_a = 0,
           "num_states"_a = 0, "num_open"_a = 0)
      .def_prop_ro("nbytes", &KVStore::nbytes)
      .def("place_blocks", &place_blocks, "rows"_a.noconvert())
      .def("copy_blocks", &copy_rows<&KVStore::copy_blocks>, "source"_a.noconvert(), "destination"_a.noconvert())
      .def("copy_states", &copy_rows<&KVStore::copy_states>, "source"_a.noconvert(), "destination"_a.noconvert());

  nb::class_<Plan> plan(m, "Plan", "A recorded forward pass.");
  plan.def("__init__",
           [](Plan* self, const std::string& isa, std::shared_ptr<ThreadPool> pool, const LayerTuples& layers,
              int max_tokens, int max_seqs, int max_logit_rows, int max_adapters) {
             new (self) Plan(kernels_for(resolve_isa(isa)), std::move(pool), to_layers(layers),
                             {max_tokens, max_seqs, max_logit_rows, max_adapters});
           })
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes)
      .def("bind", &Plan::bind, "kv"_a)
      .def("run", &run, "tokens"_a.noconvert(), "positions"_a.noconvert(), "cu_q"_a.noconvert(),
           "kv_len"_a.noconvert(), "slots"_a.noconvert(), "block_table"_a.noconvert(), "logit_rows"_a.noconvert(),
           "greedy"_a, "hidden"_a.noconvert().none(), "adapters"_a.noconvert().none(),
           "states"_a.none() = nb::none())
      .def("set_adapter", &set_adapter, "slot"_a, "changes"_a.none())
      .def("head", &head, "start"_a, "stop"_a)
      .def_prop_ro("num_logit_rows", &Plan::num_logit_rows)
      .def("poison", &Plan::poison)
      .def("logits_view",
           [](nb::handle self) {
             const Plan& p = nb::cast<const Plan&>(self);
             return view(self, p.logits(), p.limits().max_logit_rows, p.logits_width());
           })
      .def("tap_view",
           [](nb::handle self, int buffer) {
             const Plan& p = nb::cast<const Plan&>(self);
             return view(self, p.tapped(buffer), p.limits().max_tokens, p.width(buffer));
           },
           "buffer"_a)
      .def("best_view",
           [](nb::handle self) -> std::optional<IntsOut> {
             const Plan& p = nb::cast<const Plan&>(self);
             if (!p.best()) return {};
             return IntsOut(p.best(), {size_t(p.limits().max_logit_rows)}, self);
           })
      .def("hidden_view", [](nb::handle self) {
        const Plan& p = nb::cast<const Plan&>(self);
        return view(self, p.hidden(), p.limits().max_tokens, p.hidden_width());
      });
  bind_recording(plan);
}

}  // namespace quire
