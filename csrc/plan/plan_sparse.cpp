// Ops of sparse attention, recorded and run: index keys, choices, and attention that sees what was chosen. Knows the layers of
// the cache.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "plan/plan.h"

namespace quire {

namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

constexpr int kMostChosen = 1 << 16, kMostSize = 4096;

// The numbers at the beginning of a choice that are not -1.
int count_numbers(const float* numbers, int width) {
  return int(std::partition_point(numbers, numbers + width, [](float number) { return number >= 0; }) - numbers);
}

}  // namespace

// A layer of the cache with one key and no values.
KVLayer Plan::index_keys(int layer, const char* what) const {
  require(layer >= 0 && layer < int(layers_.size()), std::string(what) + ": layer " + std::to_string(layer) + " is not in the cache");
  const KVLayer kept = layers_[size_t(layer)];
  require(kept.num_kv_heads == 1 && kept.value_dim > 0,
          std::string(what) + ": layer " + std::to_string(layer) + " does not keep one key and no values");
  return kept;
}

int Plan::store_keys(int x, int gates, int layer, NormParams norm, std::vector<float> inv_freq, float scale,
                     std::vector<float> bias, SparseParams params) {
  const Buffer in = checked(x, "the input of store_keys");
  const KVLayer kept = index_keys(layer, "store_keys");
  const int size = params.size, channels = kept.head_dim * (params.overlap ? 2 : 1);
  require(size >= 1 && size <= kMostSize && kept.every == size, "store_keys: the cache has entries of another size");
  require((size > 1) == (params.further >= 0) && (bias.empty() || size > 1) && (!params.overlap || !bias.empty()) &&
              (gates < 0 || !bias.empty()),
          "store_keys: entries need a layer of raw keys, gates a bias, and overlapping windows gates");
  const int width = channels * (bias.empty() ? 1 : 2);
  require(in.rows == RowKind::tokens && in.width == (gates < 0 ? width : channels), "store_keys: the input is not of keys, or of keys and gates");
  if (gates >= 0) {
    const Buffer own = checked(gates, "the gates of store_keys");
    require(own.rows == RowKind::tokens && own.width == channels, "store_keys: the gates are not of the keys' width");
  }
  if (size > 1) {
    const KVLayer raw = index_keys(params.further, "store_keys");
    require(raw.every == 1 && raw.head_dim == width, "store_keys: the layer of raw keys has another width");
    require(bias.empty() || bias.size() == size_t(size) * size_t(channels), "store_keys: the bias is not [size, C]");
  }
  if (norm.present()) norm.check(kept.head_dim);
  require(!norm.own_head && 2 * inv_freq.size() <= size_t(kept.head_dim), "store_keys: the norm or the rope is not for one key");
  require((size_t(width) + 32 + std::max(size_t(width), size_t(size) * 64) + size_t(kept.head_dim)) * 8 <= ThreadPool::kScratchBytes,
          "store_keys: the keys are too large");
  Op op{.kind = OpKind::store_keys, .in = x, .other = gates};
  op.layer = layer;
  op.norm = std::move(norm);
  op.vector = std::move(inv_freq);
  op.scale = scale;
  op.scan.skip = std::move(bias);
  op.sparse = params;
  return add_op(std::move(op), 1, RowKind::tokens);
}

int Plan::choose(int q, int weights, int layer, int num_heads, float scale, SparseParams params) {
  const Buffer in = checked(q, "the queries of choose");
  const KVLayer kept = index_keys(layer, "choose");
  require(in.rows == RowKind::tokens && num_heads > 0 && in.width == int64_t(num_heads) * kept.head_dim,
          "choose: the queries are not [T, N D]");
  if (weights >= 0) {
    const Buffer own = checked(weights, "the weights of choose");
    require(own.rows == RowKind::tokens && own.width == num_heads, "choose: the weights are not [T, N]");
  }
  require(params.groups > 0 && num_heads % params.groups == 0, "choose: heads must be a multiple of groups");
  require(params.top_k > 0 && params.top_k <= kMostChosen && params.local >= 0 && params.local <= params.top_k,
          "choose: from 1 to " + std::to_string(kMostChosen) + " pools can be chosen, and no more be always chosen");
  require(params.size >= 1 && params.size <= kMostSize && (kept.every == 1 || kept.every == params.size),
          "choose: pools have another size than the entries of the cache");
  require(kept.every == 1 || params.local == 0, "choose: only pools of keys by token are always chosen");
  require(std::isfinite(scale), "choose: the scale is not finite");
  Op op{.kind = OpKind::choose, .in = q, .other = weights};
  op.layer = layer;
  op.num_heads = num_heads;
  op.scale = scale;
  op.sparse = params;
  return add_op(std::move(op), int64_t(params.groups) * (params.top_k + (params.tail ? 1 : 0)), RowKind::tokens);
}

// What attention needs to see a choice, or entries.
void Plan::check_sparse(const Op& op) const {
  const SparseParams& p = op.sparse;
  const AttentionParams& a = op.attention;
  const KVLayer& own = layers_[size_t(op.layer)];
  if (op.residual < 0 && p.further < 0) return;
  require(a.chunk == 0 && a.ahead == 0 && a.slopes.empty() && a.bias.empty() && op.other < 0 && (a.window == 0 || p.further >= 0),
          "attention to a choice has no bound or score by position");
  if (op.residual >= 0) {
    const Buffer chosen = checked(op.residual, "the choice of attention");
    require(chosen.rows == RowKind::tokens && p.size >= 1 && p.size <= kMostSize && chosen.width % p.groups == 0,
            "attention: the choice is not [T, groups K]");
  }
  require(p.groups == 1 || (p.groups == own.num_kv_heads && op.residual >= 0), "attention: one choice, or one for each kv head");
  if (p.further < 0) return;
  require(p.further < int(layers_.size()) && p.groups == 1 && p.size == 1, "attention: the entries are not in the cache");
  const KVLayer& entries = layers_[size_t(p.further)];
  require(own.num_kv_heads == 1 && own.value_dim > 0 && entries.num_kv_heads == 1 && entries.every > 1 &&
              entries.head_dim == own.head_dim && entries.value_dim == own.value_dim,
          "attention: entries are not keys of the layer's shape, whose values are part of them");
}

