"""Encodes attention, and what it stores in a layer of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from quire.devices import ops, sparse_ops
from quire.devices.cuda.kernels import attention, entries, relative, rope_store, sparse
from quire.devices.cuda.work import FAR
from quire.devices.ops import Value
from quire.devices.relative_ops import RelativeScores

if TYPE_CHECKING:
    from quire.devices.cuda.record import Call, Encoders, Recorder
    from quire.devices.cuda.step import CudaStep


def rope_angles(r: Recorder, op: ops.RopeAngles[Value], out: Value) -> Call:
    inv_freq = r.tensor(op.rope.inv_freq)
    return lambda step: rope_store.angles(r.run, step.positions, inv_freq, op.rope.scale, step[out])


def store_kv(r: Recorder, op: ops.StoreKV[Value], out: Value) -> Call:
    q_norm, k_norm, v_norm = (r.norm(given) for given in (op.q_norm, op.k_norm, op.v_norm))
    return lambda step: rope_store.store_kv(
        r.run, step[op.qkv], step[out], step.cache.layers[op.layer], step.places, op.num_heads,
        step.optional(op.angles), q_norm, k_norm, v_norm,
    )  # fmt: skip


def store_keys(r: Recorder, op: sparse_ops.StoreKeys[Value], out: Value) -> Call:
    given, rope = r.norm(op.norm), op.rope
    inv_freq: Any = None if rope is None else r.tensor(rope.inv_freq)

    bias, raw = r.tensor(op.bias), op.raw

    def call(step: CudaStep) -> None:
        x, angles, layers = step[op.x], None, step.cache.layers
        if rope is not None:
            angles = step.empty(len(x), 2 * len(inv_freq), dtype=torch.float32)
            rope_store.angles(r.run, step.positions, inv_freq, rope.scale, angles, 1 - op.size)
        if raw is None:
            rope_store.store_kv(r.run, x, None, layers[op.layer], step.places, 0, angles, k_norm=given)
        else:
            whole = x if op.gates is None else torch.cat([x, step[op.gates]], 1)
            rope_store.store_kv(r.run, whole, None, layers[raw], step.places, 0)
            entries.store_entries(
                r.run, layers[raw], layers[op.layer], step.sequences, step.positions, step.places, op.size,
                step.cache.spec.layer(op.layer).every, bias, op.overlap, given, angles,
            )  # fmt: skip
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


def prepare_queries(r: Recorder, op: ops.PrepareQueries[Value], out: Value) -> Call:
    given = r.norm(op.norm)
    return lambda step: rope_store.prepare_queries(
        r.run, step[op.q], step[out], op.num_heads, step.optional(op.angles), given
    )


def store_latent(r: Recorder, op: ops.StoreLatent[Value], out: Value) -> Call:
    given = r.norm(op.norm)
    return lambda step: rope_store.store_latent(
        r.run, step.optional(op.kv), step[op.q_latent], step[op.q_rope], step[out], step.cache.layers[op.layer],
        step.places, step[op.angles], given,
    )  # fmt: skip


def attend(r: Recorder, op: ops.Attend[Value], out: Value) -> Call:
    a = op.attention
    sinks, slopes, bias = (r.tensor(values) for values in (a.sinks, a.slopes, a.bias))
    seen = a.window or 0, a.chunk or 0, min(a.ahead, FAR)

    def call(step: CudaStep) -> None:
        layer, own = step.cache.layers[op.layer], step[out]
        chosen = step.optional(op.chosen)
        listed = 0 if chosen is None else chosen.shape[1] // op.groups * op.pool
        kept = None if op.entries is None else step.cache.layers[op.entries]
        every = 0 if op.entries is None else step.cache.spec.layer(op.entries).every
        shape, work = step.work(op.num_heads, own.shape[1] // op.num_heads, layer, *seen, listed, every)
        changes = attention.Changes(
            sinks, slopes, bias, step.optional(op.scores), chosen, op.pool, op.groups, kept
        )
        attention.attend(
            r.run, step[op.q], layer, own, step.sequences, work, shape, a.scale, a.cap or 0.0, changes
        )

    return call


def relative_scores(r: Recorder, op: RelativeScores[Value], out: Value) -> Call:
    places = torch.tensor(op.places, dtype=torch.int32, device=r.device)
    return lambda step: relative.relative_scores(
        r.run, step.optional(op.by_query), step.optional(op.by_key), places, step.sequences.cu_q, step[out],
        op.num_heads, op.scale,
    )  # fmt: skip


ENCODERS: Encoders = {
    RelativeScores: relative_scores,
    ops.RopeAngles: rope_angles,
    ops.StoreKV: store_kv,
    sparse_ops.StoreKeys: store_keys,
    sparse_ops.Choose: choose,
    ops.PrepareQueries: prepare_queries,
    ops.StoreLatent: store_latent,
    ops.Attend: attend,
}
