// The adapters of a plan, by slot, and the rows of a step that each of them changes. Knows weights and rows; no op.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "linear/matrix.h"
#include "plan/tails.h"

namespace quire {

enum class RowKind : int;
struct NormParams;

// Rows [start, start + O') of the outputs get h[first ..] times weight [O', r], where h = x down'.
struct AdapterUp {
  std::shared_ptr<PackedMatrix> weight;
  int first, start;
};

// What an adapter changes in one product, embedding or norm (Change in devices/adapters.py).
struct AdapterChange {
  std::shared_ptr<PackedMatrix> down;    // [R, K], or null
  std::vector<float> lookup;             // of an embedding, in place of down: [V, R]
  int rank = 0;                          // R
  std::vector<AdapterUp> ups;
  std::vector<float> gain, shift;        // [O] in source order, or empty
  std::shared_ptr<PackedMatrix> weight;  // in place of the base's, or null
  std::vector<float> bias;               // in place of the base's, padded to whole panels; no activation; or empty
  std::shared_ptr<NormParams> norm;      // in place of the base's, or null

  size_t nbytes() const;
};

// The op that makes a buffer, and which of its weights: 0, or of experts 2 e for `up` of expert e and 2 e + 1 for `down`.
using AdapterPlace = std::pair<int, int>;
using AdapterChanges = std::map<AdapterPlace, AdapterChange>;

// Neighbouring rows that one adapter changes.
struct AdapterRows {
  int slot, first, count;
};

struct ChangedRows : AdapterRows {
  const AdapterChange* change;
};

class Adapters {
 public:
  explicit Adapters(int slots) : slots_(size_t(slots)) {}

  // The changes of the adapter in a slot from now on; null: none.
  void set(int slot, std::shared_ptr<const AdapterChanges> changes);

  // Takes in a valid step. Throws std::invalid_argument if it names a slot without an adapter.
  void begin(const StepInput& input, const Tails& tails);
  // Whether the step has rows with adapters.
  bool active() const { return active_; }

  // The rows of a kind that change at a place; head rows are those [start, start + count) of the logit rows.
  std::vector<ChangedRows> changes(AdapterPlace place, RowKind kind, int head_start, int head_rows) const;
  // The same for rows gathered from those of a kind: row i is row `of(i)` there.
  template <class Of>
  std::vector<ChangedRows> changes_of(AdapterPlace place, RowKind kind, int count, Of&& of) const {
    std::vector<int32_t> slots(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) slots[size_t(i)] = slot_of_[size_t(kind)][size_t(of(i))];
    return found(place, runs(slots));
  }

 private:
  static std::vector<AdapterRows> runs(const std::vector<int32_t>& slots);
  std::vector<ChangedRows> found(AdapterPlace place, const std::vector<AdapterRows>& runs) const;

  std::vector<std::shared_ptr<const AdapterChanges>> slots_;
  bool active_ = false;
  std::vector<int32_t> slot_of_[3];     // by kind: tokens, tails, logit rows
  std::vector<AdapterRows> runs_[3];
};

}  // namespace quire
