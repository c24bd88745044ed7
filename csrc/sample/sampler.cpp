// The stages and the choice of a token, by slot. Knows no Python.
#include "sample/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "sample/sampler_select.h"

namespace quire {

namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr int kWeightBits = 34;
constexpr size_t kSlack = 16;  // keep_range stores whole vectors

double weight_unit(int vocab_size) {
  int bits = 0;
  while ((int64_t{1} << bits) < vocab_size) ++bits;
  return std::ldexp(1.0, std::min(kWeightBits, 53 - bits));
}

// The smallest float x with (x - max) * inv_t >= low, by bisection: the left side never decreases as x grows.
float least_kept(float max, float inv_t, float low) {
  auto from_key = [](int64_t key) {
    const int32_t bits = key >= 0 ? int32_t(key) : int32_t(INT32_MIN - key);
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  };
  auto to_key = [](float f) {
    int32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits >= 0 ? int64_t(bits) : int64_t(INT32_MIN) - int64_t(bits);
  };
  int64_t out = to_key(kMinusInf), in = to_key(max);  // fails; holds
  while (in - out > 1) {
    const int64_t middle = out + (in - out) / 2;
    ((from_key(middle) - max) * inv_t >= low ? in : out) = middle;
  }
  return from_key(in);
}

// Forbids the tokens whose bit is 0.
void forbid(float* x, const uint32_t* mask, int vocab_size) {
  for (int word = 0; word * 32 < vocab_size; ++word) {
    uint32_t forbidden = ~mask[word];
    if (vocab_size - word * 32 < 32) forbidden &= (1u << (vocab_size - word * 32)) - 1u;
    for (; forbidden != 0; forbidden &= forbidden - 1) x[word * 32 + __builtin_ctz(forbidden)] = kMinusInf;
  }
}

void check_token(int32_t token, int vocab_size) {
  if (token < 0 || token >= vocab_size)
    throw std::invalid_argument("token " + std::to_string(token) + " is outside the vocabulary of " +
                                std::to_string(vocab_size));
}

// The token before the last one; -1 for a word of one token.
int32_t before_last(const std::vector<int32_t>& word) { return word.size() < 2 ? -1 : word[word.size() - 2]; }

}  // namespace

SlotRules::SlotRules(int vocab_size, std::vector<int32_t> stops, const std::vector<int32_t>& allowed_tokens,
                     Words words, std::vector<std::pair<int32_t, float>> biases)
    : stop_ids(std::move(stops)), bad_words(std::move(words)), bias(std::move(biases)) {
  for (const int32_t token : stop_ids) check_token(token, vocab_size);
  for (const int32_t token : allowed_tokens) check_token(token, vocab_size);
  for (const auto& [token, value] : bias) check_token(token, vocab_size);
  for (const std::vector<int32_t>& word : bad_words) {
    if (word.empty()) throw std::invalid_argument("a bad word has no tokens");
    for (const int32_t token : word) check_token(token, vocab_size);
  }
  std::sort(bad_words.begin(), bad_words.end(),
            [](const auto& a, const auto& b) { return before_last(a) < before_last(b); });
  if (!allowed_tokens.empty()) allowed.assign((size_t(vocab_size) + 31) / 32, 0);
  for (const int32_t token : allowed_tokens) allowed[size_t(token) / 32] |= 1u << (token % 32);
}

PromptTokens::PromptTokens(int vocab_size, std::vector<int32_t> prompt, bool penalised) : size(int64_t(prompt.size())) {
  for (const int32_t token : prompt) check_token(token, vocab_size);
  if (!penalised) return;
  distinct = std::move(prompt);
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
}

