"""Operations that carry a state: drawn cases, schedules of steps, and each formula written plainly, token by token.

The plain formulas share nothing with the package: they read whole sequences, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.devices.graph import record
from quire.devices.ops import Embed, Linear, SelectRows
from quire.devices.protocol import Backend, KVLayer, KVSpec, Limits, ModelInput, StateInput, StateSpec
from quire.devices.recurrent_ops import (
    Convolve,
    DeltaRule,
    EmbedNgrams,
    GatedRecurrence,
    SelectiveScan,
    StateSpace,
    convolution_state,
    delta_state,
    gated_state,
    selective_state,
    state_space_state,
)
from tests.devices.native_cases import normal

Array = np.ndarray[Any, Any]


@dataclass
class Case:
    """An operation over the pieces of rows [T, sum of widths], its state, and its plain formula of one sequence."""

    widths: list[int]
    out: int
    spec: StateSpec
    op: Callable[..., Any]
    plain: Callable[..., Array]
    prepare: Callable[[Array], Array] = field(default=lambda x: x)
    packs: bool = False  # the operation has matrices, which a backend packs


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def convolution(
    rng: np.random.Generator,
    channels: int = 37,
    taps: int = 4,
    plain_form: bool = False,
    dilation: int = 1,
) -> Case:
    weight = normal(rng, channels, taps)
    bias = None if plain_form else normal(rng, channels)

    def plain(x: Array) -> Array:
        wide = np.concatenate([np.zeros(((taps - 1) * dilation, channels)), x])
        y = np.stack([sum(weight[:, i] * wide[t + i * dilation] for i in range(taps)) for t in range(len(x))])
        return y if bias is None else silu(y + bias)

    def op(x: Any, layer: int, state: int) -> Any:
        return Convolve(x, weight, layer, state, bias, None if plain_form else "silu", dilation)

    return Case([channels], channels, convolution_state(channels, taps, dilation), op, plain)


def ngrams(rng: np.random.Generator, longest: int = 3, each: int = 2, end: int = 3) -> Case:
    """Tables of hashed n-grams: rows of inputs begin with the number of their token, for the plain formula."""
    sizes = [int(size) for size in rng.integers(5, 90, (longest - 1) * each)]
    multipliers = [2 * int(half) + 1 for half in rng.integers(0, (1 << 62) // 40, longest)]
    tables = [normal(rng, size, 3) for size in sizes]

    def plain(x: Array) -> Array:
        ids, rows = [int(number) for number in x[:, 0]], []
        for t in range(len(ids)):
            since = max((i for i in range(t) if ids[i] == end), default=-1)
            own = [ids[t - back] if t - back > since else end for back in range(longest)]
            row = []
            for i, table in enumerate(tables):
                mixed = 0
                for number, factor in list(zip(own, multipliers, strict=True))[: i // each + 2]:
                    mixed ^= number * factor
                row.append(table[mixed % len(table)])
            rows.append(np.concatenate(row))
        return np.stack(rows)

    def numbered(x: Array) -> Array:
        return np.arange(len(x), dtype=np.float64)[:, None] + 0 * x

    def op(x: Any, layer: int, state: int, backend: Backend) -> Any:
        packed = [backend.matrix([table], "float32") for table in tables]
        return EmbedNgrams(packed, multipliers, end, layer, state)

    spec = convolution_state(1, longest)
    return Case([1], 3 * len(tables), spec, op, plain, numbered, packs=True)


def delta(
    rng: np.random.Generator,
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 8,
    value_dim: int = 12,
    by_channel: bool = False,
    bound: float = 0.0,
) -> Case:
    rates = np.exp(rng.uniform(-2, 1, value_heads)).astype(np.float32)
    keys, width = key_heads * key_dim, value_heads * value_dim
    steps_width = value_heads * key_dim if by_channel else value_heads

    def plain(x: Array) -> Array:
        q, k, v, steps, beta = np.split(x, np.cumsum([keys, keys, width, steps_width]), axis=1)
        out = np.zeros((len(x), value_heads, value_dim))
        for j in range(value_heads):
            head = slice(
                j // (value_heads // key_heads) * key_dim, (j // (value_heads // key_heads) + 1) * key_dim
            )
            S = np.zeros((key_dim, value_dim))
            for t in range(len(x)):
                step = steps[t, j * key_dim : (j + 1) * key_dim] if by_channel else steps[t, j : j + 1]
                g = bound * sigmoid(rates[j] * step) if bound else -float(rates[j]) * step
                kt = k[t, head] / np.sqrt((k[t, head] ** 2).sum() + 1e-6)
                qt = q[t, head] / np.sqrt((q[t, head] ** 2).sum() + 1e-6) / np.sqrt(key_dim)
                S = np.exp(g)[:, None] * S
                vt = v[t, j * value_dim : (j + 1) * value_dim]
                S = S + np.outer(kt, (vt - S.T @ kt) * beta[t, j])
                out[t, j] = S.T @ qt
        return out.reshape(len(x), -1)

    def prepare(x: Array) -> Array:
        first = 2 * keys + width
        x = x.copy()
        steps = x[:, first : first + steps_width]
        x[:, first : first + steps_width] = steps if bound else np.log1p(np.exp(steps))
        x[:, first + steps_width :] = sigmoid(x[:, first + steps_width :])
        return x

    def op(qkv: Any, steps: Any, beta: Any, layer: int, state: int) -> Any:
        return DeltaRule(
            qkv, steps, beta, rates, key_heads, value_heads, key_dim, value_dim, layer, state, bound
        )

    spec = delta_state(key_heads, value_heads, key_dim, value_dim, by_channel)
    return Case([2 * keys + width, steps_width, value_heads], width, spec, op, plain, prepare)


def mamba2(
    rng: np.random.Generator,
    heads: int = 4,
    head_dim: int = 12,
    groups: int = 2,
    state_dim: int = 8,
    timed: bool = True,
) -> Case:
    rates = np.exp(rng.uniform(-2, 1, heads)).astype(np.float32)
    skip = normal(rng, heads) if timed else None
    width, group = heads * head_dim, groups * state_dim

    def plain(xbc: Array) -> Array:
        x, B, C, dt = np.split(xbc, np.cumsum([width, group, group]), axis=1)
        dt = np.clip(dt, 0.1, 2.0) if timed else np.ones((len(x), heads))
        out = np.zeros((len(x), heads, head_dim))
        for h in range(heads):
            own = slice(h // (heads // groups) * state_dim, (h // (heads // groups) + 1) * state_dim)
            S = np.zeros((head_dim, state_dim))
            for t in range(len(x)):
                xt = x[t, h * head_dim : (h + 1) * head_dim]
                S = S * np.exp(-float(rates[h]) * dt[t, h]) + np.outer(dt[t, h] * xt, B[t, own])
                out[t, h] = S @ C[t, own] + (0 if skip is None else skip[h] * xt)
        return out.reshape(len(x), -1)

    def prepare(x: Array) -> Array:
        x = x.copy()
        x[:, width + 2 * group :] = np.log1p(np.exp(x[:, width + 2 * group :]))
        return x

    def op(xbc: Any, *rest: Any) -> Any:
        *dt, layer, state = rest
        sizes = heads, head_dim, groups, state_dim, layer, state
        return StateSpace(xbc, rates, *sizes, dt[0], skip, 0.1, 2.0) if dt else StateSpace(xbc, rates, *sizes)

    spec = state_space_state(heads, head_dim, groups, state_dim, timed)
    return Case([width + 2 * group, *([heads] if timed else [])], width, spec, op, plain, prepare)


def mamba1(rng: np.random.Generator, channels: int = 21, state_dim: int = 5) -> Case:
    rates = np.exp(rng.uniform(-2, 1, (channels, state_dim))).astype(np.float32)
    skip = normal(rng, channels)

    def plain(rows: Array) -> Array:
        x, dt, B, C = np.split(rows, np.cumsum([channels, channels, state_dim]), axis=1)
        S, out = np.zeros((channels, state_dim)), np.zeros((len(x), channels))
        for t in range(len(x)):
            S = S * np.exp(-rates.astype(np.float64) * dt[t][:, None]) + np.outer(dt[t] * x[t], B[t])
            out[t] = S @ C[t] + skip * x[t]
        return out

    def prepare(x: Array) -> Array:
        x = x.copy()
        x[:, channels : 2 * channels] = np.log1p(np.exp(x[:, channels : 2 * channels]))
        return x

    def op(x: Any, dt: Any, bc: Any, layer: int, state: int) -> Any:
        return SelectiveScan(x, dt, bc, rates, skip, layer, state)

    spec = selective_state(channels, state_dim)
    return Case([channels, channels, 2 * state_dim], channels, spec, op, plain, prepare)


def gated(rng: np.random.Generator, channels: int = 21) -> Case:
    rates = np.exp(rng.uniform(-6, 1, channels)).astype(np.float32)

    def plain(rows: Array) -> Array:
        x, gate, rate = np.split(rows, 3, axis=1)
        S, out = np.zeros(channels), np.zeros((len(x), channels))
        for t in range(len(x)):
            a = np.exp(-rates.astype(np.float64) * rate[t])
            S = a * S + (1 if t == 0 else np.sqrt(1 - a**2)) * gate[t] * x[t]
            out[t] = S
        return out

    def prepare(x: Array) -> Array:
        return np.concatenate([x[:, :channels], sigmoid(x[:, channels:])], axis=1)

    def op(x: Any, gate: Any, rate: Any, layer: int, state: int) -> Any:
        return GatedRecurrence(x, gate, rate, rates, layer, state)

    return Case([channels] * 3, channels, gated_state(channels), op, plain, prepare)


KINDS: dict[str, Callable[[np.random.Generator], Case]] = {
    "convolution": convolution,
    "short convolution": lambda rng: convolution(rng, 70, 3, True),
    "dilated convolution": lambda rng: convolution(rng, 37, 4, dilation=3),
    "ngrams": ngrams,
    "long ngrams": lambda rng: ngrams(rng, 5, 1, 0),
    "delta": delta,
    "delta by channel": lambda rng: delta(rng, 3, 3, 10, 17, True),
    "delta with a bound": lambda rng: delta(rng, 2, 2, 8, 16, True, -5.0),
    "mamba2": mamba2,
    "lightning": lambda rng: mamba2(rng, 3, 8, 3, 8, False),
    "mamba1": mamba1,
    "gated": gated,
}


@dataclass
class Part:
    """A sequence's part of a step: its tokens start..stop-1, of which the state takes in `kept`."""

    seq: int
    start: int
    stop: int
    kept: int
    open: int = 0
    row: int = 0
    marks: list[tuple[int, int]] = field(default_factory=list)


