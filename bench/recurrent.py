"""Operations that carry a state, beside the machine's limit in the same minute. Knows shapes; loads no model.

    python bench/recurrent.py [--threads N] [--isa auto] [--prompt 1024] [--sequences 1,32]

Decoding is limited by reading states: bytes of S beside the read bandwidth (S is also written). A prompt is limited by
arithmetic: multiply-adds beside the peak of float32. `of products` compares a prompt's scan with a product of as many
rows and bfloat16 weights that has the multiply-adds of the layer's projections: qkv, gate and out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire import _native
from quire.devices.cpu.backend import NativeBackend
from quire.devices.graph import record
from quire.devices.ops import Embed, Linear, Receive
from quire.devices.protocol import KVLayer, KVSpec, Limits, ModelInput, StateInput, StateSpec
from quire.devices.recurrent_ops import (
    Convolve,
    DeltaRule,
    StateSpace,
    convolution_state,
    delta_state,
    state_space_state,
)

ROUNDS = 7


@dataclass
class Shape:
    """An operation of a model: the width of its first input, those of the others, and multiply-adds of a token."""

    name: str
    layers: int
    spec: StateSpec
    width: int
    others: list[int]
    work: int
    op: Callable[..., Any]
    projections: tuple[int, int] = (0, 0)


def ones(*shape: int) -> Any:
    return np.full(shape, 0.1, np.float32)


SHAPES = [
    Shape(
        "Qwen3.5-0.8B delta", 18, delta_state(16, 16, 128, 128), 6144, [16, 16], 3 * 16 * 128 * 128,
        lambda x, steps, beta: DeltaRule(x, steps, beta, ones(16), 16, 16, 128, 128, 0, 0), (1024, 10240),
    ),
    Shape(
        "Qwen3.5-0.8B conv", 18, convolution_state(6144, 4), 6144, [], 4 * 6144,
        lambda x: Convolve(x, ones(6144, 4), 0, 0, None, "silu"),
    ),
    Shape(
        "Nemotron-3-Nano mamba2", 23, state_space_state(64, 64, 8, 128), 6144, [64], 2 * 64 * 64 * 128,
        lambda x, dt: StateSpace(x, ones(64), 64, 64, 8, 128, 0, 0, dt, ones(64)), (2688, 14400),
    ),
    Shape(
        "Nemotron-3-Nano conv", 23, convolution_state(6144, 4), 6144, [], 4 * 6144,
        lambda x: Convolve(x, ones(6144, 4), 0, 0, ones(6144), "silu"),
    ),
]  # fmt: skip


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def executable(
    backend: NativeBackend, shape: Shape, tokens: int, seqs: int, states: int
) -> Callable[..., Any]:
    """A step of `seqs` sequences with `tokens` tokens each, over rows of states from a number on."""
    rng, total = np.random.default_rng(0), tokens * seqs
    tables = [backend.matrix([ones(total, width)], "float32") for width in shape.others]
    graph = record(
        lambda g: g(shape.op(g(Receive(shape.width)), *(g(Embed(table)) for table in tables))),
        None, total, shape.width,
    )  # fmt: skip
    spec = KVSpec(1, 0, 4, "float32", layers=(KVLayer(0, 4, states=(shape.spec,)),))
    found = backend.compile(graph, backend.kv_cache(spec, 1, tokens, states), Limits(total, seqs, 1))
    hidden = rng.standard_normal((total, shape.width), np.float32)
    number, zeros = np.arange(seqs, dtype=np.int32), np.zeros(seqs, np.int32)

    def run(first: int) -> None:
        kept = StateInput(
            number + np.int32(first), zeros, zeros + np.int32(tokens), np.zeros((0, 3), np.int32)
        )
        found.run(
            ModelInput(
                np.arange(total, dtype=np.int32), np.tile(np.arange(tokens, dtype=np.int32), seqs),
                np.arange(seqs + 1, dtype=np.int32) * np.int32(tokens), zeros + np.int32(tokens), zeros,
                np.zeros((1, 1), np.int32), np.zeros(0, np.int32), hidden_TD=hidden, states=kept,
            )
        )  # fmt: skip

    return run


def decoding(backend: NativeBackend, shape: Shape, seqs: int) -> None:
    size = 4 * int(np.prod(shape.spec.shape))
    states = max(seqs, (128 << 20) // size // seqs * seqs)  # more than caches hold
    run, turns = executable(backend, shape, 1, seqs, states), []
    for _ in range(ROUNDS):
        took = min(seconds_of(lambda at=at: run(at)) for at in range(0, states, seqs))
        limit = _native.measure_read_bandwidth(128 << 20, backend.threads)
        turns.append((seqs * size / took / limit, took, limit))
    share, took, limit = sorted(turns)[ROUNDS // 2]
    show(
        f"{shape.name} {seqs:4} x 1",
        took,
        share * limit,
        "GB/s",
        limit,
        share,
        f"{took * shape.layers * 1e3:.2f} ms",
    )


def prompt(backend: NativeBackend, shape: Shape, tokens: int) -> None:
    run, turns = executable(backend, shape, tokens, 1, 1), []
    product = None
    if shape.projections[0]:
        inner, outputs = shape.projections
        weight = backend.matrix([ones(outputs, inner)], "bfloat16")
        graph = record(lambda g: g(Linear(g(Receive(inner)), weight)), None, 1, inner)
        kv = backend.kv_cache(KVSpec(1, 1, 4, "float32"), tokens, 1)
        dense = backend.compile(graph, kv, Limits(tokens, 1, 1))
        numbers, zero = np.arange(tokens, dtype=np.int32), np.zeros(1, np.int32)
        step = ModelInput(
            numbers * 0, numbers, np.array([0, tokens], np.int32), zero + np.int32(tokens), zero, numbers[None],
            np.zeros(0, np.int32), hidden_TD=ones(tokens, inner),
        )  # fmt: skip
        product = lambda: dense.run(step)  # noqa: E731
    for _ in range(ROUNDS):
        took = min(seconds_of(lambda: run(0)) for _ in range(3))
        limit = _native.measure_peak("fp32", backend.threads, backend.isa)
        other = seconds_of(product) if product else 0.0
        turns.append((2 * tokens * shape.work / took / limit, took, limit, took / other if other else 0.0))
    share, took, limit, beside = sorted(turns)[ROUNDS // 2]
    note = f"{beside:.2f} of products" if beside else ""
    show(f"{shape.name} 1 x {tokens}", took, share * limit, "GFLOP/s", limit, share, note)


def show(name: str, took: float, rate: float, unit: str, limit: float, share: float, note: str) -> None:
    print(
        f"{name:30} {took * 1e6:9.1f} us {rate / 1e9:8.1f} {unit:7} of {limit / 1e9:7.1f}  share {share:.2f}  {note}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--sequences", default="1,32")
    options = parser.parse_args()
    backend = NativeBackend(options.threads, options.isa)
    print(backend.name)
    for shape in SHAPES:
        for seqs in map(int, options.sequences.split(",")):
            decoding(backend, shape, seqs)
        prompt(backend, shape, options.prompt)


if __name__ == "__main__":
    main()