void SlotRules::forbid_words(float* x, const std::vector<int32_t>& output) const {
  auto word = bad_words.begin();
  for (; word != bad_words.end() && word->size() == 1; ++word) x[word->back()] = kMinusInf;
  if (output.empty() || word == bad_words.end()) return;
  const int32_t last = output.back();
  word = std::lower_bound(word, bad_words.end(), last, [](const auto& a, int32_t t) { return before_last(a) < t; });
  for (; word != bad_words.end() && before_last(*word) == last; ++word) {
    const size_t head = word->size() - 1;
    if (head <= output.size() && std::equal(word->begin(), word->end() - 1, output.end() - ptrdiff_t(head)))
      x[word->back()] = kMinusInf;
  }
}

Sampler::Sampler(ThreadPool& pool, const SamplerKernels& kernels, int vocab_size)
    : pool_(pool), kernels_(kernels), vocab_size_(vocab_size), scratch_(size_t(pool.threads())) {
  if (vocab_size < 1) throw std::invalid_argument("a vocabulary has at least one token");
}

void Sampler::check_id(int32_t token) const { check_token(token, vocab_size_); }

void Sampler::Slot::count(int32_t token) {
  const auto [at, fresh] = index.try_emplace(token, counted.size());
  if (fresh) counted.push_back({token, 0});
  ++counted[at->second].times;
}

void Sampler::Slot::append(int32_t token) {
  params.output.push_back(token);
  if (params.penalises()) count(token);
}

void Sampler::Slot::take_back() {
  const int32_t token = params.output.back();
  params.output.pop_back();
  if (!params.penalises()) return;
  const size_t at = index.at(token);
  if (--counted[at].times > 0) return;
  index.erase(token);
  if (at + 1 != counted.size()) {
    counted[at] = counted.back();
    index[counted[at].token] = at;
  }
  counted.pop_back();
}

void Sampler::set(int slot, SlotParams params) {
  if (!params.rules || !params.prompt) throw std::invalid_argument("a slot needs rules and a prompt");
  for (const int32_t token : params.output) check_id(token);
  Slot state;
  state.params = std::move(params);
  if (state.params.penalises())
    for (const int32_t token : state.params.output) state.count(token);
  slots_[slot] = std::move(state);
}

void Sampler::extend(int slot, const std::vector<int32_t>& tokens) {
  const auto found = slots_.find(slot);
  if (found == slots_.end()) throw std::invalid_argument("slot " + std::to_string(slot) + " was never set");
  for (const int32_t token : tokens) check_id(token);
  for (const int32_t token : tokens) found->second.append(token);
}

void Sampler::retract(int slot, size_t count) {
  const auto found = slots_.find(slot);
  if (found == slots_.end() || found->second.params.output.size() < count)
    throw std::invalid_argument("slot " + std::to_string(slot) + " does not have " + std::to_string(count) + " tokens");
  for (; count > 0; --count) found->second.take_back();
}

bool Sampler::edits(const Slot& slot, const uint32_t* mask) const {
  const SlotParams& p = slot.params;
  const SlotRules& rules = *p.rules;
  return mask || p.penalises() || !rules.allowed.empty() || !rules.bad_words.empty() || !rules.bias.empty() ||
         (int64_t(p.output.size()) < p.min_tokens && !rules.stop_ids.empty());
}

// The order of devices/reference/logits.py's STAGES.
void Sampler::apply_stages(float* x, const Slot& slot, const uint32_t* mask) const {
  const SlotParams& p = slot.params;
  const SlotRules& rules = *p.rules;
  if (!rules.allowed.empty()) forbid(x, rules.allowed.data(), vocab_size_);
  if (mask) forbid(x, mask, vocab_size_);
  rules.forbid_words(x, p.output);
  if (int64_t(p.output.size()) < p.min_tokens)
    for (const int32_t token : rules.stop_ids) x[token] = kMinusInf;
  for (const auto& [token, value] : rules.bias) x[token] += value;
  if (!p.penalises()) return;
  auto repeated = [&p](float v) { return v > 0 ? v / p.repetition_penalty : v * p.repetition_penalty; };
  const bool repeats = p.repetition_penalty != 1.0f;
  if (repeats)
    for (const int32_t token : p.prompt->distinct) x[token] = repeated(x[token]);
  for (const Counted& c : slot.counted) {
    float& v = x[c.token];
    if (repeats && !p.prompt->has(c.token)) v = repeated(v);
    v = (v - p.frequency_penalty * float(c.times)) - p.presence_penalty;
  }
}

