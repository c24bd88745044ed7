// Ops of a plan that read and write the KV cache, recorded and run. Knows ops, buffers and the cache's layers.
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "plan/plan.h"

namespace quire {

namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

void check_head_norm(const NormParams& norm, int heads, int head_dim) {
  if (!norm.present()) return;
  const bool of_one = int64_t(norm.weight.size()) == head_dim && !norm.own_head;
  norm.check(of_one ? head_dim : int64_t(heads) * head_dim);
}

HeadNorm head_norm(const NormParams& norm, int head_dim) {
  HeadNorm n{norm.view()};
  if (norm.own_head) n.over = HeadNorm::Over::own_head;
  else if (int(norm.weight.size()) > head_dim) n.over = HeadNorm::Over::all_heads;
  n.after_rope = norm.after_rope;
  return n;
}

}  // namespace

// A layer of the cache with a row for each token, for a step's `num_heads` query heads; 0: any number.
KVLayer Plan::cached(int layer, int num_heads, const char* what) const {
  require(layer >= 0 && layer < int(layers_.size()),
          std::string(what) + ": layer " + std::to_string(layer) + " is not in the cache");
  const KVLayer heads = layers_[size_t(layer)];
  require(heads.num_kv_heads > 0, std::string(what) + ": layer " + std::to_string(layer) + " keeps nothing");
  require(heads.every == 1, std::string(what) + ": layer " + std::to_string(layer) + " has entries");
  require(num_heads >= 0 && num_heads % heads.num_kv_heads == 0, "query heads must be a multiple of key/value heads");
  return heads;
}

void Plan::check_angles(int angles, int head_dim) const {
  if (angles < 0) return;
  const Buffer& a = checked(angles, "the angles");
  require(a.rows == RowKind::tokens && a.width <= head_dim && a.width % 2 == 0,
          "angles must be [T, rotary_dim] with an even rotary_dim of at most head_dim");
}

int Plan::store_kv(int qkv, int layer, int num_heads, int angles, NormParams q_norm, NormParams k_norm,
                   NormParams v_norm) {
  const Buffer in = checked(qkv, "the input of store_kv");
  require(in.rows == RowKind::tokens, "store_kv needs one row per token");
  const KVLayer kept = cached(layer, num_heads, "store_kv");
  const int kv_heads = kept.num_kv_heads, head_dim = kept.head_dim;
  require(in.width == (num_heads + 2 * int64_t(kv_heads)) * head_dim, "store_kv: the input is not [T, (N + 2 G) H]");
  // The keys of 16 tokens, again those of one head, and the normed values of one token.
  const size_t held = size_t(kv_heads + 1) * 16 + (v_norm.present() ? size_t(kv_heads) : 0);
  require(held * size_t(head_dim) * 4 <= ThreadPool::kScratchBytes, "store_kv: the keys are too large");
  check_angles(angles, head_dim);
  require(kept.value_dim == 0, "store_kv: the cache is for latent attention");
  check_head_norm(q_norm, num_heads, head_dim);
  check_head_norm(k_norm, kv_heads, head_dim);
  check_head_norm(v_norm, kv_heads, head_dim);
  Op op{.kind = OpKind::store_kv, .in = qkv};
  op.angles = angles;
  op.norm = std::move(q_norm);
  op.k_norm = std::move(k_norm);
  op.v_norm = std::move(v_norm);
  op.layer = layer;
  op.num_heads = num_heads;
  return add_op(std::move(op), int64_t(num_heads) * head_dim, RowKind::tokens);
}

int Plan::queries(int q, int num_heads, int angles, NormParams norm) {
  const Buffer in = checked(q, "the input of queries");
  require(in.rows == RowKind::tokens && num_heads > 0 && in.width % num_heads == 0, "queries: not [T, N H]");
  const int head_dim = in.width / num_heads;
  check_angles(angles, head_dim);
  check_head_norm(norm, num_heads, head_dim);
  require(size_t(head_dim) * 16 * 4 <= ThreadPool::kScratchBytes, "queries: the heads are too large");
  Op op{.kind = OpKind::store_kv, .in = q};
  op.angles = angles;
  op.norm = std::move(norm);
  op.layer = -1;
  op.num_heads = num_heads;
  return add_op(std::move(op), in.width, RowKind::tokens);
}

