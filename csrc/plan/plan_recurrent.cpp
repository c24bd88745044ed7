// Ops of a plan that carry a state from token to token: recording, checks of a step's states, and running. Knows the rows of
// states in the cache.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "plan/plan.h"
#include "recurrent/tail.h"

namespace quire {

namespace {

constexpr size_t kMostNgram = 16;  // tokens that are hashed together

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

// A matrix [rows, columns] as panels of 16 columns (recurrent/channels.h).
std::vector<float> in_panels(const std::vector<float>& x, size_t rows, size_t columns) {
  std::vector<float> panels;
  for (size_t begin = 0; begin < columns; begin += 16)
    for (size_t r = 0; r < rows; ++r)
      for (size_t c = begin; c < std::min(begin + 16, columns); ++c) panels.push_back(x[r * columns + c]);
  return panels;
}

std::vector<float> transposed(const std::vector<float>& x, size_t rows, size_t columns) {
  std::vector<float> y(x.size());
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < columns; ++c) y[c * rows + r] = x[r * columns + c];
  return y;
}

}  // namespace

// `row` is the width of an open row, `state` the size of the state.
int Plan::add_recurrent(Op op, size_t row, size_t state, int64_t width) {
  const auto [layer, i] = op.place;
  for (const int* used : op.inputs())
    require(*used < 0 || checked(*used, "an input of a recurrence").rows == RowKind::tokens,
            "a recurrence needs one row per token");
  require(layer >= 0 && layer < int(layers_.size()) && i >= 0 && i < int(layers_[size_t(layer)].states.size()),
          "a recurrence has no place in the cache");
  require(layers_[size_t(layer)].states[size_t(i)] == StateSize{state, row}, "a recurrence keeps another state than its layer");
  recurrent_ = true;
  return add_op(std::move(op), width, RowKind::tokens);
}

int Plan::convolve(int x, const std::vector<float>& weight, std::vector<float> bias, Activation activation, int dilation,
                   StatePlace place) {
  const size_t channels = size_t(checked(x, "the input of convolve").width), taps = weight.size() / channels;
  require(taps > 0 && taps <= 64 && weight.size() == taps * channels, "convolve: the weight is not [channels, taps]");
  require(bias.empty() || bias.size() == channels, "convolve: the bias is not of the input's width");
  require(dilation > 0 && dilation <= 64, "convolve: the dilation must be from 1 to 64");
  Op op{.kind = OpKind::convolve, .in = x};
  op.vector = transposed(weight, channels, taps);
  op.scan.skip = std::move(bias);
  op.activation = activation;
  op.offset = dilation;
  op.place = place;
  return add_recurrent(std::move(op), channels, (taps - 1) * size_t(dilation) * channels, int64_t(channels));
}

int Plan::embed_ngrams(std::vector<std::shared_ptr<PackedMatrix>> tables, std::vector<int64_t> multipliers, int end,
                       StatePlace place) {
  const size_t orders = multipliers.size() - 1;
  require(!multipliers.empty() && multipliers.size() <= kMostNgram && orders > 0 && !tables.empty() &&
              tables.size() % orders == 0,
          "embed_ngrams: as many tables for each number of tokens, from 2 to " + std::to_string(kMostNgram));
  int64_t width = 0;
  for (const auto& table : tables) {
    const MatrixView& view = table->view();
    require(!view.gated && !view.format.inputs && !view.format.nonzeros, "embed_ngrams: a table is a plain weight");
    require(width == 0 || view.cols * int64_t(tables.size()) == width, "embed_ngrams: all tables are of one width");
    width = view.cols * int64_t(tables.size());
  }
  Op op{.kind = OpKind::embed_ngrams};
  op.weights = std::move(tables);
  op.multipliers = std::move(multipliers);
  op.offset = end;
  op.place = place;
  return add_recurrent(std::move(op), 1, orders, width);
}

