// The tails of a step: each sequence's tokens from its first logit row on. A value that is neither stored nor read by a
// token outside the tails need not be computed outside them: after a decoder's last keys and values, most of a prompt.
// Knows a step's shape; knows no op.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

struct StepInput;

class Tails {
 public:
  // The tails of a step with valid cu_q and logit_rows, as a step of its own: sequences without a tail are left out;
  // tokens and positions are not set. Valid until the next call.
  StepInput find(const StepInput& in);

  // Calls f(first row of the tail, its token, rows) for each tail, in ascending order.
  template <class F>
  void for_each(F&& f) const {
    for (size_t i = 0; i < token_.size(); ++i) f(cu_q_[i], token_[i], cu_q_[i + 1] - cu_q_[i]);
  }

 private:
  std::vector<int32_t> first_;  // by sequence of the step: its first logit row, or its end
  std::vector<int32_t> row_;    // by sequence of the step: the row of the tails where its own begins
  std::vector<int32_t> cu_q_{0}, kv_len_, slots_, token_, logit_rows_;
};

}  // namespace quire
