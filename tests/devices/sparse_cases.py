"""Layers of sparse attention for tests: their graphs, and what they compute, written plainly, query by query."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from quire.devices.cpu.backend import NativeExecutable
from quire.devices.graph import record
from quire.devices.ops import Attend, Embed, Linear, RopeAngles, SelectRows, StoreKV, StoreLatent, Tap
from quire.devices.protocol import (
    Attention,
    Backend,
    KVDtype,
    KVLayer,
    KVSpec,
    Limits,
    ModelInput,
    Norm,
    Rope,
)
from quire.devices.sparse_ops import Choose, StoreKeys

Array = Any


@dataclass(frozen=True)
class Form:
    """A layer: its own attention, the index keys beside it, and the choice.

    own: "gqa"; "latent" of `head_dim` - 4 latent channels; "key": one key, which is the value.
    """

    own: str = "gqa"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    window: int | None = None
    sinks: bool = False
    cap: float | None = None
    index_heads: int = 3
    index_dim: int = 8
    top_k: int = 5
    weighted: bool = True
    size: int = 1
    entries: bool = False  # the index has entries in place of keys
    attends: bool = False  # attention sees the entries
    chooses: bool = True
    groups: int = 1
    local: int = 0
    tail: bool = False
    relu: bool = True
    bias: bool = False
    overlap: bool = False
    apart: bool = False  # gates are a value of their own
    turns: bool = True
    normed: bool = True

    @property
    def raw_keys(self) -> int:
        return self.index_dim * (2 if self.overlap else 1)

    @property
    def widths(self) -> list[int]:
        """Elements of the own part, of index queries, index keys, gates, weights."""
        own = self.heads * self.head_dim
        own += 2 * self.kv_heads * self.head_dim if self.own == "gqa" else self.head_dim
        gates = self.raw_keys if self.bias else 1
        return [own, self.index_heads * self.index_dim, self.raw_keys, gates, self.index_heads]

    @property
    def out(self) -> int:
        return self.heads * (self.head_dim - 4 if self.own == "latent" else self.head_dim)

    def layers(self) -> tuple[KVLayer, ...]:
        shared = {"gqa": None, "latent": self.head_dim - 4, "key": self.head_dim}[self.own]
        groups = self.kv_heads if self.own == "gqa" else 1
        index = KVLayer(1, self.index_dim, value_dim=self.index_dim, every=self.size if self.entries else 1)
        width = self.raw_keys * (2 if self.bias else 1)
        raw = KVLayer(1, width, self.size * (2 if self.overlap else 1), width)
        own = KVLayer(groups, self.head_dim, self.window or 0, shared)
        return (own, index, raw) if self.entries else (own, index)


FORMS = {
    "DeepSeek-V3.2": Form("latent", top_k=7),
    "keys of grouped queries": Form(top_k=9, sinks=True, cap=4.0, weighted=False),
    "MiniMax-M3": Form(
        index_heads=2, weighted=False, size=8, groups=2, local=1, relu=False, top_k=3, head_dim=16
    ),
    "groups of index heads": Form(index_heads=4, size=4, groups=2, local=2, top_k=4),
    "GLM-5.3-Flash": Form(
        "latent", size=16, entries=True, tail=True, bias=True, apart=True, turns=False, top_k=2
    ),
    "Qwen4-exp": Form(size=4, entries=True, tail=True, weighted=False, top_k=4),
    "DeepSeek-V4 CSA": Form(
        "key",
        window=9,
        sinks=True,
        index_dim=12,
        size=4,
        entries=True,
        attends=True,
        bias=True,
        overlap=True,
        top_k=3,
    ),
    "DeepSeek-V4 HCA": Form(
        "key", window=9, index_dim=12, size=32, entries=True, attends=True, bias=True, chooses=False
    ),
    "entries of grouped queries": Form(
        "key", heads=7, window=5, index_dim=12, size=3, entries=True, attends=True, top_k=2
    ),
}


@dataclass
class Weights:
    """What the operations of a form hold: a norm and a rope of index keys, sinks, the bias of gates."""

    norm: Norm
    rope: Rope
    latent_norm: Norm
    sinks: Array
    bias: Array
    scale: float

    @classmethod
    def drawn(cls, form: Form, rng: np.random.Generator) -> Weights:
        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape).astype(np.float32)

        d = form.index_dim
        return cls(
            Norm("layer", 1 + 0.1 * normal(d), 0.1 * normal(d), 1e-6),
            Rope(np.array([0.7, 0.03], np.float32)),
            Norm("rms", 1 + 0.1 * normal(max(1, form.head_dim - 4)), None, 1e-6),
            normal(form.heads),
            normal(form.size, form.raw_keys),
            0.37,
        )


def body(form: Form, weights: Weights, g: Any, pieces: list[Any]) -> Any:
    own, q_index, key, gates, by_head = pieces
    attention = Attention(0.3, window=form.window, cap=form.cap, sinks=weights.sinks if form.sinks else None)
    turn = g(RopeAngles(weights.rope))
    if form.own == "gqa":
        q = g(StoreKV(own[0], 0, form.heads))
    elif form.own == "latent":
        latent, rotary, kv = own
        q = g(StoreLatent(kv, latent, rotary, 0, turn, weights.latent_norm))
    else:
        q, kept = own
        g(StoreKeys(kept, 0))
    entries: dict[str, Any] = {}
    if form.entries:
        bias = weights.bias if form.bias else None
        entries = {"size": form.size, "raw": 2, "bias": bias, "overlap": form.overlap}
        if form.bias and form.apart:
            entries["gates"] = gates
    x = key if not form.bias or form.apart else key[0]
    g(StoreKeys(x, 1, weights.norm if form.normed else None, weights.rope if form.turns else None, **entries))
    chosen = None
    if form.chooses:
        chosen = g(
            Choose(
                q_index,
                1,
                form.index_heads,
                form.top_k,
                by_head if form.weighted else None,
                form.size,
                form.groups,
                form.local,
                form.tail,
                weights.scale,
                form.relu,
            )
        )
        g(Tap(chosen))
    more: dict[str, Any] = {"entries": 1} if form.attends else {"pool": form.size}
    return g(Attend(q, 0, form.heads, attention, chosen=chosen, groups=form.groups, **more))


@dataclass
class Part:
    """A sequence's part of a step: its tokens start..stop-1; its block table is row `seq`."""

    seq: int
    start: int
    stop: int