// What both kinds of scan need; the width of keys.
static size_t check_scan(const ScanParams& p) {
  constexpr size_t kMost = ThreadPool::kScratchBytes / sizeof(float);
  require(p.key_heads > 0 && p.heads > 0 && p.heads % p.key_heads == 0 && p.rows > 0 && p.columns > 0,
          "a scan needs heads that divide evenly, and sizes of at least 1");
  require(size_t(p.rows) <= kMost / 256 && size_t(p.columns) <= kMost / 2 / size_t(p.rows), "a scan's state is too large");
  require(int(p.rates.size()) == p.heads && (p.skip.empty() || int(p.skip.size()) == p.heads), "a scan needs one rate a head");
  require(std::isfinite(p.bound) && p.least <= p.most, "a scan's bounds are not in order");
  return size_t(p.key_heads) * size_t(p.rows);
}

int Plan::delta_rule(int qkv, int steps, int beta, ScanParams params, StatePlace place) {
  const size_t keys = check_scan(params), heads = size_t(params.heads), values = heads * size_t(params.columns);
  const int width = checked(steps, "the steps of a delta rule").width;
  params.delta = true;
  params.by_channel = width != params.heads;
  require(!params.by_channel || width == int64_t(params.heads) * params.rows, "delta rule: one step a head, or a row of its state");
  require(checked(beta, "beta").width == params.heads, "delta rule: one beta a head");
  require(size_t(checked(qkv, "the input of a delta rule").width) == 2 * keys + values, "delta rule: the input is not q, k, v");
  Op op{.kind = OpKind::scan, .in = qkv, .angles = beta, .other = steps};
  const size_t state = values * size_t(params.rows);
  op.scan = std::move(params);
  op.place = place;
  return add_recurrent(std::move(op), keys + values + size_t(width) + heads, state, int64_t(values));
}

int Plan::state_space(int xbc, int dt, ScanParams params, StatePlace place) {
  const size_t keys = check_scan(params), heads = size_t(params.heads), values = heads * size_t(params.columns);
  require(dt < 0 || checked(dt, "dt").width == params.heads, "state space: one dt a head");
  require(size_t(checked(xbc, "the input of a state space").width) == 2 * keys + values, "state space: the input is not x, B, C");
  Op op{.kind = OpKind::scan, .in = xbc, .other = dt};
  const size_t state = values * size_t(params.rows);
  op.scan = std::move(params);
  op.place = place;
  return add_recurrent(std::move(op), values + keys + (dt < 0 ? 0 : heads), state, int64_t(values));
}

int Plan::selective_scan(int x, int dt, int bc, const std::vector<float>& rates, std::vector<float> skip, StatePlace place) {
  const size_t channels = size_t(checked(x, "the input of a selective scan").width), size = rates.size() / channels;
  require(size > 0 && size * 16 <= ThreadPool::kScratchBytes / sizeof(float) && rates.size() == size * channels &&
              skip.size() == channels,
          "selective scan: rates are not [channels, N], or there is not one skip a channel");
  require(size_t(checked(dt, "dt").width) == channels && size_t(checked(bc, "B and C").width) == 2 * size,
          "selective scan: one dt a channel, and B and C of N elements");
  Op op{.kind = OpKind::selective_scan, .in = x, .angles = bc, .other = dt};
  op.vector = in_panels(transposed(rates, channels, size), size, channels);
  op.scan.skip = std::move(skip);
  op.scan.rows = int(size);
  op.place = place;
  return add_recurrent(std::move(op), 2 * channels + size, size * channels, int64_t(channels));
}

int Plan::gated_recurrence(int x, int input_gate, int rate_gate, std::vector<float> rates, StatePlace place) {
  const size_t channels = size_t(checked(x, "the input of a gated recurrence").width);
  for (const int gate : {input_gate, rate_gate})
    require(size_t(checked(gate, "a gate").width) == channels, "gated recurrence: gates are not of the input's width");
  require(rates.size() == channels, "gated recurrence: one rate a channel");
  Op op{.kind = OpKind::gated_recurrence, .in = x, .angles = rate_gate, .other = input_gate};
  op.vector = std::move(rates);
  op.place = place;
  return add_recurrent(std::move(op), 3 * channels, channels, int64_t(channels));
}

