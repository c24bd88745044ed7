"""Encodes a graph as launches of kernels: for each operation, a function that launches it over a step's values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.devices import ops, sparse_ops, stream_ops
from quire.devices.cuda import fuse, states
from quire.devices.cuda.arena import matrices
from quire.devices.cuda.kernels import (
    attention,
    elementwise,
    experts,
    norm,
    packed,
    products,
    rope_store,
    routing,
    rows,
    sparse,
)
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.pack import CudaMatrix, alternating, own_matrix
from quire.devices.cuda.plain import encode_plain
from quire.devices.cuda.work import FAR
from quire.devices.elementwise import GELU, XIELU, Clamp, ColumnScale, SparseGELU, Temperature
from quire.devices.graph import Graph
from quire.devices.operands import Norm
from quire.devices.ops import Op, Value
from quire.devices.protocol import Array
from quire.devices.recurrent_ops import EmbedNgrams
from quire.devices.torch.exchange import joined, summed
from quire.devices.torch.ops import FORMULAS
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.devices.cuda.step import CudaStep

log = logging.getLogger("quire.devices")
FUNCTIONS = {Clamp, ColumnScale, GELU, SparseGELU, Temperature, XIELU}
Call = Callable[["CudaStep"], None]


class Recorder:
    """Gives encoders of operations the launcher, and tensors of the device."""

    def __init__(self, run: Launcher, device: Any, act: Any) -> None:
        self.run, self.device, self.act = run, device, act

    def tensor(self, values: Array | None) -> Any:
        """Float32 values on the device; None stays None."""
        return None if values is None else torch.tensor(np.asarray(values, np.float32), device=self.device)

    def norm(self, given: Norm | None) -> Any:
        """Place a norm on the device; None stays None."""
        if given is None:
            return None
        weight, bias = self.tensor(given.weight), self.tensor(given.bias)
        return norm.NormTensors(given.kind, weight, bias, given.eps, given.after_rope)

    def mixture(self, op: ops.RunExperts[Value]) -> experts.Experts:
        """The experts of a mixture, by tables of their addresses."""
        first, run = next(expert for expert in op.experts if expert is not None), self.run
        gated = first.up.shape[0] > first.down.shape[1]
        up, down = (
            self._weights([None if e is None else own_matrix(getattr(e, side)) for e in op.experts])
            for side in ("up", "down")
        )
        sizes = [0 if e is None else e.down.shape[1] for e in op.experts]
        aligned = first.up.shape[1] % up.columns(run) == 0
        return experts.Experts(
            up, down, torch.tensor(sizes, dtype=torch.int32, device=self.device), max(sizes), op.activation, gated,
            first.limit, op.weigh_inputs, self._biases(op, "up_bias", gated), self._biases(op, "down_bias", False),
            aligned and all(size % down.columns(run) == 0 for size in sizes),
        )  # fmt: skip

    def _weights(self, given: list[CudaMatrix | None]) -> experts.Weights:
        """One weight of each expert; all have the form of the first."""
        first = next(weight for weight in given if weight is not None)
        if first.packed is None:
            values = [None if weight is None else weight.values for weight in given]
            return experts.Weights(experts.addresses(values, self.device), first.values.dtype)
        packs = [
            None if weight is None or weight.packed is None else weight.packed.tensors for weight in given
        ]
        sides = zip(*(pack or (None,) * 4 for pack in packs), strict=True)
        places = [
            experts.addresses(side, self.device) if has is not None else None
            for side, has in zip(sides, first.packed.tensors, strict=True)
        ]
        form = first.packed.form
        scales, zeros, offsets = places[1:]
        return experts.Weights(places[0], form.number, form, scales, zeros, offsets, first.rounds)

    def _biases(self, op: ops.RunExperts[Value], side: str, gated: bool) -> Any:
        """The biases of experts side by side [E, rows]; None if there are none."""
        found = [None if expert is None else getattr(expert, side) for expert in op.experts]
        if all(bias is None for bias in found):
            return None
        made = np.zeros((len(found), max(len(bias) for bias in found if bias is not None)), np.float32)
        for row, bias in zip(made, found, strict=True):
            if bias is not None:
                row[: len(bias)] = alternating(bias) if gated else bias
        return self.tensor(made)


def encode(graph: Graph, recorder: Recorder, wrong: Container[int] = ()) -> list[Call]:
    """The launches of a graph that `check_operations` accepts, operation by operation; those at `wrong` plainly."""
    slow = [without_kernel(graph, op) for op in graph.ops]
    if any(slow):
        names = ", ".join(sorted(set(slow) - {""}))
        log.warning("no GPU kernel computes %s yet: plain torch does, row by row, and slowly", names)
    return [
        encode_plain(op, Value(index), graph) if plain else ENCODERS[type(op)](recorder, op, Value(index))
        for index, (op, name) in enumerate(zip(graph.ops, slow, strict=True))
        for plain in [name or index in wrong]
    ]


def can_be_captured(graph: Graph) -> bool:
    """Tell whether no operation of a graph needs the host, or lists whose length follows the step."""
    by_host: tuple[type[Any], ...] = (ops.Receive, ops.AllReduce, ops.AllGather, *states.ENCODERS)
    return not any(isinstance(op, by_host) or without_kernel(graph, op) for op in graph.ops)


def check_operations(graph: Graph) -> None:
    """Raise ConfigError for operations that nothing here computes, by name."""
    lacking = {name for op in graph.ops for name in _lacking(op)}
    if lacking:
        raise ConfigError(
            f"the model needs {', '.join(sorted(lacking))}, which no GPU kernel computes yet: choose --device cpu"
        )


def without_kernel(graph: Graph, op: Any) -> str:
    """Name what no kernel computes of an operation, but its formula does; empty if a kernel computes it."""
    name = type(op).__name__
    if isinstance(op, ops.Apply) and type(op.function) not in FUNCTIONS:
        return f"Apply of {type(op.function).__name__}"
    if isinstance(op, ops.Attend) and op.entries is not None:
        return "Attend of entries"
    if isinstance(op, sparse_ops.StoreKeys) and op.raw is not None:
        return "StoreKeys of entries"
    if isinstance(op, ops.StoreLatent):
        angles: Any = graph.ops[op.angles]
        rotated = 2 * len(angles.rope.inv_freq)
        if rotated & (rotated - 1):
            return f"StoreLatent of {rotated} rotated elements"
        return "" if op.kv is not None else "StoreLatent without keys"
    return "" if type(op) in ENCODERS else name


def _lacking(op: Any) -> Iterator[str]:
    """Name what nothing computes of an operation."""
    name = type(op).__name__
    if type(op) not in FORMULAS:
        yield name
    if isinstance(op, (ops.RunExperts, ops.HeadLinear)):
        sides = (
            [matrices(op)[side::2] for side in (0, 1)] if isinstance(op, ops.RunExperts) else [matrices(op)]
        )
        if any(len({own_matrix(weight).form for weight in side}) > 1 for side in sides):
            yield f"{name} of weights of several types (--dtype float32 decodes them)"
    if isinstance(op, EmbedNgrams) and len({table.shape[1] for table in op.tables}) > 1:
        yield "EmbedNgrams of tables of several widths"


def embed(r: Recorder, op: ops.Embed[Value], out: Value) -> Call:
    table = own_matrix(op.table).dense(r.act)

    def call(step: CudaStep) -> None:
        if step.adapters is None or not step.adapters.embedding(op, out):
            rows.embed(r.run, table, step.tokens, step[out], op.scale)

    return call


def embed_positions(r: Recorder, op: ops.EmbedPositions[Value], out: Value) -> Call:
    table = own_matrix(op.table).dense(r.act)
    return lambda step: rows.embed(r.run, table, step.positions, step[out], offset=op.offset)


def receive(r: Recorder, op: ops.Receive[Value], out: Value) -> Call:
    return lambda step: step[out].copy_(step.received(op.columns))


def add(r: Recorder, op: ops.Add[Value], out: Value) -> Call:
    return lambda step: elementwise.add(r.run, step[op.x], step[op.other], step[out], op.scale)


def scale(r: Recorder, op: ops.Scale[Value], out: Value) -> Call:
    return lambda step: elementwise.scale(r.run, step[op.x], step[out], op.scale, op.cap)


def multiply(r: Recorder, op: ops.Multiply[Value], out: Value) -> Call:
    return lambda step: elementwise.multiply(r.run, step[op.x], step[op.factors], step[out])


def apply(r: Recorder, op: ops.Apply[Value], out: Value) -> Call:
    factors = r.tensor(np.array(op.function.factors)) if isinstance(op.function, ColumnScale) else None
    return lambda step: elementwise.apply(r.run, step[op.x], step[out], op.function, step.positions, factors)


def combine(r: Recorder, op: stream_ops.Combine[Value], out: Value) -> Call:
    factors, parts = r.tensor(op.factors.reshape(1, -1)), op.factors.shape[1]
    return lambda step: elementwise.combine(
        r.run, step[op.x], factors, step[out], parts, step.optional(op.residual)
    )


def mix(r: Recorder, op: stream_ops.Mix[Value], out: Value) -> Call:
    return lambda step: elementwise.combine(
        r.run, step[op.x], step[op.factors], step[out], op.vectors, step.optional(op.residual)
    )


def match_rms(r: Recorder, op: stream_ops.MatchRMS[Value], out: Value) -> Call:
    return lambda step: norm.match_rms(r.run, step[op.x], step[op.like], step[out], op.floor)


def normalize(r: Recorder, op: ops.Normalize[Value], out: Value) -> Call:
    given = r.norm(op.norm)

    def call(step: CudaStep) -> None:
        normalized = partial(norm.normalize, r.run, step[op.x], groups=op.groups)
        normalized(step[out], given)
        if step.adapters is not None:
            step.adapters.norm(op.path, out, normalized)

    return call


def normalize_sum(r: Recorder, op: fuse.NormalizeSum[Value], out: Value) -> Call:
    given, first = r.norm(op.norm), r.norm(op.first)

    def call(step: CudaStep) -> None:
        total, summed = step[out if op.total is None else op.total], None
        if op.other is not None:
            summed = norm.Sum(step[op.other], op.factors, total, first)
        codes = None if op.codes is None else step.codes(op.codes)
        norm.normalize(r.run, step[op.x], step[out], given, summed=summed, codes=codes)
        if step.adapters is not None and given is not None:
            step.adapters.norm(op.path, out, partial(norm.normalize, r.run, total))

    return call


def round_rows(r: Recorder, op: fuse.Round[Value], out: Value) -> Call:
    return lambda step: packed.round_rows(r.run, step[op.x], *step.codes(out))


def nothing(r: Recorder, op: Op[Value], out: Value) -> Call:
    return lambda step: None


def linear(r: Recorder, op: ops.Linear[Value], out: Value) -> Call:
    weight, bias = own_matrix(op.weight), r.tensor(op.bias)

    def call(step: CudaStep) -> None:
        sums = product(r, op, step)
        ending = bias, op.activation, step.optional(op.residual)
        if step.adapters is None or not step.adapters.product(op, out, sums, ending):
            sums(weight, step[out], *ending)

    return call


def gated_linear(r: Recorder, op: ops.GatedLinear[Value], out: Value) -> Call:
    weight, bias = own_matrix(op.weight), None
    if op.bias is not None:
        bias = r.tensor(alternating(op.bias))

    def call(step: CudaStep) -> None:
        sums = product(r, op, step)
        ending = bias, op.activation, None, op.limit, True
        if step.adapters is None or not step.adapters.product(op, out, sums, ending):
            sums(weight, step[out], *ending)

    return call


def product(
    r: Recorder, op: ops.Linear[Value] | ops.GatedLinear[Value], step: CudaStep
) -> Callable[..., None]:
    """The product of an operation's x with floats or a packed weight, gated or not."""
    x = step[op.x]
    rounded = x, None
    if isinstance(op, (fuse.RoundedLinear, fuse.RoundedGatedLinear)):
        rounded = step.codes(op.codes)

    def multiply(
        weight: CudaMatrix, out: Any, bias: Any = None, activation: Any = None, residual: Any = None,
        limit: float = 0.0, gated: bool = False,
    ) -> None:  # fmt: skip
        if weight.packed is not None:
            codes, scales = rounded if weight.rounds else (x, None)
            packed.linear(r.run, codes, weight.packed, out, bias, activation, residual, scales, limit, gated)
            return
        own = x.to(weight.dtype)  # the same tensor, but for exact weights
        if gated:
            products.gated(r.run, own, weight.values, out, activation, bias, limit)
        else:
            products.linear(r.run, own, weight.values, out, bias, activation, residual)

    return multiply


