"""Several residual streams beside each other, of which each layer computes one. Knows ops and weights, no layers.

Alternating updates (Baykal et al. 2023, arXiv:2301.13310), as in Gemma 3n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.devices.graph import Recorder
from quire.devices.ops import Add, Apply, Combine, Linear, MatchRMS, Mix, Normalize, Scale, Value
from quire.devices.protocol import ColumnScale, FloatArray, Matrix
from quire.model.spec_parts import AltUpSpec
from quire.model.weights import AltUpWeights

FLOOR = 1e-5  # the least mean square that a stream is divided by


class AltUp:
    """The operations on streams, which are one tensor [rows, S D]."""

    def __init__(self, spec: AltUpSpec, hidden_size: int) -> None:
        self._spec, self._hidden_size = spec, hidden_size
        self._streams = spec.streams

    def spread(self, g: Recorder, x: Value, projections: Matrix) -> Value:
        """The embedding [T, D] as the first stream; projections of it, of the same magnitude, as the others."""
        others = g(MatchRMS(g(Linear(x, projections)), x, FLOOR))
        first = g(Combine(x, _part(self._streams, 0).T))
        return g(Combine(others, np.eye(self._streams, self._streams - 1, -1, dtype=np.float32), first))

    def active(self, g: Recorder, streams: Value) -> Value:
        """The stream that layers compute: [rows, D]."""
        return g(Combine(streams, _part(self._streams, self._spec.active)))

    def predict(self, g: Recorder, streams: Value, weights: AltUpWeights) -> Value:
        """Each stream plus a mixture of all, by factors that the active one gives."""
        own = np.eye(self._streams, dtype=np.float32).reshape(-1)
        routed = self._route(g, self.active(g, streams), weights)
        return g(Mix(streams, g(Linear(routed, weights.predict, own)), self._streams))

    def correct(
        self,
        g: Recorder,
        predicted: Value,
        computed: Value,
        weights: AltUpWeights,
        own: Callable[[Value], Value] | None,
    ) -> Value:
        """All streams, moved by what the layer's result `computed` [T, D] differs from its prediction.

        `own` gives the layer's own input for what gates it; it is added to all streams but the first.
        """
        news = g(Add(computed, self.active(g, predicted), -1.0))
        ones = np.ones(self._streams, np.float32)
        factors = g(Linear(self._route(g, computed, weights), weights.correct, ones))
        streams = g(Mix(news, factors, 1, predicted))
        if own is None:
            return streams
        seen = self.active(g, streams)
        if self._spec.scaled:
            seen = g(Apply(seen, ColumnScale(tuple(weights.scale.tolist()))))
        return g(Combine(own(seen), 1 - _part(self._streams, 0).T, streams))

    def merge(self, g: Recorder, streams: Value, projections: Sequence[Matrix]) -> Value:
        """The mean of the first stream and of projections of the others, of its magnitude: [rows, D]."""
        first, share = g(Combine(streams, _part(self._streams, 0))), 1 / self._streams
        mean = g(Scale(first, share))
        for s, projection in enumerate(projections, 1):
            other = g(Linear(g(Combine(streams, _part(self._streams, s))), projection))
            mean = g(Add(mean, g(MatchRMS(other, first, FLOOR)), share))
        return mean

    def _route(self, g: Recorder, x: Value, weights: AltUpWeights) -> Value:
        """tanh of the router's scores: [rows, S]."""
        scores = g(Linear(g(Normalize(x, weights.router_norm)), weights.router))
        return g(Scale(scores, 1 / self._hidden_size, 1.0))


def _part(streams: int, index: int) -> FloatArray:
    """Factors [1, S] that pick one stream."""
    return np.eye(1, streams, index, dtype=np.float32)
