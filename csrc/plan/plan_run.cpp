// Runs a plan: checks a step, then calls the kernels in order. Knows ops and buffers; plan.cpp laid them out.
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "plan/plan.h"

namespace quire {

namespace {

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

// A screen that leaves too many candidates will probably do so again: this many products skip it.
constexpr int kScreenRest = 64;

void check_range(const int32_t* values, int count, int bound, const char* what) {
  for (int i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= bound)
      refuse(std::string(what) + " " + std::to_string(values[i]) + " is outside 0.." + std::to_string(bound - 1));
}

}  // namespace

void Plan::check(const StepInput& in) const {
  require(kv_ != nullptr, "the plan is not bound to a KV cache");
  if (in.num_tokens > limits_.max_tokens || in.num_seqs > limits_.max_seqs)
    refuse("a step of " + std::to_string(in.num_tokens) + " tokens and " + std::to_string(in.num_seqs) +
           " sequences is over its limits of " + std::to_string(limits_.max_tokens) + " and " +
           std::to_string(limits_.max_seqs));
  require(logits_ >= 0 || in.num_logit_rows == 0, "this stage has no head: a step cannot ask it for logits");
  if (in.hidden_width != received_width_)
    refuse("the step brings hidden states of width " + std::to_string(in.hidden_width) + ", the plan takes " +
           std::to_string(received_width_));
  if (in.num_logit_rows > limits_.max_tokens) refuse("a step asks for more rows of logits than it may have tokens");
  require(in.cu_q[0] == 0 && in.cu_q[in.num_seqs] == in.num_tokens,
          "cu_q must rise from 0 to the number of tokens, by at least one token a sequence");
  for (int b = 0; b < in.num_seqs; ++b)
    require(in.cu_q[b] < in.cu_q[b + 1],
            "cu_q must rise from 0 to the number of tokens, by at least one token a sequence");
  if (vocab_rows_ > 0) check_range(in.tokens, in.num_tokens, vocab_rows_, "token id");
  if (position_rows_ > 0) check_range(in.positions, in.num_tokens, position_rows_, "position");
  check_range(in.logit_rows, in.num_logit_rows, in.num_tokens, "logit row");
  check_range(in.slots, in.num_seqs, in.num_slots, "slot");
  for (int b = 0; b < in.num_seqs; ++b) check_sequence(in, b);
  check_states(in);
}

void Plan::check_sequence(const StepInput& in, int b) const {
  const int first = in.cu_q[b], count = in.cu_q[b + 1] - first, length = in.kv_len[b];
  const int block_size = kv_->block_size();
  if (length < count) refuse("kv_len of sequence " + std::to_string(b) + " is less than its tokens in the step");
  for (int i = 0; i < count; ++i)
    if (in.positions[first + i] != length - count + i)
      refuse("positions of sequence " + std::to_string(b) + " must be consecutive and end at kv_len - 1");
  if (scored_positions_ > 0 && (length != count || length > scored_positions_))
    refuse("sequence " + std::to_string(b) + " is not whole, or longer than " + std::to_string(scored_positions_) +
           " tokens, whose distances this model scores");
  const int blocks = (length - 1) / block_size + 1;
  if (blocks > in.blocks_per_slot)
    refuse("the block table of sequence " + std::to_string(b) + " does not cover its " + std::to_string(length) +
           " tokens");
  const int32_t* table = in.block_table + size_t(in.slots[b]) * size_t(in.blocks_per_slot);
  check_range(table, blocks, kv_->num_blocks(), "block id");
}

void Plan::locate_tokens(const StepInput& in) {
  const int block_size = kv_->block_size();
  for (int b = 0; b < in.num_seqs; ++b) {
    const int32_t* table = in.block_table + size_t(in.slots[b]) * size_t(in.blocks_per_slot);
    for (int t = in.cu_q[b]; t < in.cu_q[b + 1]; ++t) {
      token_block_[size_t(t)] = table[in.positions[t] / block_size];
      token_offset_[size_t(t)] = in.positions[t] % block_size;
    }
  }
}

void Plan::run(const StepInput& input) {
  const std::lock_guard<std::mutex> lock(running_);
  check(input);
  step_ = input;
  num_logit_rows_ = input.num_logit_rows;
  greedy_ = input.greedy;
  locate_tokens(input);
  prefixes_.find(input.num_seqs, input.kv_len, input.slots, input.block_table, size_t(input.blocks_per_slot),
                 kv_->block_size());
  tail_step_ = tails_.find(input);
  adapters_.begin(input, tails_);
  if (tail_step_.num_seqs < input.num_seqs)
    tail_prefixes_.find(tail_step_.num_seqs, tail_step_.kv_len, tail_step_.slots, input.block_table,
                        size_t(input.blocks_per_slot), kv_->block_size());
  head_start_ = 0;
  head_rows_ = std::min(num_logit_rows_, limits_.max_logit_rows);
  execute(0, ops_.size());
  step_ = tail_step_ = {};  // the caller's arrays are invalid after this call
}

void Plan::head(int start, int stop) {
  const std::lock_guard<std::mutex> lock(running_);
  require(kv_ != nullptr && logits_ >= 0, "the plan is not bound to a KV cache, or has no head");
  if (start < 0 || start > stop || stop > num_logit_rows_)
    refuse("logit rows " + std::to_string(start) + ".." + std::to_string(stop) + " are not of the last run (" +
           std::to_string(num_logit_rows_) + " rows)");
  if (stop - start > limits_.max_logit_rows)
    refuse(std::to_string(stop - start) + " logit rows at once; the limit is " +
           std::to_string(limits_.max_logit_rows));
  head_start_ = start;
  head_rows_ = stop - start;
  execute(head_begin_, ops_.size());
}

float* Plan::data(int buffer) const {
  const Buffer& b = buffers_[size_t(buffer)];
  float* base = static_cast<float*>(arena_.data()) + buffers_[size_t(b.root)].offset;
  return buffer == head_input_ ? base + size_t(head_start_) * size_t(b.width) : base;
}

int Plan::rows_of(int buffer) const {
  switch (buffers_[size_t(buffer)].rows) {
    case RowKind::tokens:
      return step_.num_tokens;
    case RowKind::tails:
      return tail_step_.num_tokens;
    case RowKind::logit_rows:
      return num_logit_rows_;
    case RowKind::head_rows:
      break;
  }
  return head_rows_;
}

float* Plan::logits() const { return data(logits_); }
float* Plan::hidden() const { return data(hidden_); }
float* Plan::tapped(int buffer) const {
  if (std::find(taps_.begin(), taps_.end(), buffer) == taps_.end()) refuse("the tensor was not tapped");
  return data(buffer);
}

void Plan::poison() {
  std::fill_n(static_cast<float*>(arena_.data()), arena_floats_, std::numeric_limits<float>::quiet_NaN());
  std::memset(workspace_.data(), 0xff, workspace_bytes_);
}

void Plan::execute(size_t first, size_t last) {
  for (size_t i = first; i < last; ++i)
    if (rows_of(ops_[i].out) > 0) execute_op(ops_[i]);
}

void Plan::execute_op(const Op& op) {
  const int rows = rows_of(op.out);
  const size_t width = size_t(buffers_[size_t(op.out)].width);
  float* out = data(op.out);
  switch (op.kind) {
    case OpKind::embed:
      kernels_.embed({step_.tokens, rows, op.weight->view(), op.scale, out, width}, *pool_);
      if (adapters_.active()) adapt_embedding(op, out, width);
      return;
    case OpKind::norm: {
      const Norm* own = adapters_.active() ? row_norms(op, rows, buffers_[size_t(op.out)].rows) : nullptr;
      return kernels_.norm({data(op.in), width, rows, int(width), op.norm.view(), out, width, own, op.groups}, *pool_);
    }
    case OpKind::embed_positions:
      for (int t = 0; t < rows; ++t) table_rows_[size_t(t)] = step_.positions[t] + op.offset;
      return kernels_.embed({table_rows_.data(), rows, op.weight->view(), 1.0f, out, width}, *pool_);
    case OpKind::add:
      return kernels_.add({data(op.in), data(op.other), op.scale, out, size_t(rows), width}, *pool_);
    case OpKind::scale:
      return kernels_.scale({data(op.in), op.scale, op.cap, out, size_t(rows), width}, *pool_);
    case OpKind::multiply:
    case OpKind::elementwise:
      return execute_elementwise(op);
    case OpKind::mix:
      return execute_mix(op);
    case OpKind::match_rms:
      return execute_match_rms(op);
    case OpKind::compare_parts:
      return execute_compare_parts(op);
    case OpKind::relative_scores:
      return execute_relative_scores(op);
    case OpKind::store_latent:
      return execute_store_latent(op);
    case OpKind::head_linear:
      return execute_head_linear(op);
    case OpKind::all_reduce:
    case OpKind::all_gather:
      return execute_exchange(op);
    case OpKind::route:
      return execute_route(op);
    case OpKind::experts:
      return execute_experts(op);
    case OpKind::linear:
      return execute_linear(op);
    case OpKind::rope:
      return kernels_.rope(
          {step_.positions, rows, op.vector.data(), int(op.vector.size()), op.scale, out, width}, *pool_);
    case OpKind::store_kv:
      return execute_store_kv(op);
    case OpKind::store_keys:
      return execute_store_keys(op);
    case OpKind::choose:
      return execute_choose(op);
    case OpKind::attention:
      return execute_attention(op);
    case OpKind::tails:
      return execute_tails(op);
    case OpKind::select_rows:
      return execute_select_rows(op);
    case OpKind::convolve:
    case OpKind::scan:
    case OpKind::selective_scan:
    case OpKind::gated_recurrence:
    case OpKind::embed_ngrams:
      return execute_recurrent(op);
    case OpKind::receive:
      std::memcpy(out, step_.hidden, size_t(rows) * width * sizeof(float));
      return;
  }
}

// Works in place if both share memory: rows only move up.
void Plan::execute_tails(const Op& op) {
  const size_t width = size_t(buffers_[size_t(op.out)].width);
  const float* in = data(op.in);
  float* out = data(op.out);
  tails_.for_each([&](int row, int token, int rows) {
    if (in != out || row != token)
      std::memmove(out + size_t(row) * width, in + size_t(token) * width, size_t(rows) * width * sizeof(float));
  });
}

void Plan::execute_select_rows(const Op& op) {
  const size_t width = size_t(buffers_[size_t(op.out)].width);
  const float* in = data(op.in);
  float* out = data(op.out);
  for (int i = 0; i < num_logit_rows_; ++i)
    std::memcpy(out + size_t(i) * width, in + size_t(tail_step_.logit_rows[i]) * width, width * sizeof(float));
}

LinearArgs Plan::linear_args(const Op& op) const {
  LinearArgs args{};
  args.x = data(op.in);
  args.x_stride = size_t(buffers_[size_t(op.in)].width);
  args.rows = rows_of(op.out);
  args.norm = op.norm.view();
  args.weight = op.weight->view();
  args.bias = op.vector.empty() ? nullptr : op.vector.data();
  args.activation = op.activation;
  args.limit = op.limit;
  args.y = data(op.out);
  args.y_stride = size_t(buffers_[size_t(op.out)].width);
  args.residual = op.residual < 0 ? nullptr : data(op.residual);
  args.residual_stride = args.y_stride;
  args.workspace = workspace_.data();
  return args;
}

void Plan::execute_linear(const Op& op) {
  const LinearArgs args = linear_args(op);
  if (adapters_.active()) execute_adapted(op, args);
  else if (op.out == logits_ && !best_.empty()) find_best(args, true);
  else kernels_.linear(args, *pool_);
}

// The product that makes the logits, with the best of each row. `screened`: greedy steps may do without other logits.
void Plan::find_best(LinearArgs args, bool screened) {
  if (screened && greedy_ && args.weight.has_screen() && args.rows <= kernels_.screened_rows) {
    if (unscreened_ > 0) --unscreened_;
    else if (kernels_.screened_best(args, best_.data(), *pool_)) return;
    else unscreened_ = kScreenRest;
  }
  args.maxima = maxima_.data();
  kernels_.linear(args, *pool_);
  kernels_.best({args.y, args.y_stride, args.rows, args.weight.rows, args.maxima, best_.data()}, *pool_);
}

}  // namespace quire