def head_linear(r: Recorder, op: ops.HeadLinear[Value], out: Value) -> Call:
    given, bias = [own_matrix(weight) for weight in op.weights], r.tensor(op.bias)
    if given[0].packed is None:
        weights = torch.stack([weight.values for weight in given])
        return lambda step: products.heads(r.run, step[op.x], weights, step[out], bias, op.activation)
    heads, held = len(given), packed.joined([weight.packed for weight in given if weight.packed is not None])

    def call(step: CudaStep) -> None:
        x, scales = step[op.x], None
        if given[0].rounds:
            rows = x.view(len(x) * heads, -1)
            codes, scales = (
                step.empty(*rows.shape, dtype=torch.int8),
                step.empty(len(rows), dtype=torch.float32),
            )
            packed.round_rows(r.run, rows, codes, scales)
            x = codes.view(x.shape)
        packed.linear(r.run, x, held, step[out], bias, op.activation, None, scales, heads=heads)

    return call


def store_keys(r: Recorder, op: sparse_ops.StoreKeys[Value], out: Value) -> Call:
    given, rope = r.norm(op.norm), op.rope
    inv_freq: Any = None if rope is None else r.tensor(rope.inv_freq)

    def call(step: CudaStep) -> None:
        x, angles = step[op.x], None
        if rope is not None:
            angles = step.empty(len(x), 2 * len(inv_freq), dtype=torch.float32)
            rope_store.angles(r.run, step.positions, inv_freq, rope.scale, angles)
        rope_store.store_kv(r.run, x, None, step.cache.layers[op.layer], step.places, 0, angles, k_norm=given)
        step[out].copy_(x)

    return call