void Plan::execute_store_keys(const Op& op) {
  StoreKeysArgs args{};
  const std::vector<float>& bias = op.scan.skip;
  args.x = data(op.in);
  args.x_stride = size_t(width(op.in));
  args.kv = kv_->layer(op.layer);
  args.channels = args.kv.head_dim * (op.sparse.overlap ? 2 : 1);
  if (op.other >= 0) args.gates = data(op.other), args.gates_stride = size_t(width(op.other));
  else if (!bias.empty()) args.gates = args.x + args.channels, args.gates_stride = args.x_stride;
  args.num_tokens = step_.num_tokens;
  args.num_seqs = step_.num_seqs;
  args.positions = step_.positions;
  args.cu_q = step_.cu_q;
  args.slots = step_.slots;
  args.block_table = step_.block_table;
  args.block_table_stride = size_t(step_.blocks_per_slot);
  if (op.sparse.further >= 0) args.raw = kv_->layer(op.sparse.further);
  args.size = op.sparse.size;
  args.bias = bias.empty() ? nullptr : bias.data();
  args.overlap = op.sparse.overlap;
  args.norm = op.norm.view();
  args.inv_freq = op.vector.empty() ? nullptr : op.vector.data();
  args.half = int(op.vector.size());
  args.scale = op.scale;
  kernels_.store_keys(args, *pool_);
}

void Plan::execute_choose(const Op& op) {
  const StepInput& step = step_of(op.in);
  const SparseParams& p = op.sparse;
  kernels_.choose({data(op.in), op.other < 0 ? nullptr : data(op.other), step.num_seqs, step.cu_q, step.kv_len, step.slots,
                   step.block_table, size_t(step.blocks_per_slot), kv_->layer(op.layer), op.num_heads, p.groups, p.top_k,
                   p.size, p.local, p.tail, p.relu, op.scale, data(op.out), workspace_.data()},
                  *pool_);
}

// Queries that see everything up to their own position are computed together, the others one by one, with the same bits.
void Plan::attend_to_views(const Op& op, AttentionArgs args, const StepInput& step) {
  const int pool = op.sparse.size, groups = op.sparse.groups, window = op.attention.window;
  const int width = op.residual < 0 ? 0 : this->width(op.residual) / groups;
  const float* chosen = op.residual < 0 ? nullptr : data(op.residual);
  const KVView* entries = op.sparse.further < 0 ? nullptr : &kv_->layer(op.sparse.further);
  auto numbers = [&](int t, int g) { return chosen + (size_t(t) * size_t(groups) + size_t(g)) * size_t(width); };
  auto sees_all = [&](int t, int position) {
    for (int g = 0; g < groups; ++g)
      if (entries || count_numbers(numbers(t, g), width) <= position / pool) return false;
    return true;
  };
  views_.clear();
  plain_cu_q_.assign(1, 0);
  plain_lengths_.clear(), plain_slots_.clear(), plain_order_.clear();
  for (int b = 0; b < step.num_seqs; ++b) {
    const int begin = step.cu_q[b], end = step.cu_q[b + 1], length = step.kv_len[b];
    int t = begin;
    for (; t < end && sees_all(t, length - end + t); ++t) {}
    if (t > begin) plain_order_.push_back(int32_t(plain_lengths_.size()));
    for (const int last : {t, end}) {  // a sequence of the first tokens, and one of the rest
      plain_cu_q_.push_back(last), plain_lengths_.push_back(length - end + last), plain_slots_.push_back(step.slots[b]);
    }
    for (; t < end; ++t)
      for (int g = 0; g < groups; ++g) {
        const int seen = length - end + t + 1;
        const float* list = chosen ? numbers(t, g) : nullptr;
        QueryView view{t, step.slots[b], 0, 0, 0, list, g};
        if (entries) {
          view.own = window > 0 ? std::min(seen, window) : seen;
          view.first = seen - view.own;
          view.length = view.own + (list ? count_numbers(list, width) : seen / entries->every);
        } else if (const int count = count_numbers(list, width); count > 0) {
          view.length = (count - 1) * pool + std::min(pool, seen - int(list[count - 1]) * pool);
        }
        views_.push_back(view);
      }
  }
  if (views_.empty()) return kernels_.attention(args, *pool_);
  args.num_tokens = step.num_tokens;
  args.shared = nullptr;
  if (!plain_order_.empty()) {
    AttentionArgs plain = args;
    plain.num_seqs = int(plain_order_.size());
    plain.cu_q = plain_cu_q_.data(), plain.kv_len = plain_lengths_.data(), plain.slots = plain_slots_.data();
    plain.order = plain_order_.data();
    kernels_.attention(plain, *pool_);
  }
  args.num_seqs = args.num_tokens = int(views_.size());
  args.order = nullptr;
  args.window = 0;
  args.views = views_.data();
  args.entries = entries;
  args.pool = pool;
  args.by_head = groups > 1;
  kernels_.attention(args, *pool_);
}

}  // namespace quire
