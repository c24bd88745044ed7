// The row primitives of sampling, one table per instruction set. Knows rows of floats; knows no slot.
//
// Rows hold no NaN and no +inf unless said otherwise. Every result has the same bits in every set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// The best tokens, best first and lower ids first among equals, up to a limit: those larger than `value`, and those
// equal to it with an id of at most `last_id`.
struct Cut {
  float value;
  int last_id;
};

struct DrawArgs {
  const float* x;  // [n]
  int n;
  float max;         // of x
  int argmax;        // first id of max
  double inv_temperature;
  Cut cut;           // keeps argmax
  uint64_t seed, position;
};

// Tokens are weighed by e^((x - max) * inv_t) * unit, rounded to whole numbers.
struct WeighArgs {
  const float* x;  // [n]
  int n;
  float max, inv_t;
  double unit;
  Cut kept, better;  // `better` keeps a part of `kept`
};

struct Weights {
  double kept, better;
};

// The weights of the kept tokens, of those above a value and of those not below it, within a relative error of kRough.
struct RoughWeights {
  double kept, above, not_below;
};

constexpr double kRough = 1e-3;

struct RowMax {
  float value;
  int block;  // first id of the block of kRowBlock values that holds the first maximum
  bool sound;  // no NaN and no +inf
};

constexpr int kRowBlock = 4096;

struct SamplerKernels {
  RowMax (*row_max)(const float* x, int n);  // any values
  // Sum of e^(x - max).
  double (*exp_sum)(const float* x, int n, float max);
  // Sums of the whole numbers round(e^((x - max) * inv_t) * unit), exact while below 2^53.
  Weights (*weigh)(const WeighArgs&);
  // About the same sums in a fraction of the time: counts every token at a cut's value as kept, or as better.
  RoughWeights (*weigh_roughly)(const WeighArgs&);
  int (*count_above)(const float* x, int n, float value);
  // Copies low <= x < high in order; `out` may be x and needs room for 16 extra values. Returns their number.
  size_t (*keep_range)(const float* x, size_t n, float low, float high, float* out);
  // Ids of the kept tokens in order, at most `limit`, into `ids` (room for limit + 16); -1 if there are more.
  int (*collect)(const float* x, int n, Cut cut, int limit, int* ids);
  // The kept token with the largest (x - max) / temperature + Gumbel noise; the lowest id among equals.
  int (*draw)(const DrawArgs&);
};

}  // namespace quire