class Machine:
    """A graph of one layer over drawn rows, which are an embedding's: token id i is row i of `x`."""

    def __init__(
        self,
        backend: Backend,
        form: Form,
        weights: Weights,
        x: Array,
        dtype: KVDtype = "float32",
        block_size: int = 16,
        seed: int = 0,
        length: int = 128,
    ) -> None:
        self.form, firsts = form, np.cumsum([0, *form.widths]).tolist()
        total = firsts[-1]
        table = backend.matrix([x], "float32")
        head = backend.matrix([np.ones((len(x), form.out), np.float32)], "float32")
        eye = np.eye(total, dtype=np.float32)

        def take(g: Any, row: Any, *columns: range) -> Any:
            rows = np.concatenate([eye[own.start : own.stop] for own in columns])
            return g(Linear(row, backend.matrix([rows], "float32")))

        def graph_body(g: Any) -> Any:
            row = g(Embed(table))
            whole = [range(a, b) for a, b in pairwise(firsts)]
            pieces = [take(g, row, own) for own in whole]
            n, h = form.heads, form.head_dim
            if form.own == "gqa":
                pieces[0] = [pieces[0]]
            elif form.own == "key":
                pieces[0] = [take(g, row, range(0, n * h)), take(g, row, range(n * h, n * h + h))]
            else:
                c = h - 4
                parts = range(0, n * c), range(n * c, n * h), range(n * h, n * h + h)
                pieces[0] = [take(g, row, part) for part in parts]
            if form.bias and not form.apart:
                pieces[2] = [take(g, row, whole[2], whole[3])]
            return g(SelectRows(body(form, weights, g, pieces)))

        graph = record(graph_body, lambda g, y: g(Linear(y, head)), len(x), form.out)
        layers = form.layers()
        spec = KVSpec(len(layers), 2, form.head_dim, dtype, layers=layers)
        blocks = -(-length // block_size)
        self.kv = backend.kv_cache(spec, 6 * blocks, block_size)
        order = np.random.default_rng(seed).permutation(6 * blocks)
        self.tables = order.astype(np.int32).reshape(6, blocks)
        self.executable = backend.compile(graph, self.kv, Limits(2 * length, 6, 2 * length))
        if isinstance(self.executable, NativeExecutable):
            self.executable._plan.poison()

    def run(self, parts: list[Part], tokens: dict[int, Array]) -> list[tuple[Array, Array]]:
        """Rows of the result and of the choice, of each part."""
        cu = np.cumsum([0, *(part.stop - part.start for part in parts)]).astype(np.int32)
        inputs = ModelInput(
            np.concatenate([tokens[p.seq][p.start : p.stop] for p in parts]).astype(np.int32),
            np.concatenate([np.arange(p.start, p.stop) for p in parts]).astype(np.int32),
            cu,
            np.array([part.stop for part in parts], np.int32),
            np.array([part.seq for part in parts], np.int32),
            self.tables,
            np.arange(cu[-1], dtype=np.int32),
        )
        self.executable.run(inputs)
        found = np.array(self.executable.hidden())
        taps = self.executable.taps()
        chosen = np.array(taps[0]) if taps else np.zeros((len(found), 0), np.float32)
        return list(zip(np.split(found, cu[1:-1]), np.split(chosen, cu[1:-1]), strict=True))

    def whole(self, tokens: Array, seq: int = 0) -> tuple[Array, Array]:
        return self.run([Part(seq, 0, len(tokens))], {seq: tokens})[0]


def turned(x: Array, rope: Rope, position: int) -> Array:
    """Rope on the first channels, halves, of the last axis."""
    angles = position * rope.inv_freq.astype(np.float64)
    half = len(angles)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def normed(x: Array, norm: Norm) -> Array:
    x = x - x.mean() if norm.kind == "layer" else x
    y = x / np.sqrt((x * x).mean() + norm.eps) * norm.weight
    return y if norm.bias is None else y + norm.bias


def plain(form: Form, weights: Weights, rows: Array) -> tuple[Array, list[list[list[int]]]]:
    """The result [T, out] and the choice of each query and group, from the rows of a sequence's tokens, in float64."""
    bounds = np.cumsum(form.widths)[:-1]
    own, q_index, key, gates, by_head = np.split(rows.astype(np.float64), bounds, axis=1)
    index = index_keys(form, weights, key, gates)
    out, choices = [], []
    for t in range(len(rows)):
        seen = len(index) if not form.entries else (t + 1) // form.size
        seen = min(seen, t + 1)
        chosen = [
            choice(form, weights, q_index[t], by_head[t], index[:seen], t, g) for g in range(form.groups)
        ]
        choices.append(chosen)
        out.append(attended(form, weights, own, index, t, chosen))
    return np.array(out), choices


def index_keys(form: Form, weights: Weights, key: Array, gates: Array) -> Array:
    found = []
    for first in range(
        0, len(key) - (form.size - 1 if form.entries else 0), form.size if form.entries else 1
    ):
        if not form.entries:
            one = key[first]
        elif not form.bias:
            one = key[first : first + form.size].mean(0)
        else:
            k, z = key[first : first + form.size], gates[first : first + form.size] + weights.bias
            if form.overlap:
                d = form.index_dim
                k, z = k[:, d:], z[:, d:]
                if first:
                    before = slice(first - form.size, first)
                    k = np.concatenate([key[before, :d], k])
                    z = np.concatenate([gates[before, :d] + weights.bias[:, :d], z])
            shares = np.exp(z - z.max(0))
            one = (shares / shares.sum(0) * k).sum(0)
        one = normed(one, weights.norm) if form.normed else one
        found.append(turned(one, weights.rope, first) if form.turns else one)
    return np.array(found).reshape(-1, form.index_dim)


def choice(
    form: Form, weights: Weights, q: Array, by_head: Array, keys: Array, t: int, group: int
) -> list[int]:
    each = form.index_heads // form.groups
    scores: Any = np.zeros(len(keys))
    for h in range(group * each, (group + 1) * each):
        product = weights.scale * (keys * q.reshape(form.index_heads, -1)[h]).sum(
            1
        )  # equal keys, equal scores
        product = np.maximum(product, 0) if form.relu else product
        scores += (by_head[h] if form.weighted else 1) * product
    pools: dict[int, Any] = dict(enumerate(scores))
    own = t // form.size
    if not form.entries:
        pools = {p: max(scores[p * form.size : (p + 1) * form.size]) for p in range(own + 1)}
    for near in range(max(0, own - form.local + 1), own + 1) if form.local else ():
        pools[near] = math.inf
    best = sorted(pools, key=lambda p: (-pools[p], p))[: form.top_k]
    if form.tail and (t + 1) % form.size:
        best.append(own)
    return sorted(best)


def attended(
    form: Form, weights: Weights, own: Array, index: Array, t: int, chosen: list[list[int]]
) -> Array:
    n, g, h = form.heads, form.kv_heads, form.head_dim
    if form.own == "gqa":
        q = own[t, : n * h].reshape(n, h)
        keys = own[: t + 1, n * h : (n + g) * h].reshape(t + 1, g, h)
        values = own[: t + 1, (n + g) * h :].reshape(t + 1, g, h)
    else:
        g, kept = 1, own[: t + 1, n * h :]
        q = own[t, : n * h].reshape(n, h)
        if form.own == "latent":
            c = h - 4
            latent, rotary = own[t, : n * c].reshape(n, c), own[t, n * c : n * h].reshape(n, 4)
            q = np.concatenate([latent, turned(rotary, weights.rope, t)], axis=1)
            kept = np.array(
                [
                    np.concatenate([normed(row[:c], weights.latent_norm), turned(row[c:], weights.rope, i)])
                    for i, row in enumerate(kept)
                ]
            )
        keys = kept[:, None]
        values = keys[..., : h - 4] if form.own == "latent" else keys
    first = 0 if form.window is None else max(0, t - form.window + 1)
    heads = []
    for head in range(n):
        group = head * g // n
        visible = list(range(first, t + 1))
        numbers = chosen[group if form.groups > 1 else 0] if form.chooses else []
        if form.chooses and not form.attends:
            visible = [p for p in visible if p // form.size in numbers]
        k, v = keys[visible, group], values[visible, group]
        if form.attends:
            more = numbers if form.chooses else list(range((t + 1) // form.size))
            k = np.concatenate([k, index[more]])
            v = np.concatenate([v, index[more]])
        scores = 0.3 * k @ q[head]
        scores = scores if form.cap is None else form.cap * np.tanh(scores / form.cap)
        if form.sinks:
            scores = np.append(scores, weights.sinks[head])
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        heads.append(shares[: len(v)] @ v)
    return np.concatenate(heads)


def drawn(form: Form, rng: np.random.Generator, count: int) -> Array:
    """Rows of inputs."""
    return rng.standard_normal((count, sum(form.widths))).astype(np.float32)


def without_choice(form: Form) -> Form:
    """The same layer, whose queries see everything."""
    return replace(form, chooses=False)