void Sampler::make_room(Scratch& scratch) const {
  const size_t room = size_t(vocab_size_) + kSlack;
  if (scratch.a.size() < room) scratch.a.resize(room), scratch.b.resize(room);
}

Cut Sampler::largest(const float* x, int count, Scratch& scratch) const {
  make_room(scratch);
  const Selected best =
      select_largest(kernels_, x, size_t(vocab_size_), count, scratch.a.data(), scratch.b.data());
  return {best.value, id_of_nth(x, vocab_size_, best.value, best.ties)};
}

Cut Sampler::truncate(const float* x, float max, const SlotParams& p, Scratch& scratch) const {
  const Cut likely{least_kept(max, float(1.0 / p.temperature), p.low_scaled), vocab_size_};
  if (p.top_k == 0 || p.top_k >= vocab_size_) return likely;
  const Cut top = largest(x, p.top_k, scratch);
  return top.value >= likely.value ? top : likely;
}

// Whether the better tokens weigh less than their share of the kept ones. A rough sum usually decides.
bool Sampler::is_nucleus(const WeighArgs& args, double share) const {
  if (args.kept.last_id >= vocab_size_) {
    const RoughWeights w = kernels_.weigh_roughly(args);
    if (w.not_below * (1 + kRough) < share * w.kept * (1 - kRough)) return true;
    if (w.above * (1 - kRough) >= share * w.kept * (1 + kRough)) return false;
  }
  const Weights w = kernels_.weigh(args);
  return w.better < share * w.kept;
}

// The nucleus is a prefix of the tokens, best first: a token is in it if those before it weigh less than its share. So
// sample first, from all that min_p and top_k left. If that token is in the nucleus, it wins there too; if not, the
// nucleus consists of better tokens, and those race again. A few rounds suffice, and nothing is sorted.
int Sampler::draw(const float* x, float max, int argmax, const Slot& slot, Scratch& scratch) const {
  const SlotParams& p = slot.params;
  const Cut kept = truncate(x, max, p, scratch);
  Cut cut = kept;
  for (;;) {
    const int token = kernels_.draw({x, vocab_size_, max, argmax, 1.0 / p.temperature, cut, p.seed,
                                     uint64_t(slot.position())});
    if (p.top_p >= 1.0 || token == argmax) return token;
    cut = {x[token], token - 1};
    if (is_nucleus({x, vocab_size_, max, float(1.0 / p.temperature), weight_unit(vocab_size_), kept, cut}, p.top_p))
      return token;
  }
}

Logprobs Sampler::score(const float* x, float max, int32_t token, int num_top, Scratch& scratch) const {
  Logprobs result;
  const double log_sum = std::log(kernels_.exp_sum(x, vocab_size_, max));
  auto logprob = [&](int id) { return (double(x[id]) - double(max)) - log_sum; };
  result.token = token;
  result.logprob = logprob(token);
  result.rank = 1 + kernels_.count_above(x, vocab_size_, x[token]);
  if (num_top == 0) return result;
  Cut cut{kMinusInf, vocab_size_};
  if (num_top < vocab_size_) cut = largest(x, num_top, scratch);
  scratch.ids.resize(std::max(scratch.ids.size(), size_t(num_top) + kSlack));
  kernels_.collect(x, vocab_size_, cut, num_top, scratch.ids.data());
  result.top_ids.assign(scratch.ids.begin(), scratch.ids.begin() + num_top);
  std::stable_sort(result.top_ids.begin(), result.top_ids.end(), [x](int i, int j) { return x[i] > x[j]; });
  result.top.reserve(size_t(num_top));
  for (const int id : result.top_ids) result.top.push_back(logprob(id));
  return result;
}

