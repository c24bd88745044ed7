"""Several residual streams beside each other, of which each layer computes one. Knows ops and weights, no layers.

Alternating updates (Baykal et al. 2023, arXiv:2301.13310), as in Gemma 3n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from quire.devices.protocol import ColumnScale, FloatArray, Matrix, Ops
from quire.model.spec_parts import AltUpSpec
from quire.model.weights import AltUpWeights

T = TypeVar("T")
FLOOR = 1e-5  # the least mean square that a stream is divided by


class AltUp:
    """The operations on streams, which are one tensor [rows, S D]."""

    def __init__(self, spec: AltUpSpec, hidden_size: int) -> None:
        self._spec, self._hidden_size = spec, hidden_size
        self._streams = spec.streams

    def spread(self, ops: Ops[T], x: T, projections: Matrix) -> T:
        """The embedding [T, D] as the first stream; projections of it, of the same magnitude, as the others."""
        others = ops.match_rms(ops.linear(x, projections), x, FLOOR)
        first = ops.combine(x, _part(self._streams, 0).T)
        return ops.combine(others, np.eye(self._streams, self._streams - 1, -1, dtype=np.float32), first)

    def active(self, ops: Ops[T], streams: T) -> T:
        """The stream that layers compute: [rows, D]."""
        return ops.combine(streams, _part(self._streams, self._spec.active))

    def predict(self, ops: Ops[T], streams: T, weights: AltUpWeights) -> T:
        """Each stream plus a mixture of all, by factors that the active one gives."""
        own = np.eye(self._streams, dtype=np.float32).reshape(-1)
        routed = self._route(ops, self.active(ops, streams), weights)
        return ops.mix(streams, ops.linear(routed, weights.predict, own), self._streams)

    def correct(
        self, ops: Ops[T], predicted: T, computed: T, weights: AltUpWeights, own: Callable[[T], T] | None
    ) -> T:
        """All streams, moved by what the layer's result `computed` [T, D] differs from its prediction.

        `own` gives the layer's own input for what gates it; it is added to all streams but the first.
        """
        news = ops.add(computed, self.active(ops, predicted), -1.0)
        ones = np.ones(self._streams, np.float32)
        factors = ops.linear(self._route(ops, computed, weights), weights.correct, ones)
        streams = ops.mix(news, factors, 1, predicted)
        if own is None:
            return streams
        seen = self.active(ops, streams)
        if self._spec.scaled:
            seen = ops.elementwise(seen, ColumnScale(tuple(weights.scale.tolist())))
        return ops.combine(own(seen), 1 - _part(self._streams, 0).T, streams)

    def merge(self, ops: Ops[T], streams: T, projections: Sequence[Matrix]) -> T:
        """The mean of the first stream and of projections of the others, of its magnitude: [rows, D]."""
        first, share = ops.combine(streams, _part(self._streams, 0)), 1 / self._streams
        mean = ops.scale(first, share)
        for s, projection in enumerate(projections, 1):
            other = ops.linear(ops.combine(streams, _part(self._streams, s)), projection)
            mean = ops.add(mean, ops.match_rms(other, first, FLOOR), share)
        return mean

    def _route(self, ops: Ops[T], x: T, weights: AltUpWeights) -> T:
        """tanh of the router's scores: [rows, S]."""
        scores = ops.linear(ops.norm(x, weights.router_norm), weights.router)
        return ops.scale(scores, 1 / self._hidden_size, 1.0)


def _part(streams: int, index: int) -> FloatArray:
    """Factors [1, S] that pick one stream."""
    return np.eye(1, streams, index, dtype=np.float32)