def choose(r: Recorder, op: sparse_ops.Choose[Value], out: Value) -> Call:
    def call(step: CudaStep) -> None:
        cache = step.cache
        sparse.choose(
            r.run, step[op.q], step.optional(op.weights), cache.layers[op.layer], step.positions, step.sequences, op,
            cache.spec.layer(op.layer).every, cache.block_size, step[out], step.empty,
        )  # fmt: skip

    return call


def rope_angles(r: Recorder, op: ops.RopeAngles[Value], out: Value) -> Call:
    inv_freq = r.tensor(op.rope.inv_freq)
    return lambda step: rope_store.angles(r.run, step.positions, inv_freq, op.rope.scale, step[out])


def store_kv(r: Recorder, op: ops.StoreKV[Value], out: Value) -> Call:
    q_norm, k_norm, v_norm = (r.norm(given) for given in (op.q_norm, op.k_norm, op.v_norm))
    return lambda step: rope_store.store_kv(
        r.run, step[op.qkv], step[out], step.cache.layers[op.layer], step.places, op.num_heads,
        step.optional(op.angles), q_norm, k_norm, v_norm,
    )  # fmt: skip


def prepare_queries(r: Recorder, op: ops.PrepareQueries[Value], out: Value) -> Call:
    given = r.norm(op.norm)
    return lambda step: rope_store.prepare_queries(
        r.run, step[op.q], step[out], op.num_heads, step.optional(op.angles), given
    )