RowResult Sampler::sample_row(const float* raw, RowMax raw_max, const uint32_t* mask, Slot& slot,
                              Scratch& scratch) const {
  const SlotParams& p = slot.params;
  RowResult result;
  RowMax max = raw_max;
  const float* x = raw;
  if (raw_max.sound && edits(slot, mask)) {
    scratch.row.resize(size_t(vocab_size_));
    std::memcpy(scratch.row.data(), raw, size_t(vocab_size_) * sizeof(float));
    apply_stages(scratch.row.data(), slot, mask);
    x = scratch.row.data();
    max = kernels_.row_max(x, vocab_size_);
  }
  if (!max.sound || max.value == kMinusInf) {
    result.fault = max.sound ? RowResult::Fault::nothing_allowed : RowResult::Fault::unsound;
    return result;
  }
  int argmax = max.block;
  while (x[argmax] != max.value) ++argmax;
  result.token = p.greedy ? argmax : draw(x, max.value, argmax, slot, scratch);
  if (p.wants_logprobs) {
    result.has_logprobs = true;
    result.logprobs = score(raw, raw_max.value, result.token, p.num_top, scratch);
  }
  slot.append(result.token);
  return result;
}

std::vector<RowResult> Sampler::sample(const SampleRows& r) {
  std::vector<int> starts;  // first row of each slot's run
  std::vector<Slot*> slots;
  for (int i = 0; i < r.rows; ++i) {
    const bool fresh = i == 0 || r.slots[i] != r.slots[i - 1];
    if (fresh) {
      const auto found = slots_.find(r.slots[i]);
      if (found == slots_.end())
        throw std::invalid_argument("slot " + std::to_string(r.slots[i]) + " was never set");
      starts.push_back(i);
      slots.push_back(&found->second);
    }
    const int64_t due = slots.back()->position() + (i - starts.back());
    if (r.positions[i] != due)
      throw std::invalid_argument("slot " + std::to_string(r.slots[i]) + " is at position " + std::to_string(due) +
                                  ", not " + std::to_string(r.positions[i]));
  }
  std::vector<Slot*> sorted = slots;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    throw std::invalid_argument("rows of one slot must be adjacent");
  if (!r.drafts && int(starts.size()) != r.rows)
    throw std::invalid_argument("several rows of one slot need drafts");
  std::vector<RowResult> results(static_cast<size_t>(r.rows));
  const size_t words = (size_t(vocab_size_) + 31) / 32;
  pool_.parallel_for(int(starts.size()), [&](int task, int thread) {
    const int stop = size_t(task) + 1 < starts.size() ? starts[size_t(task) + 1] : r.rows;
    for (int i = starts[size_t(task)]; i < stop; ++i) {
      const uint32_t* mask = r.masks ? r.masks + size_t(i) * words : nullptr;
      const float* x = r.x + size_t(i) * r.stride;
      const int best = r.best ? r.best[i] : -1;
      const RowMax max = best >= 0 ? RowMax{x[best], best, true} : kernels_.row_max(x, vocab_size_);
      RowResult& result = results[size_t(i)];
      result = sample_row(x, max, mask, *slots[size_t(task)], scratch_[size_t(thread)]);
      if (!r.drafts || result.token < 0 || result.token != r.drafts[i]) break;  // later rows had another token
    }
  });
  return results;
}

std::vector<Logprobs> Sampler::logprobs(const float* x, size_t stride, int rows, const int32_t* targets, int num_top) {
  std::vector<Logprobs> results(static_cast<size_t>(rows));
  pool_.parallel_for(rows, [&](int row, int thread) {
    const float* logits = x + size_t(row) * stride;
    const RowMax max = kernels_.row_max(logits, vocab_size_);
    Logprobs& result = results[size_t(row)];
    if (max.sound) {
      result = score(logits, max.value, targets[row], num_top, scratch_[size_t(thread)]);
    } else {
      result.token = targets[row];
      result.logprob = std::numeric_limits<double>::quiet_NaN();
    }
  });
  return results;
}

}  // namespace quire