int Plan::attention(int q, int layer, int num_heads, AttentionParams params, int scores, int chosen, SparseParams sparse) {
  const Buffer in = checked(q, "the input of attention");
  const KVLayer kept = cached(layer, num_heads, "attention");
  const int head_dim = kept.head_dim;
  require(in.rows == RowKind::tokens && in.width == int64_t(num_heads) * head_dim, "attention: the input is not [T, N H]");
  require(std::isfinite(params.scale) && std::isfinite(params.cap) && params.cap >= 0,
          "attention: the scale and the cap of scores must be finite");
  require(params.window >= 0 && params.chunk >= 0, "attention: a window or chunk must be at least 1 token");
  require(params.ahead >= 0 && params.ahead <= 1 << 28, "attention: a query cannot see that many positions ahead");
  for (const auto* values : {&params.slopes, &params.sinks})
    require(values->empty() || int(values->size()) == num_heads, "attention: slopes and sinks need one value a head");
  require(params.bias.empty() || (params.bias.size() % size_t(num_heads) == 0 && params.bias.size() / size_t(num_heads) % 2 == 1),
          "attention: a bias needs an odd number of values a head");
  if (scores >= 0) {
    const Buffer added = checked(scores, "the scores of attention");
    require(added.rows == RowKind::tokens && added.width % num_heads == 0 && added.width / num_heads % 64 == 0,
            "attention: the scores are not [T, N S] of whole tiles");
  }
  Op op{.kind = OpKind::attention, .in = q, .residual = chosen, .other = scores};
  op.layer = layer;
  op.num_heads = num_heads;
  op.attention = std::move(params);
  op.sparse = sparse;
  check_sparse(op);
  return add_op(std::move(op), int64_t(num_heads) * kept.value_width(), RowKind::tokens);
}

int Plan::store_latent(int kv, int q_latent, int q_rope, int layer, int angles, NormParams norm) {
  const Buffer latent = checked(q_latent, "the latent queries");
  const Buffer rotated = checked(q_rope, "the queries to rotate"), a = checked(angles, "the angles of store_latent");
  const KVLayer kept = cached(layer, 0, "store_latent");
  require(kept.value_dim > 0, "store_latent: the cache is not for latent attention");
  const int num_heads = latent.width / kept.value_dim, head_dim = kept.head_dim, rope_dim = head_dim - kept.value_dim;
  const Buffer in = kv < 0 ? Buffer{head_dim, RowKind::tokens, -1} : checked(kv, "the input of store_latent");
  for (const Buffer& b : {in, latent, rotated, a})
    require(b.rows == RowKind::tokens, "store_latent needs one row per token");
  require(kept.num_kv_heads == 1 && num_heads > 0 && rope_dim > 0 && in.width == head_dim && a.width == rope_dim,
          "store_latent: the cache is not one of C latent and R rotated elements, or the input not [T, C + R]");
  require(latent.width == num_heads * kept.value_dim && rotated.width == num_heads * rope_dim,
          "store_latent: queries must be [T, N C] and [T, N R]");
  require(size_t(head_dim) * 17 * 4 <= ThreadPool::kScratchBytes, "store_latent: the keys are too large");
  if (kv >= 0) norm.check(kept.value_dim);
  Op op{.kind = OpKind::store_latent, .in = kv, .residual = q_latent, .angles = angles, .other = q_rope};
  op.norm = std::move(norm);
  op.layer = layer;
  op.num_heads = num_heads;
  return add_op(std::move(op), int64_t(num_heads) * head_dim, RowKind::tokens);
}

