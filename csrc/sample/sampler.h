// Sampling by slot: penalties, masks, truncation, choice and log-probabilities of many rows at once. Knows no Python.
//
// devices/reference/logits.py and sampler.py define the results; this code repeats them bit for bit. A row's result
// depends only on that row and its slot.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sample/sampler_select.h"
#include "sample/sampler_table.h"
#include "plan/thread_pool.h"

namespace quire {

// The lists that a request brings, in the form in which rows are edited. Its slots share them.
class SlotRules {
 public:
  using Words = std::vector<std::vector<int32_t>>;

  // Throws std::invalid_argument if a token id is outside the vocabulary, or a bad word is empty. `allowed` empty: all.
  SlotRules(int vocab_size, std::vector<int32_t> stop_ids, const std::vector<int32_t>& allowed, Words bad_words,
            std::vector<std::pair<int32_t, float>> bias);

  std::vector<int32_t> stop_ids;
  std::vector<uint32_t> allowed;  // bits as in SampleRows.masks; empty: all
  Words bad_words;                // those of one token first, others by their last token but one
  std::vector<std::pair<int32_t, float>> bias;

  // Forbids the last tokens of the bad words that `output` has begun.
  void forbid_words(float* x, const std::vector<int32_t>& output) const;
};

// A prompt, which slots share. Penalties need its distinct tokens.
struct PromptTokens {
  // Throws std::invalid_argument if a token id is outside the vocabulary.
  PromptTokens(int vocab_size, std::vector<int32_t> prompt, bool penalised);

  int64_t size;
  std::vector<int32_t> distinct;  // ascending; empty unless penalised

  bool has(int32_t token) const { return std::binary_search(distinct.begin(), distinct.end(), token); }
};

// See SlotSampling and SamplingParams. Token ids are below the vocabulary size.
struct SlotParams {
  uint64_t seed = 0;
  bool greedy = false;
  double temperature = 1.0;
  int top_k = 0;  // 0: all
  double top_p = 1.0;
  float low_scaled = -3.402823466e38f;  // smallest scaled logit that min_p keeps
  float repetition_penalty = 1.0f, frequency_penalty = 0.0f, presence_penalty = 0.0f;
  int64_t min_tokens = 0;
  bool wants_logprobs = false;
  int num_top = 0;
  std::vector<int32_t> output;
  std::shared_ptr<SlotRules> rules;
  std::shared_ptr<PromptTokens> prompt;

  bool penalises() const {
    return repetition_penalty != 1.0f || frequency_penalty != 0.0f || presence_penalty != 0.0f;
  }
};

struct Logprobs {
  int32_t token = -1;
  double logprob = 0;
  int rank = 0;  // 0: the row had NaN or +inf
  std::vector<int32_t> top_ids;
  std::vector<double> top;
};

struct RowResult {
  enum class Fault : uint8_t { none, unsound, nothing_allowed };
  int32_t token = -1;
  Fault fault = Fault::none;
  bool has_logprobs = false;
  Logprobs logprobs;
};

// Rows of logits: row i starts at x + i * stride. Masks: bit token % 32 of word token / 32, 0 forbids; or null.
struct SampleRows {
  const float* x;
  size_t stride;
  int rows;
  const int32_t* slots;
  const int64_t* positions;
  const int32_t* drafts;  // or null: one row per slot
  const uint32_t* masks;
  const int32_t* best;  // or null: the first of each row's largest values, -1: not known
};

class Sampler {
 public:
  Sampler(ThreadPool& pool, const SamplerKernels& kernels, int vocab_size);

  int vocab_size() const { return vocab_size_; }

  // Throws std::invalid_argument if a token id is outside the vocabulary.
  void set(int slot, SlotParams params);
  void clear(int slot) { slots_.erase(slot); }
  // Appends tokens that were not sampled. Throws std::invalid_argument as `set` does, or for an unknown slot.
  void extend(int slot, const std::vector<int32_t>& tokens);
  // Takes the last `count` tokens of a slot's output back. Throws std::invalid_argument where it has fewer.
  void retract(int slot, size_t count);

  // Samples and appends. Rows of one slot are adjacent. Throws std::invalid_argument, before sampling anything, if a
  // slot is unknown or a position is not the slot's next.
  std::vector<RowResult> sample(const SampleRows& rows);
  std::vector<Logprobs> logprobs(const float* x, size_t stride, int rows, const int32_t* targets, int num_top);

 private:
  struct Counted {
    int32_t token;
    int32_t times;
  };
  struct Slot {
    SlotParams params;
    std::vector<Counted> counted;  // distinct tokens of the output, if a penalty needs them
    std::unordered_map<int32_t, size_t> index;

    void count(int32_t token);
    void append(int32_t token);
    void take_back();
    int64_t position() const { return params.prompt->size + int64_t(params.output.size()); }
  };
  struct Scratch {
    std::vector<float> row, a, b;
    std::vector<int> ids;
  };

  void check_id(int32_t token) const;
  bool edits(const Slot& slot, const uint32_t* mask) const;
  void apply_stages(float* x, const Slot& slot, const uint32_t* mask) const;
  void make_room(Scratch& scratch) const;
  Cut largest(const float* x, int count, Scratch& scratch) const;
  RowResult sample_row(const float* x, RowMax x_max, const uint32_t* mask, Slot& slot, Scratch& scratch) const;
  bool is_nucleus(const WeighArgs& args, double share) const;
  Cut truncate(const float* x, float max, const SlotParams& params, Scratch& scratch) const;  // min_p and top_k
  int draw(const float* x, float max, int argmax, const Slot& slot, Scratch& scratch) const;
  Logprobs score(const float* x, float max, int32_t token, int num_top, Scratch& scratch) const;

  ThreadPool& pool_;
  const SamplerKernels& kernels_;
  int vocab_size_;
  std::unordered_map<int, Slot> slots_;
  std::vector<Scratch> scratch_;  // by thread
};

}  // namespace quire
