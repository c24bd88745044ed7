// Rows of the tails are numbered from 0, sequence by sequence.
#include "plan/tails.h"

#include <algorithm>

#include "plan/plan.h"

namespace quire {

StepInput Tails::find(const StepInput& in) {
  const size_t seqs = size_t(in.num_seqs);
  auto sequence_of = [&](int32_t row) {
    return size_t(std::upper_bound(in.cu_q, in.cu_q + seqs + 1, row) - in.cu_q - 1);
  };
  first_.assign(in.cu_q + 1, in.cu_q + seqs + 1);
  for (int i = 0; i < in.num_logit_rows; ++i) {
    int32_t& first = first_[sequence_of(in.logit_rows[i])];
    first = std::min(first, in.logit_rows[i]);
  }
  row_.resize(seqs);
  cu_q_.assign(1, 0);
  kv_len_.clear(), slots_.clear(), token_.clear(), logit_rows_.clear();
  for (size_t b = 0; b < seqs; ++b) {
    row_[b] = cu_q_.back();
    if (first_[b] == in.cu_q[b + 1]) continue;
    cu_q_.push_back(cu_q_.back() + in.cu_q[b + 1] - first_[b]);
    kv_len_.push_back(in.kv_len[b]);
    slots_.push_back(in.slots[b]);
    token_.push_back(first_[b]);
  }
  for (int i = 0; i < in.num_logit_rows; ++i) {
    const size_t b = sequence_of(in.logit_rows[i]);
    logit_rows_.push_back(row_[b] + in.logit_rows[i] - first_[b]);
  }
  StepInput tails = in;
  tails.tokens = tails.positions = nullptr;
  tails.cu_q = cu_q_.data(), tails.kv_len = kv_len_.data(), tails.slots = slots_.data();
  tails.logit_rows = logit_rows_.data();
  tails.num_tokens = cu_q_.back(), tails.num_seqs = int(kv_len_.size());
  return tails;
}

}  // namespace quire
