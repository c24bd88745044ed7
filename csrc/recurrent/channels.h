// States of channels by themselves: the tail of a convolution, the scan of Mamba-1, the RG-LRU. A state [K, channels] of a
// scan lies in panels of 16 channels, [K, 16] each (the last may be narrower).
#pragma once

#include "recurrent/segments.h"
#include "recurrent/tail.h"
#include "rowwise/activation.h"

namespace quire::QUIRE_ISA {

// y = act(bias + the sum of w[i] x[i]) of n channels; w is [taps, channels]. `kTaps` 0: any number.
template <int kTaps, class Act>
QUIRE_INLINE void convolve_row(const float* const* x, const float* w, size_t channels, int taps, const float* bias, int n,
                               float* y, Act&& act) {
  const int count = kTaps ? kTaps : taps;
  auto sum = [&](int c, auto&& get) QUIRE_INLINE_LAMBDA {
    V v = bias ? get(bias + c) : set1(0);
    for (int i = 0; i < count; ++i) v = fma(get(w + size_t(i) * channels + c), get(x[i] + c), v);
    return act(v);
  };
  int c = 0;
  for (; c + 16 <= n; c += 16) store(y + c, sum(c, [](const float* p) QUIRE_INLINE_LAMBDA { return load(p); }));
  if (const int rest = n - c; rest > 0)
    store_first(y + c, sum(c, [&](const float* p) QUIRE_INLINE_LAMBDA { return load_first(p, rest); }), rest);
}

constexpr int kMostTaps = 64;
constexpr int kConvolvedChannels = 256;  // at once, over all tokens: their weights and rows stay in the first cache

// Channels [first, last) of a sequence.
inline void convolve_channels(const ConvolveArgs& a, const StateSeq& s, int first, int last) {
  const size_t channels = size_t(a.channels);
  const Tail tail{s, a.x, channels, a.row, (a.taps - 1) * a.dilation};
  tail.begin(first, last);
  for (int t = 0; t < s.tokens; ++t) {
    const float* rows[kMostTaps];
    for (int i = 0; i < a.taps; ++i) rows[i] = tail.seen(s.open + t + i * a.dilation) + first;
    float* y = a.y + size_t(s.first + t) * channels + first;
    auto run = [&](auto&& act) QUIRE_INLINE_LAMBDA {
      const float *w = a.weight + first, *bias = a.bias ? a.bias + first : nullptr;
      if (a.taps == 4) convolve_row<4>(rows, w, channels, 4, bias, last - first, y, act);
      else convolve_row<0>(rows, w, channels, a.taps, bias, last - first, y, act);
    };
    if (a.activation == Activation::silu) run([](V v) QUIRE_INLINE_LAMBDA { return v * sigmoid(v); });
    else run([&](V v) QUIRE_INLINE_LAMBDA { return activate(a.activation, v); });
  }
  tail.keep(first, last);
}

// Runs panels [first, last) of `rows` rows each over all rows of a sequence: `token` changes a panel at a channel.
template <class Token>
QUIRE_INLINE void channel_panels(const StateSeq& s, int channels, int rows, int first, int last, float* scratch, Token&& token) {
  for (int panel = first; panel < last; ++panel) {
    const int c = 16 * panel, lanes = min_of(16, channels - c);
    run_segments(s, size_t(c) * size_t(rows), size_t(rows) * size_t(lanes), scratch,
                 [&](float* state, bool open, int from, int count) {
      for (int i = from; i < from + count; ++i) token(state, open, i, c, lanes);
    });
  }
}

inline void selective_channels(const SelectiveArgs& a, const StateSeq& s, int first, int last, float* scratch) {
  const size_t channels = size_t(a.channels), N = size_t(a.N);
  channel_panels(s, a.channels, a.N, first, last, scratch, [&](float* state, bool open, int i, int c, int lanes) {
    const size_t row = size_t(s.first + i);
    const float* kept = s.open_rows + size_t(i) * a.row;  // x | dt | B
    const float* b = open ? kept + 2 * channels : a.bc + row * 2 * N;
    const V x = load_first((open ? kept : a.x + row * channels) + c, lanes);
    const V dt = load_first((open ? kept + channels : a.dt + row * channels) + c, lanes), added = dt * x;
    V sum = set1(0);
    for (size_t n = 0; n < N; ++n) {
      float* own = state + n * size_t(lanes);
      const V decay = exp(set1(0) - load_first(a.rates + size_t(c) * N + n * size_t(lanes), lanes) * dt);
      const V value = fma(set1(b[n]), added, decay * load_first(own, lanes));
      store_first(own, value, lanes);
      if (!open) sum = fma(set1(b[N + n]), value, sum);
    }
    if (!open) store_first(a.y + row * channels + c, fma(load_first(a.skip + c, lanes), x, sum), lanes);
  });
}

inline void gated_channels(const GatedArgs& a, const StateSeq& s, int first, int last, float* scratch) {
  const size_t channels = size_t(a.channels);
  channel_panels(s, a.channels, 1, first, last, scratch, [&](float* state, bool open, int i, int c, int lanes) {
    const size_t row = size_t(s.first + i);
    const float* kept = s.open_rows + size_t(i) * a.row;  // x | input gate | rate gate
    auto get = [&](const float* own, size_t place) {
      return load_first((open ? kept + place * channels : own + row * channels) + c, lanes);
    };
    const V power = set1(0) - load_first(a.rates + c, lanes) * get(a.rate_gate, 2);
    // 1 - a^2 = 2 h / (1 + h) with h = tanh(-power): nothing cancels if a is near 1.
    const V h = tanh(set1(0) - power), root = sqrt((h + h) / (set1(1) + h));
    const bool begins = s.fresh && (open ? i == 0 : i == 0 && s.open == 0);
    const V added = get(a.input_gate, 1) * get(a.x, 0);
    const V value = fma(exp(power), load_first(state, lanes), begins ? added : root * added);
    store_first(state, value, lanes);
    if (!open) store_first(a.y + row * channels + c, value, lanes);
  });
}

}  // namespace quire::QUIRE_ISA