void Plan::check_states(const StepInput& in) const {
  const int rows = kv_->num_states(), most = kv_->num_open();
  require(in.state_rows || (!recurrent_ && rows == 0), "a step of a model with states came without their rows");
  if (!in.state_rows) return;
  std::vector<bool> taken(static_cast<size_t>(rows));
  auto take = [&](int32_t row) {
    require(row >= 0 && row < rows && !taken[size_t(row)],
            "rows of states must be different ones of the cache's " + std::to_string(rows));
    taken[size_t(row)] = true;
  };
  for (int b = 0; b < in.num_seqs; ++b) {
    const int count = in.cu_q[b + 1] - in.cu_q[b], open = in.state_open[b], kept = in.state_kept[b];
    take(in.state_rows[b]);
    require(open >= 0 && open <= most && open <= in.kv_len[b] - count,
            "a sequence replays more open rows than the " + std::to_string(most) + " of the cache, or than it has tokens");
    require(kept >= 0 && kept <= count && count - kept <= most,
            "a state must take in all tokens of its sequence but at most " + std::to_string(most));
  }
  for (int i = 0; i < in.num_state_marks; ++i) {
    const int32_t* mark = in.state_marks + 3 * i;
    require(mark[0] >= 0 && mark[0] < in.num_seqs && mark[1] >= 0 && mark[1] <= in.state_kept[mark[0]],
            "a state is marked after tokens that it does not take in");
    require(i == 0 || !std::lexicographical_compare(mark, mark + 3, mark - 3, mark), "marks of states must be in order");
    take(mark[2]);
  }
}

StateStep Plan::place_states(const Op& op) {
  const auto [layer, state] = op.place;
  state_marks_.resize(size_t(step_.num_state_marks));
  state_seqs_.resize(size_t(step_.num_seqs));
  int mark = 0;
  for (int b = 0; b < step_.num_seqs; ++b) {
    const int first = step_.cu_q[b], row = step_.state_rows[b], open = step_.state_open[b], begin = mark;
    for (; mark < step_.num_state_marks && step_.state_marks[3 * mark] == b; ++mark) {
      const int32_t* own = step_.state_marks + 3 * mark;
      state_marks_[size_t(mark)] = {own[1], kv_->state(layer, state, own[2])};
    }
    state_seqs_[size_t(b)] = {first, step_.cu_q[b + 1] - first, open, step_.state_kept[b], step_.positions[first] == open,
                              kv_->state(layer, state, row), kv_->open_rows(layer, state, row), state_marks_.data() + begin,
                              mark - begin};
  }
  return {state_seqs_.data(), step_.num_seqs, layers_[size_t(layer)].states[size_t(state)].row};
}

// Writes the inputs of tokens that may be taken back to their sequences' open rows.
void Plan::keep_open_rows(const Op& op) {
  struct Piece {
    int buffer;
    size_t begin, width;
  };
  const ScanParams& p = op.scan;
  const size_t keys = size_t(p.key_heads) * size_t(p.rows), values = size_t(p.heads) * size_t(p.columns);
  auto whole = [&](int buffer) { return Piece{buffer, 0, buffer < 0 ? 0 : size_t(width(buffer))}; };
  std::array<Piece, 3> pieces{whole(op.in), whole(op.other), whole(op.angles)};
  if (op.kind == OpKind::scan) pieces[0] = {op.in, p.delta ? keys : 0, keys + values};
  if (op.kind == OpKind::selective_scan) pieces[2].width = size_t(p.rows);
  for (const StateSeq& s : state_seqs_) {
    float* to = kv_->open_rows(op.place.layer, op.place.state, step_.state_rows[&s - state_seqs_.data()]);
    for (int t = s.first + s.kept; t < s.first + s.tokens; ++t)
      for (const Piece& piece : pieces) {
        if (piece.width == 0) continue;
        std::memcpy(to, data(piece.buffer) + size_t(t) * size_t(width(piece.buffer)) + piece.begin, piece.width * sizeof(float));
        to += piece.width;
      }
  }
}

