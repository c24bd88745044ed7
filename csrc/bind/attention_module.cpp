// Python bindings of attention alone, for tests and benchmarks: takes plain numpy arrays and lays out the cache.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "bind/bindings.h"
#include "simd/isa.h"
#include "kernels/kernels.h"
#include "plan/kv_cache.h"
#include "plan/shared_prefix.h"

namespace nb = nanobind;

namespace quire {

namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

void check(bool good, const char* message) {
  if (!good) throw std::invalid_argument(message);
}

// One layer of cache around arrays in its own layout: keys [blocks, G, H, block_size], values [blocks, G, block_size,
// H], as float32 or as the bits of bfloat16.
class AttentionCache {
 public:
  AttentionCache(const nb::ndarray<nb::c_contig, nb::device::cpu>& keys,
                 const nb::ndarray<nb::c_contig, nb::device::cpu>& values)
      : store_({KVLayer{dim(keys, 1), dim(keys, 2)}}, keys.itemsize() == 2 ? KVType::bf16 : KVType::f32,
               dim(keys, 0), dim(keys, 3)) {
    check(values.ndim() == 4 && values.nbytes() == keys.nbytes() && values.itemsize() == keys.itemsize() &&
              values.shape(2) == keys.shape(3) && values.shape(3) == keys.shape(2),
          "keys must be [blocks, G, H, block_size] and values [blocks, G, block_size, H] of one type");
    check(keys.itemsize() == 2 || keys.itemsize() == 4, "elements must be float32 or bfloat16");
    const KVView& kv = store_.layer(0);
    const auto *key = static_cast<const char*>(keys.data()), *value = static_cast<const char*>(values.data());
    for (int block = 0; block < kv.num_blocks; ++block, key += kv.side_bytes(), value += kv.side_bytes()) {
      std::memcpy(kv.key_tile(block, 0), key, kv.side_bytes());
      std::memcpy(kv.value_tile(block, 0), value, kv.side_bytes());
    }
  }

  const KVView& view() const { return store_.layer(0); }

  // Kept between calls, so that a benchmark does not time its first touch.
  void* workspace(size_t bytes) {
    if (workspace_.size() < bytes) workspace_ = HugeBuffer(bytes);
    return workspace_.data();
  }

