"""Encodes a graph as a native plan (csrc/plan/plan.h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from quire import _native
from quire.devices import ops
from quire.devices.cpu.pack import packed_of
from quire.devices.graph import Graph
from quire.devices.ops import Op, Value
from quire.devices.protocol import FloatArray, Norm
from quire.errors import EngineError

NONE = -1  # no tensor


def float_array(values: FloatArray | None) -> FloatArray | None:
    return None if values is None else np.ascontiguousarray(values, np.float32)


def norm_tuple(norm: Norm | None) -> tuple[bool, FloatArray, FloatArray | None, float, bool, bool] | None:
    if norm is None:
        return None
    weight, bias = float_array(norm.weight.reshape(-1)), norm.bias
    assert weight is not None
    bias = None if bias is None else float_array(bias.reshape(-1))
    return norm.kind == "rms", weight, bias, float(norm.eps), norm.weight.ndim == 2, norm.after_rope


def _buffer(value: int | None) -> int:
    return NONE if value is None else value


class Recording:
    """A plan, and where each matrix and norm acts in it, by path: (buffer of the op, place of the weight in it)."""

    def __init__(self, plan: Any, graph: Graph) -> None:
        """EngineError if the head does not give `vocab_size` logits."""
        self.plan = plan
        self.taps: list[int] = []
        self.products: dict[str, list[tuple[int, int]]] = {}
        self.embeddings: dict[str, list[tuple[int, int]]] = {}
        self.norms: dict[str, list[tuple[int, int]]] = {}
        self.output: int | None = None  # the result of a graph without a head
        self._buffers: dict[Value, int] = {}
        for index, op in enumerate(graph.ops):
            if index == graph.body:
                self._buffers[graph.hidden] = plan.begin_head(self._buffers[graph.hidden])
            self._buffers[Value(index)] = self._encode(ops.resolved(op, self._buffers.__getitem__))
        if graph.logits is None:
            self.output = self._buffers[graph.hidden]
            plan.tap(self.output)
            plan.finish(NONE)
            return
        logits = self._buffers[graph.logits]
        if plan.width(logits) != graph.vocab_size:
            raise EngineError(
                f"the head gives {plan.width(logits)} logits, the graph says {graph.vocab_size}"
            )
        plan.finish(logits)

    def _encode(self, op: Op[int]) -> int:
        if isinstance(op, ops.Tap):
            self.plan.tap(op.x)
            self.taps.append(op.x)
            return int(op.x)
        out = int(ENCODERS[type(op)](self.plan, op))
        if isinstance(op, ops.Embed):
            self._place(self.embeddings, op.path, out)
        elif isinstance(op, ops.Normalize):
            self._place(self.norms, op.path, out)
        elif isinstance(op, (ops.Linear, ops.GatedLinear)):
            self._place(self.products, op.path, out)
        elif isinstance(op, ops.RunExperts):
            for i, expert in enumerate(op.experts):
                if expert is not None:
                    self._place(self.products, f"{expert.path}.gate_up", out, 2 * i)
                    self._place(self.products, f"{expert.path}.down", out, 2 * i + 1)
        return out

    def _place(self, places: dict[str, list[tuple[int, int]]], path: str, out: int, index: int = 0) -> None:
        places.setdefault(path, []).append((out, index))


def _apply(plan: Any, op: ops.Apply[int]) -> Any:
    params = [float(p) for field in msgspec.structs.astuple(op.function) for p in np.atleast_1d(field)]
    return plan.elementwise(type(op.function).__name__, op.x, params)


def _combine(plan: Any, op: ops.Combine[int]) -> Any:
    factors = op.factors.reshape(-1).tolist()
    return plan.combine(op.x, factors, op.factors.shape[1], _buffer(op.residual))


def _linear(plan: Any, op: ops.Linear[int]) -> Any:
    packed = packed_of(op.weight)
    if packed.gated:
        raise EngineError("a gated weight is for GatedLinear")
    return plan.linear(op.x, packed, float_array(op.bias), op.activation or "", _buffer(op.residual), 0.0)


def _gated_linear(plan: Any, op: ops.GatedLinear[int]) -> Any:
    packed = packed_of(op.weight)
    if not packed.gated:
        raise EngineError("GatedLinear needs a weight made by gated_matrix")
    return plan.linear(op.x, packed, float_array(op.bias), op.activation, NONE, op.limit)


def _rope_angles(plan: Any, op: ops.RopeAngles[int]) -> Any:
    return plan.rope(np.ascontiguousarray(op.rope.inv_freq, np.float32), op.rope.scale)


def _store_kv(plan: Any, op: ops.StoreKV[int]) -> Any:
    norms = norm_tuple(op.q_norm), norm_tuple(op.k_norm), norm_tuple(op.v_norm)
    return plan.store_kv(op.qkv, op.layer, op.num_heads, _buffer(op.angles), *norms)


def _store_latent(plan: Any, op: ops.StoreLatent[int]) -> Any:
    return plan.store_latent(op.kv, op.q_latent, op.q_rope, op.layer, op.angles, norm_tuple(op.norm))


def _relative_scores(plan: Any, op: ops.RelativeScores[int]) -> Any:
    places = np.ascontiguousarray(op.places, np.int32)
    return plan.relative_scores(_buffer(op.by_query), _buffer(op.by_key), op.num_heads, places, op.scale)


def _attend(plan: Any, op: ops.Attend[int]) -> Any:
    attention = op.attention
    return plan.attention(
        op.q,
        op.layer,
        op.num_heads,
        attention.scale,
        attention.window or 0,
        attention.chunk or 0,
        attention.ahead,
        attention.cap or 0.0,
        float_array(attention.slopes),
        float_array(attention.sinks),
        None if attention.bias is None else float_array(attention.bias.reshape(-1)),
        _buffer(op.scores),
    )


def _route(plan: Any, op: ops.Route[int]) -> Any:
    routing = op.routing
    params = _native.Routing(
        routing.num_experts,
        routing.top_k,
        routing.scoring == "sigmoid",
        routing.softmax_after,
        routing.renormalize,
        routing.scale,
        routing.num_groups,
        routing.top_groups,
        routing.group_sum,
        float_array(op.correction),
        float_array(op.weight_scales),
        routing.shared,
        routing.shared_gate,
        routing.sparse_mixer,
        routing.correct_logits,
    )
    return plan.route(op.scores, params)


def _run_experts(plan: Any, op: ops.RunExperts[int]) -> Any:
    weights = [
        None
        if e is None
        else (packed_of(e.up), float_array(e.up_bias), packed_of(e.down), float_array(e.down_bias), e.limit)
        for e in op.experts
    ]
    return plan.experts(op.x, op.routes, weights, op.activation, op.weigh_inputs)


ENCODERS: dict[type[Op[Any]], Callable[[Any, Any], Any]] = {
    ops.Receive: lambda plan, op: plan.receive(op.columns),
    ops.Embed: lambda plan, op: plan.embed(packed_of(op.table), op.scale),
    ops.EmbedPositions: lambda plan, op: plan.embed_positions(packed_of(op.table), op.offset),
    ops.Add: lambda plan, op: plan.add(op.x, op.other, op.scale),
    ops.Scale: lambda plan, op: plan.scale(op.x, op.scale, op.cap or 0.0),
    ops.Multiply: lambda plan, op: plan.multiply(op.x, op.factors),
    ops.Apply: _apply,
    ops.Combine: _combine,
    ops.Mix: lambda plan, op: plan.mix(op.x, op.factors, op.vectors, _buffer(op.residual)),
    ops.MatchRMS: lambda plan, op: plan.match_rms(op.x, op.like, op.floor),
    ops.Normalize: lambda plan, op: plan.norm(op.x, norm_tuple(op.norm)),
    ops.Linear: _linear,
    ops.GatedLinear: _gated_linear,
    ops.HeadLinear: lambda plan, op: plan.head_linear(op.x, [packed_of(w) for w in op.weights]),
    ops.RopeAngles: _rope_angles,
    ops.StoreKV: _store_kv,
    ops.PrepareQueries: lambda plan, op: plan.queries(
        op.q, op.num_heads, _buffer(op.angles), norm_tuple(op.norm)
    ),
    ops.StoreLatent: _store_latent,
    ops.RelativeScores: _relative_scores,
    ops.Attend: _attend,
    ops.Route: _route,
    ops.RunExperts: _run_experts,
    ops.AllReduce: lambda plan, op: plan.all_reduce(op.x, op.peers),
    ops.AllGather: lambda plan, op: plan.all_gather(op.x, list(op.widths), op.peers),
    ops.SelectRows: lambda plan, op: plan.select_rows(op.x),
}