// The state is the last token ids, as what they differ from `end`: zeros stand for no token, which counts as an end.
void Plan::execute_ngrams(const Op& op, const StateStep& step) {
  const int count = int(op.multipliers.size()), tokens = step_.num_tokens, end = op.offset;
  const size_t tables = op.weights.size(), each = tables / size_t(count - 1), width = size_t(this->width(op.out));
  std::vector<float> own(static_cast<size_t>(tokens));
  for (int t = 0; t < tokens; ++t) own[size_t(t)] = float(step_.tokens[t] - end);
  std::vector<uint64_t> hashes(size_t(tokens) * size_t(count - 1));
  for (int b = 0; b < step.num_seqs; ++b) {
    const StateSeq& s = step.seqs[b];
    const Tail tail{s, own.data(), 1, step.row, count - 1};
    tail.begin(0, 1);
    for (int t = 0; t < s.tokens; ++t) {
      uint64_t hash = 0;
      bool ended = false;
      for (int back = 0; back < count; ++back) {
        const int id = ended ? end : int(*tail.seen(s.open + t + count - 1 - back)) + end;
        hash ^= uint64_t(id) * uint64_t(op.multipliers[size_t(back)]);
        ended = ended || (back > 0 && id == end);
        if (back > 0) hashes[size_t(s.first + t) * size_t(count - 1) + size_t(back - 1)] = hash;
      }
    }
    tail.keep(0, 1);
    float* open = kv_->open_rows(op.place.layer, op.place.state, step_.state_rows[b]);
    std::copy(own.begin() + s.first + s.kept, own.begin() + s.first + s.tokens, open);
  }
  for (size_t i = 0; i < tables; ++i) {
    const MatrixView& table = op.weights[i]->view();
    for (int t = 0; t < tokens; ++t)
      table_rows_[size_t(t)] = int32_t(hashes[size_t(t) * size_t(count - 1) + i / each] % uint64_t(table.rows));
    kernels_.embed({table_rows_.data(), tokens, table, 1.0f, data(op.out) + i * size_t(table.cols), width}, *pool_);
  }
}

void Plan::execute_recurrent(const Op& op) {
  const StateStep step = place_states(op);
  if (op.kind == OpKind::embed_ngrams) return execute_ngrams(op, step);
  auto at = [&](int buffer) { return buffer < 0 ? nullptr : data(buffer); };
  const float *x = at(op.in), *other = at(op.other), *third = at(op.angles);
  const ScanParams& p = op.scan;
  const float* skip = p.skip.empty() ? nullptr : p.skip.data();
  const int channels = width(op.in);
  float* y = data(op.out);
  if (op.kind == OpKind::convolve)
    kernels_.convolve({step, x, channels, int(op.vector.size()) / channels, op.offset, op.vector.data(), skip, op.activation, y},
                      *pool_);
  else if (op.kind == OpKind::scan)
    kernels_.scan({step, p.delta, p.by_channel, x, other, third, p.key_heads, p.heads, p.rows, p.columns, p.rates.data(), skip,
                   p.bound, p.least, p.most, y},
                  *pool_);
  else if (op.kind == OpKind::selective_scan)
    kernels_.selective_scan({step, x, other, third, channels, p.rows, op.vector.data(), skip, y}, *pool_);
  else
    kernels_.gated_recurrence({step, x, other, third, channels, op.vector.data(), y}, *pool_);
  keep_open_rows(op);
}

}  // namespace quire