 private:
  static int dim(const nb::ndarray<nb::c_contig, nb::device::cpu>& keys, size_t i) {
    check(keys.ndim() == 4, "keys must be [blocks, G, H, block_size]");
    return int(keys.shape(i));
  }
  KVStore store_;
  HugeBuffer workspace_;
};

void check_step(const AttentionArgs& a, size_t tokens, size_t slots, size_t blocks_per_seq) {
  check(a.num_heads > 0 && a.num_heads % a.kv.num_kv_heads == 0, "heads must be a multiple of kv heads");
  check(a.cu_q[0] == 0 && size_t(a.cu_q[a.num_seqs]) == tokens, "cu_q must run from 0 to the number of tokens");
  check(a.window >= 0 && a.chunk >= 0, "window and chunk must be 0 (none) or more");
  check(a.ahead >= 0 && a.ahead <= 1 << 28, "ahead must be 0 or more");
  for (int b = 0; b < a.num_seqs; ++b) {
    const int q_len = a.cu_q[b + 1] - a.cu_q[b];
    check(q_len > 0 && a.kv_len[b] >= q_len,
          "each kv_len must be at least the sequence's new tokens, which are at least 1");
    check(a.slots[b] >= 0 && size_t(a.slots[b]) < slots, "a slot is outside the block table");
    const size_t blocks = size_t((a.kv_len[b] + a.kv.block_size - 1) / a.kv.block_size);
    check(blocks <= blocks_per_seq, "kv_len exceeds the block table");
    const int first = a.window > 0 ? std::max(0, a.kv_len[b] - q_len - a.window + 1) : 0;
    for (size_t i = size_t(first / a.kv.block_size); i < blocks; ++i) {
      const int32_t block = a.block_table[size_t(a.slots[b]) * a.block_table_stride + i];
      check(block >= 0 && block < a.kv.num_blocks, "a block is outside the cache");
    }
  }
}

// q, out [T, N, H]; the rest as in ModelInput.
void run_attention(const std::string& isa, ThreadPool& pool, AttentionCache& cache, const Array<const float, 3>& q,
                   const Array<float, 3>& out, const Array<const int32_t, 1>& cu_q,
                   const Array<const int32_t, 1>& kv_len, const Array<const int32_t, 1>& slots,
                   const Array<const int32_t, 2>& table, float scale, int window, int chunk, int ahead, float cap,
                   const std::optional<Array<const float, 1>>& slopes,
                   const std::optional<Array<const float, 1>>& sinks) {
  const Kernels& kernels = kernels_for(resolve_isa(isa));
  const int seqs = int(kv_len.shape(0)), heads = int(q.shape(1)), tokens = int(q.shape(0));
  check(int(q.shape(2)) == cache.view().head_dim, "q must be [T, N, H] with the cache's H");
  check(out.size() == q.size() && out.shape(1) == q.shape(1), "out must have q's shape");
  check(cu_q.shape(0) == kv_len.shape(0) + 1 && slots.shape(0) == kv_len.shape(0), "cu_q, kv_len, slots disagree");
  for (const auto& values : {slopes, sinks})
    check(!values || int(values->shape(0)) == heads, "slopes and sinks need one value a head");
  const size_t stride = size_t(heads) * q.shape(2);
  AttentionArgs args{.q = q.data(),
                     .q_stride = stride,
                     .out = out.data(),
                     .out_stride = stride,
                     .kv = cache.view(),
                     .num_heads = heads,
                     .num_seqs = seqs,
                     .cu_q = cu_q.data(),
                     .kv_len = kv_len.data(),
                     .slots = slots.data(),
                     .block_table = table.data(),
                     .block_table_stride = table.shape(1),
                     .order = nullptr,
                     .shared = nullptr,
                     .scale = scale,
                     .window = window,
                     .chunk = chunk,
                     .ahead = ahead,
                     .cap = cap,
                     .slopes = slopes ? slopes->data() : nullptr,
                     .sinks = sinks ? sinks->data() : nullptr,
                     .bias = nullptr,
                     .reach = 0,
                     .added = nullptr,
                     .added_positions = 0,
                     .workspace = nullptr};
  check_step(args, size_t(tokens), table.shape(0), table.shape(1));
  const KVView& kv = cache.view();
  const AttentionLimits limits{tokens, seqs, heads, kv.num_kv_heads, kv.head_dim, kv.value_dim, pool.threads()};
  SharedPrefixes prefixes;
  prefixes.find(seqs, args.kv_len, args.slots, args.block_table, args.block_table_stride, args.kv.block_size);
  args.order = prefixes.order(), args.shared = prefixes.shared();
  args.workspace = cache.workspace(kernels.attention_workspace(limits));
  const nb::gil_scoped_release release;
  kernels.attention(args, pool);
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<AttentionCache>(m, "AttentionCache", "One layer of KV cache, copied from arrays (tests, benchmarks).")
      .def(nb::init<const nb::ndarray<nb::c_contig, nb::device::cpu>&,
                    const nb::ndarray<nb::c_contig, nb::device::cpu>&>(),
           nb::arg("keys"), nb::arg("values"));
  m.def("attention", &run_attention, nb::arg("isa"), nb::arg("pool"), nb::arg("cache"), nb::arg("q"), nb::arg("out"),
        nb::arg("cu_q"), nb::arg("kv_len"), nb::arg("slots"), nb::arg("block_table"), nb::arg("scale"),
        nb::arg("window"), nb::arg("chunk") = 0, nb::arg("ahead") = 0, nb::arg("cap") = 0.0f,
        nb::arg("slopes") = nb::none(), nb::arg("sinks") = nb::none(),
        "Paged attention of one step, for tests and benchmarks.");
}

}  // namespace quire