size_t Plan::attention_workspace(const Op& op) const {
  const KVLayer& kept = layers_[size_t(op.layer)];
  const bool views = op.residual >= 0 || op.sparse.further >= 0;
  const int tokens = limits_.max_tokens * op.sparse.groups, seqs = views ? tokens : limits_.max_seqs;
  return kernels_.attention_workspace({tokens, seqs, op.num_heads, kept.num_kv_heads, kept.head_dim,
                                       kept.value_width(), pool_->threads()});
}

void Plan::execute_store_kv(const Op& op) {
  StoreKVArgs args{};
  args.qkv = data(op.in);
  args.qkv_stride = size_t(buffers_[size_t(op.in)].width);
  args.num_tokens = step_.num_tokens;
  args.num_heads = op.num_heads;
  if (op.angles >= 0) {
    args.angles = data(op.angles);
    args.rotary_dim = buffers_[size_t(op.angles)].width;
    args.angles_stride = size_t(args.rotary_dim);
  }
  if (op.layer >= 0) args.kv = kv_->layer(op.layer);
  else args.kv.head_dim = buffers_[size_t(op.in)].width / op.num_heads;  // of no heads: queries alone
  args.q_norm = head_norm(op.norm, args.kv.head_dim);
  args.k_norm = head_norm(op.k_norm, args.kv.head_dim);
  args.v_norm = head_norm(op.v_norm, args.kv.head_dim);
  args.block = token_block_.data();
  args.offset = token_offset_.data();
  args.q = data(op.out);
  args.q_stride = size_t(buffers_[size_t(op.out)].width);
  kernels_.store_kv(args, *pool_);
}

void Plan::execute_attention(const Op& op) {
  AttentionArgs args{};
  args.q = data(op.in);
  args.q_stride = size_t(buffers_[size_t(op.in)].width);
  args.out = data(op.out);
  args.out_stride = size_t(buffers_[size_t(op.out)].width);
  args.kv = kv_->layer(op.layer);
  args.num_heads = op.num_heads;
  const StepInput& step = step_of(op.in);
  args.num_seqs = step.num_seqs;
  args.cu_q = step.cu_q;
  args.kv_len = step.kv_len;
  args.slots = step.slots;
  args.block_table = step.block_table;
  args.block_table_stride = size_t(step.blocks_per_slot);
  const SharedPrefixes& prefixes = step.num_seqs < step_.num_seqs ? tail_prefixes_ : prefixes_;
  args.order = prefixes.order();
  args.shared = prefixes.shared();
  args.scale = op.attention.scale;
  args.window = op.attention.window;
  args.chunk = op.attention.chunk;
  args.ahead = op.attention.ahead;
  args.cap = op.attention.cap;
  args.slopes = op.attention.slopes.empty() ? nullptr : op.attention.slopes.data();
  args.sinks = op.attention.sinks.empty() ? nullptr : op.attention.sinks.data();
  args.bias = op.attention.bias.empty() ? nullptr : op.attention.bias.data();
  args.reach = int(op.attention.bias.size() / size_t(op.num_heads) / 2);
  if (op.other >= 0) {
    args.added = data(op.other);
    args.added_positions = size_t(buffers_[size_t(op.other)].width / op.num_heads);
  }
  args.workspace = workspace_.data();
  if (op.residual >= 0 || op.sparse.further >= 0) return attend_to_views(op, args, step);
  kernels_.attention(args, *pool_);
}

void Plan::execute_store_latent(const Op& op) {
  const KVView& kv = kv_->layer(op.layer);
  const int rotary_dim = kv.head_dim - kv.value_dim;
  kernels_.store_latent({op.in < 0 ? nullptr : data(op.in), data(op.residual), data(op.other), step_.num_tokens, op.num_heads, rotary_dim,
                         data(op.angles), op.norm.view(), kv, token_block_.data(),
                         token_offset_.data(), data(op.out)},
                        *pool_);
}

}  // namespace quire
