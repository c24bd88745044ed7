"""Estimates the cost of a model's steps on a machine from its counts of bytes and operations (model/cost.py)."""

from __future__ import annotations

from collections import Counter

from quire.devices.protocol import KVSpec
from quire.model.cost import Attended, Cost
from quire.sched.times import StepRates


def step_rates(cost: Cost, kv: KVSpec, read_gbs: float, gflops: float) -> StepRates:
    """Compute the seconds of each part of a step at these limits. A model without counts gets StepRates' defaults."""
    if not cost.dense_parameters:
        return StepRates()
    byte, operation = 1e-9 / read_gbs, 1e-9 / gflops
    attention = sum(layer.operations for layer in cost.layers)
    spans: Counter[int | None] = Counter()
    for layer in cost.layers:
        spans[_span(layer)] += layer.operations
    return StepRates(
        read=byte * (cost.dense_bytes + cost.head_bytes),
        routed=byte * cost.routed_bytes,
        miss=1.0 - cost.drawn / cost.experts,
        token=operation * cost.token_operations,
        output=operation * 2.0 * cost.head_parameters,
        pair=operation * attention,
        position=byte * kv.bytes_per_token,
        state=byte * cost.state_bytes,
        byte=byte,
        operation=operation,
        spans=tuple((count / attention, span) for span, count in spans.items()) if attention else (),
    )


def _span(layer: Attended) -> int | None:
    """Bound the positions that a query of the layer sees."""
    index = layer.index
    chosen = None if index is None or index.entries is not None else index.most
    bounds = [bound for bound in (layer.window, layer.chunk, chosen) if bound is not None]
    return min(bounds, default=None)