def store_latent(r: Recorder, op: ops.StoreLatent[Value], out: Value) -> Call:
    given, kv = r.norm(op.norm), op.kv
    assert kv is not None  # by check_operations
    return lambda step: rope_store.store_latent(
        r.run, step[kv], step[op.q_latent], step[op.q_rope], step[out], step.cache.layers[op.layer], step.places,
        step[op.angles], given,
    )  # fmt: skip


def attend(r: Recorder, op: ops.Attend[Value], out: Value) -> Call:
    a = op.attention
    sinks, slopes, bias = (r.tensor(values) for values in (a.sinks, a.slopes, a.bias))
    seen = a.window or 0, a.chunk or 0, min(a.ahead, FAR)

    def call(step: CudaStep) -> None:
        layer, own = step.cache.layers[op.layer], step[out]
        chosen = step.optional(op.chosen)
        listed = 0 if chosen is None else chosen.shape[1] // op.groups * op.pool
        shape, work = step.work(op.num_heads, own.shape[1] // op.num_heads, layer, *seen, listed)
        changes = attention.Changes(sinks, slopes, bias, step.optional(op.scores), chosen, op.pool, op.groups)
        attention.attend(
            r.run, step[op.q], layer, own, step.sequences, work, shape, a.scale, a.cap or 0.0, changes
        )

    return call


def route(r: Recorder, op: ops.Route[Value], out: Value) -> Call:
    correction, scales = r.tensor(op.correction), r.tensor(op.weight_scales)
    return lambda step: routing.route(
        r.run, step[op.scores], op.routing, *step.routes(out), correction, scales, step.optional(op.ids)
    )


def run_experts(r: Recorder, op: ops.RunExperts[Value], out: Value) -> Call:
    made = r.mixture(op)
    width = op.out_width(0)

    def call(step: CudaStep) -> None:
        ids, weights = step.routes(op.routes)
        x, own = step[op.x], step[out]
        room = step.room(x, ids.shape[1], made, width or own.shape[1])
        experts.run_experts(r.run, x, ids, weights, made, room, own)

    return call


def select_rows(r: Recorder, op: ops.SelectRows[Value], out: Value) -> Call:
    return lambda step: rows.select(r.run, step[op.x], step.logit_rows, step[out])


def tap(r: Recorder, op: ops.Tap[Value], out: Value) -> Call:
    return lambda step: step.tapped.update({out: step[out]})  # in the place of x, which is kept


def all_reduce(r: Recorder, op: ops.AllReduce[Value], out: Value) -> Call:
    return lambda step: step[out].copy_(summed(step[op.x], op.peers))


def all_gather(r: Recorder, op: ops.AllGather[Value], out: Value) -> Call:
    return lambda step: step[out].copy_(joined(step[op.x], op.widths, op.peers))


ENCODERS: dict[type[Op[Any]], Callable[[Recorder, Any, Value], Call]] = {
    ops.Receive: receive,
    ops.Embed: embed,
    ops.EmbedPositions: embed_positions,
    ops.Add: add,
    ops.Scale: scale,
    ops.Multiply: multiply,
    ops.Apply: apply,
    stream_ops.Combine: combine,
    stream_ops.Mix: mix,
    stream_ops.MatchRMS: match_rms,
    ops.Normalize: normalize,
    fuse.NormalizeSum: normalize_sum,
    fuse.Round: round_rows,
    fuse.Room: nothing,
    ops.Linear: linear,
    ops.GatedLinear: gated_linear,
    fuse.RoundedLinear: linear,
    fuse.RoundedGatedLinear: gated_linear,
    ops.HeadLinear: head_linear,
    ops.RopeAngles: rope_angles,
    ops.StoreKV: store_kv,
    sparse_ops.StoreKeys: store_keys,
    sparse_ops.Choose: choose,
    ops.PrepareQueries: prepare_queries,
    ops.StoreLatent: store_latent,
    ops.Attend: attend,
    ops.Route: route,
    ops.RunExperts: run_experts,
    ops.AllReduce: all_reduce,
    ops.AllGather: all_gather,
    ops.SelectRows: select_rows,
    ops.Tap: tap,
    **states.ENCODERS,
}
