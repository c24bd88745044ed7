#include "plan/adapters.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "plan/plan.h"

namespace quire {

size_t AdapterChange::nbytes() const {
  size_t bytes = (lookup.size() + gain.size() + shift.size() + bias.size()) * sizeof(float);
  if (down) bytes += down->view().nbytes();
  if (weight) bytes += weight->view().nbytes();
  for (const AdapterUp& up : ups) bytes += up.weight->view().nbytes();
  return bytes;
}

void Adapters::set(int slot, std::shared_ptr<const AdapterChanges> changes) {
  if (slot < 0 || size_t(slot) >= slots_.size())
    throw std::invalid_argument("adapter slot " + std::to_string(slot) + " is outside 0.." +
                                std::to_string(int(slots_.size()) - 1));
  slots_[size_t(slot)] = std::move(changes);
}

void Adapters::begin(const StepInput& in, const Tails& tails) {
  active_ = false;
  if (!in.adapters) return;
  for (int b = 0; b < in.num_seqs; ++b) {
    const int32_t slot = in.adapters[b];
    if (slot < 0) continue;
    if (size_t(slot) >= slots_.size() || !slots_[size_t(slot)])
      throw std::invalid_argument("there is no adapter in slot " + std::to_string(slot));
    active_ = true;
  }
  if (!active_) return;
  auto& [tokens, tail_rows, logit_rows] = slot_of_;
  tokens.resize(size_t(in.num_tokens));
  for (int b = 0; b < in.num_seqs; ++b)
    std::fill(tokens.begin() + in.cu_q[b], tokens.begin() + in.cu_q[b + 1], in.adapters[b]);
  tail_rows.clear();
  tails.for_each([&](int, int token, int rows) { tail_rows.insert(tail_rows.end(), size_t(rows), tokens[size_t(token)]); });
  logit_rows.clear();
  for (int i = 0; i < in.num_logit_rows; ++i) logit_rows.push_back(tokens[size_t(in.logit_rows[i])]);
  for (size_t kind = 0; kind < 3; ++kind) runs_[kind] = runs(slot_of_[kind]);
}

std::vector<AdapterRows> Adapters::runs(const std::vector<int32_t>& slots) {
  std::vector<AdapterRows> found;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0) continue;
    if (i > 0 && slots[i] == slots[i - 1]) ++found.back().count;
    else found.push_back({slots[i], int(i), 1});
  }
  return found;
}

std::vector<ChangedRows> Adapters::found(AdapterPlace place, const std::vector<AdapterRows>& runs) const {
  std::vector<ChangedRows> changed;
  for (const AdapterRows& rows : runs) {
    const AdapterChanges& changes = *slots_[size_t(rows.slot)];
    if (const auto at = changes.find(place); at != changes.end()) changed.push_back({rows, &at->second});
  }
  return changed;
}

std::vector<ChangedRows> Adapters::changes(AdapterPlace place, RowKind kind, int head_start, int head_rows) const {
  if (kind != RowKind::head_rows) return found(place, runs_[size_t(kind)]);
  std::vector<AdapterRows> own;
  for (const AdapterRows& rows : runs_[size_t(RowKind::logit_rows)]) {
    const int first = std::max(rows.first, head_start);
    const int last = std::min(rows.first + rows.count, head_start + head_rows);
    if (first < last) own.push_back({rows.slot, first - head_start, last - first});
  }
  return found(place, own);
}

}  // namespace quire
