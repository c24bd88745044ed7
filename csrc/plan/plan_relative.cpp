// What distances add to the scores of whole sequences (DeBERTa, He et al. 2021, arXiv:2006.03654): recording and running.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "plan/plan.h"

namespace quire {

namespace {

constexpr int kTile = 64;  // queries, and keys, whose values are gathered together: they stay in the first caches

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

}  // namespace

int Plan::relative_scores(int by_query, int by_key, int num_heads, std::vector<int32_t> places, float scale) {
  require(by_query >= 0 || by_key >= 0, "relative_scores needs values by query or by key");
  require(places.size() % 2 == 1 && places.size() < (1u << 24), "relative_scores: places must be [2 P - 1]");
  require(std::isfinite(scale), "relative_scores: the scale is not finite");
  for (const int values : {by_query, by_key}) {
    if (values < 0) continue;
    const Buffer in = checked(values, "the values of relative_scores");
    require(in.rows == RowKind::tokens && num_heads > 0 && in.width % num_heads == 0,
            "relative_scores: the values are not [T, N B]");
    for (const int32_t place : places)
      require(place >= 0 && place < in.width / num_heads, "relative_scores: a place is not one of the values");
  }
  const int positions = int(places.size() + 1) / 2, padded = (positions + kTile - 1) / kTile * kTile;
  scored_positions_ = scored_positions_ == 0 ? positions : std::min(scored_positions_, positions);
  Op op{.kind = OpKind::relative_scores, .in = std::max(by_query, by_key)};
  if (by_query >= 0 && by_key >= 0) op.in = by_query, op.other = by_key;
  op.offset = by_query < 0 ? 1 : 0;  // the only values are by key
  op.num_heads = num_heads;
  op.scale = scale;
  op.places = std::move(places);
  return add_op(std::move(op), int64_t(num_heads) * padded, RowKind::tokens);
}

void Plan::execute_relative_scores(const Op& op) {
  const float* by_query = op.offset ? nullptr : data(op.in);
  const float* by_key = op.offset ? data(op.in) : op.other < 0 ? nullptr : data(op.other);
  const size_t width = size_t(buffers_[size_t(op.in)].width), each = width / size_t(op.num_heads);
  const size_t out_width = size_t(buffers_[size_t(op.out)].width), padded = out_width / size_t(op.num_heads);
  const int32_t* center = op.places.data() + (op.places.size() - 1) / 2;
  float* out = data(op.out);
  auto tile = [&](int seq, int head, int first) {
    const int begin = step_.cu_q[seq], length = step_.cu_q[seq + 1] - begin, last = std::min(first + kTile, length);
    for (int from = 0; from < length; from += kTile)
      for (int i = first; i < last; ++i) {
        const float* q = by_query ? by_query + size_t(begin + i) * width + size_t(head) * each : nullptr;
        float* y = out + size_t(begin + i) * out_width + size_t(head) * padded;
        for (int j = from; j < std::min(from + kTile, length); ++j) {
          const int32_t place = center[j - i];
          const float own = q ? q[place] : 0.0f;
          const float other = by_key ? by_key[size_t(begin + j) * width + size_t(head) * each + size_t(place)] : 0.0f;
          y[j] = op.scale * (own + other);
        }
      }
  };
  for (int seq = 0; seq < step_.num_seqs; ++seq) {
    const int tiles = (step_.cu_q[seq + 1] - step_.cu_q[seq] + kTile - 1) / kTile;
    pool_->parallel_for(tiles * op.num_heads, [&](int task, int) {
      tile(seq, task % op.num_heads, task / op.num_heads * kTile);
    });
  }
}

}  // namespace quire