class Machine:
    """A graph of one operation over drawn rows, which are an embedding's: token id i is row i of `x`."""

    def __init__(
        self, backend: Backend, case: Case, x: Array, states: int = 8, num_open: int = 4, limit: int = 256
    ) -> None:
        firsts = np.cumsum([0, *case.widths])
        total = int(firsts[-1])
        table = backend.matrix([x], "float32")
        head = backend.matrix([np.ones((len(x), case.out), np.float32)], "float32")

        def body(g: Any) -> Any:
            row = g(Embed(table))
            eye = np.eye(total, dtype=np.float32)
            pieces = [
                g(Linear(row, backend.matrix([eye[first : first + width]], "float32")))
                for first, width in zip(firsts, case.widths, strict=False)
            ]
            own = (backend,) if case.packs else ()
            return g(SelectRows(g(case.op(*pieces, 1, 1, *own))))

        graph = record(body, lambda g, h: g(Linear(h, head)), len(x), case.out)
        other = convolution_state(3, 2)
        layers = KVLayer(1, 4), KVLayer(0, 4, states=(other, case.spec))
        spec = KVSpec(2, 1, 4, "float32", layers=layers)
        self.kv = backend.kv_cache(spec, 64, 16, states, num_open)
        self.executable = backend.compile(graph, self.kv, Limits(limit, 8, limit))

    def run(self, parts: list[Part], tokens: dict[int, Array]) -> list[Array]:
        """The result's rows of each part."""
        counts = [part.stop - part.start for part in parts]
        cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows = np.arange(cu[-1], dtype=np.int32)
        marks = sorted((b, *mark) for b, part in enumerate(parts) for mark in part.marks)
        own = np.array([[part.row, part.open, part.kept] for part in parts], np.int32).T
        inputs = ModelInput(
            np.concatenate([tokens[part.seq][part.start : part.stop] for part in parts]).astype(np.int32),
            np.concatenate([np.arange(part.start, part.stop) for part in parts]).astype(np.int32),
            cu,
            np.array([part.stop for part in parts], np.int32),
            np.arange(len(parts), dtype=np.int32),
            np.arange(64, dtype=np.int32).reshape(8, 8),
            rows,
            states=StateInput(
                *(np.ascontiguousarray(array) for array in own),
                np.array(marks, np.int32).reshape(-1, 3),
            ),
        )
        self.executable.run(inputs)
        found = np.array(self.executable.hidden())
        return np.split(found, cu[1:-1])

    def whole(self, tokens: Array, row: int = 0) -> Array:
        return self.run([Part(0, 0, len(tokens), len(tokens), row=row)], {0: tokens})[0]


def drawn(case: Case, rng: np.random.Generator, count: int) -> Array:
    """Rows of inputs."""
    return np.ascontiguousarray(case.prepare(normal(rng, count, sum(case.widths))), np.float32)
