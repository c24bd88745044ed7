"""Each matrix product's share of the machine's limit, measured in the same minute. Knows shapes; loads no model.

    python bench/kernels.py [--models S,M,T] [--rows 1,4,32,1024] [--weights bfloat16] [--threads N] [--isa auto]
    python bench/kernels.py --no-compact        bfloat16 weights in 16 bits, not 12
    python bench/kernels.py --attention [--models S,M]
    python bench/kernels.py --experts [--rows 1,8,32] [--weights int8]

Few rows are limited by reading weights: GB/s beside the read bandwidth. Many are limited by arithmetic: GFLOP/s beside
the peak of multiply-adds. Product and limit take turns of equal length, since a shared machine changes while it is
watched; a line is the median turn. Shapes: S is Qwen3-0.6B, M is Llama-3.2-1B, T a Llama of 15 M parameters.
Attention is one layer of it over a bfloat16 cache: chunks of 1,024 tokens beside the peak of what it computes in
(bfloat16 where the CPU multiplies it, else float32), and single tokens beside the read bandwidth. Experts are a layer
of a mixture beside the read bandwidth, counting those that some token chose: E has 64, Q has 128 and is Qwen3-30B-A3B.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire import _native
from quire.devices.cpu.backend import NativeBackend
from quire.devices.graph import record
from quire.devices.ops import Embed, Linear, Route, RunExperts, SelectRows
from quire.devices.protocol import Expert, KVSpec, Limits, ModelInput, Routing
from quire.weights.gguf.kinds import KINDS, PLAIN
from quire.weights.layouts import Blocks, Int4, Int8
from quire.weights.layouts.blocks import ROUNDED
from quire.weights.layouts.blocks.make import byte_rows, lut_rows, table_rows
from quire.weights.schemes import Quantized, WeightType

STREAMING_BYTES = 128 << 20  # weights of a line together: more than caches hold
ROUNDS = 9
GGUF_BLOCKS = [kind.name.lower() for kind in KINDS.values() if kind.name not in PLAIN]
TYPES: dict[str, WeightType] = {
    **{kind: Quantized(Blocks(kind), "int8") for kind in GGUF_BLOCKS},
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8": Quantized(Int8()),
    "int8wo": Quantized(Int8(), "float"),
    "int4": Quantized(Int4(64)),
    "int4wo": Quantized(Int4(64), "float"),
    # As quantized checkpoints are held: GPTQ and AWQ with groups of 128, then the others.
    "gptq": Quantized(Int4(128, True, "float32"), "float"),
    "gptq-int8": Quantized(Int4(128, True, "float32"), "int8"),
    "awq": Quantized(Int4(128, False, "float32"), "float"),
    "fp8": Quantized(Blocks("e4m3"), "float"),
    "fp8-128": Quantized(Blocks("e4m3_128"), "float"),
    "nvfp4": Quantized(Blocks("nvfp4"), "float"),
    "nvfp4-int8": Quantized(Blocks("nvfp4"), "int8"),
    "mxfp4": Quantized(Blocks("mxfp4"), "float"),
    "nf4": Quantized(Blocks("nf4"), "float"),
    "lut4": Quantized(Blocks("lut4"), "float"),
    "lut3": Quantized(Blocks("lut3"), "float"),
}


@dataclass(frozen=True)
class Shape:
    """A product of a model: weight [outputs, columns]."""

    model: str
    name: str
    outputs: int
    columns: int
    gated: bool = False


SHAPES = [
    Shape("S", "qkv", 4096, 1024),
    Shape("S", "out", 1024, 2048),
    Shape("S", "gate_up", 6144, 1024, gated=True),
    Shape("S", "down", 1024, 3072),
    Shape("S", "head", 151936, 1024),
    Shape("M", "qkv", 3072, 2048),
    Shape("M", "out", 2048, 2048),
    Shape("M", "gate_up", 16384, 2048, gated=True),
    Shape("M", "down", 2048, 8192),
    Shape("M", "head", 128256, 2048),
    Shape("T", "qkv", 864, 288),
    Shape("T", "out", 288, 288),
    Shape("T", "gate_up", 1536, 288, gated=True),
    Shape("T", "down", 288, 768),
    Shape("T", "head", 32000, 288),
]


@dataclass(frozen=True)
class Heads:
    """A model's attention: query heads, kv heads and head_dim."""

    model: str
    query: int
    kv: int
    dim: int


HEADS = [Heads("S", 16, 8, 128), Heads("M", 32, 8, 64), Heads("T", 6, 6, 48)]
STEPS = [  # sequences, new tokens of each, tokens in the cache with them
    (1, 1024, 1024),
    (1, 1024, 8192),
    (1, 1024, 32768),
    (32, 1, 1024),
    (1, 1, 8192),
    (1, 1, 32768),
]
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Mixture:
    """A layer of experts."""

    model: str
    hidden: int
    inner: int
    experts: int
    chosen: int


MIXTURES = [Mixture("E", 1024, 512, 64, 8), Mixture("Q", 2048, 768, 128, 8)]


def peak_kind(backend: NativeBackend, dtype: WeightType) -> str:
    """What multiplies: bytes for rounded activations, bfloat16 pairs where the set has them, else float32."""
    return backend.arithmetic(dtype)


def make_weights(backend: NativeBackend, shape: Shape, dtype: WeightType, total: int) -> list[Any]:
    """As many copies of a random weight as fill `total` bytes, at least one."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((shape.outputs, shape.columns), np.float32) / np.float32(shape.columns**0.5)
    half = shape.outputs // 2
    parts = [held(part, dtype) for part in ([values[:half], values[half:]] if shape.gated else [values])]

    def make() -> Any:
        if shape.gated:
            return backend.gated_matrix(parts[0], parts[1], dtype).packed
        return backend.matrix(parts, dtype).packed

    first = make()
    return [first] + [make() for _ in range(total // first.nbytes - 1)]


def held(values: Any, dtype: WeightType) -> Any:
    """Floats as blocks, if the type is one; codes of tables are random."""
    layout = dtype.layout if isinstance(dtype, Quantized) else None
    if not isinstance(layout, Blocks):
        return values
    if layout.kind in ROUNDED:
        return layout.quantize(values)
    rng, (rows, columns) = np.random.default_rng(1), values.shape
    if layout.kind in GGUF_BLOCKS:  # bytes of which any two are a float16 between 0.0005 and 1
        return layout.tensor(rng.integers(0x10, 0x3C, layout.outline(rows, columns).codes.shape, np.uint8))
    codes = rng.integers(0, 16, values.shape, np.uint8)
    if layout.kind == "nf4":
        return layout.tensor(table_rows(codes, np.full((rows, columns // 64), 0.01, np.float32)))
    if layout.kind.startswith("lut"):
        bits = int(layout.kind[3:])
        tables = rng.standard_normal((rows, 1 << bits), np.float32)
        return layout.tensor(lut_rows(bits, codes >> np.uint8(4 - bits), tables))
    return layout.tensor(byte_rows(layout.kind, codes, np.ones((rows, columns // 128), np.float32), 128))


def measure(backend: NativeBackend, weights: list[Any], rows: int, kind: str) -> tuple[float, float, float]:
    """(seconds, limit, share) of the median turn of a product and its limit."""
    outputs, columns = weights[0].shape
    work = weights[0].nbytes if kind == "read" else 2 * rows * outputs * columns
    turns = _native.compare_linear(backend.isa, backend.pool, weights, rows, kind, ROUNDS)
    shares = sorted((work / turn.seconds / turn.limit, turn.seconds, turn.limit) for turn in turns)
    share, seconds, limit = shares[len(shares) // 2]
    return seconds, limit, share


def measure_attention(
    backend: NativeBackend, heads: Heads, seqs: int, q_len: int, kv_len: int
) -> tuple[float, float, float]:
    """(seconds, limit, share) of a layer's attention, beside the peak or, of single tokens, the read bandwidth."""
    rng = np.random.default_rng(0)
    blocks = kv_len // BLOCK_SIZE
    shape = (seqs * blocks, heads.kv, heads.dim, BLOCK_SIZE)
    keys = rng.integers(0x3C00, 0x3F00, shape, np.uint16)  # bfloat16 between 0.008 and 0.5
    cache = _native.AttentionCache(keys, keys.reshape(shape[0], heads.kv, BLOCK_SIZE, heads.dim))
    q = rng.standard_normal((seqs * q_len, heads.query, heads.dim), np.float32)
    out = np.empty_like(q)
    table = rng.permutation(seqs * blocks).astype(np.int32).reshape(seqs, blocks)
    numbers = np.arange(seqs + 1, dtype=np.int32)
    lengths = np.full(seqs, kv_len, np.int32)

    def run() -> float:
        start = time.perf_counter()
        _native.attention(
            backend.isa, backend.pool, cache, q, out, numbers * q_len, lengths, numbers[:-1], table,
            heads.dim**-0.5, 0,
        )  # fmt: skip
        return time.perf_counter() - start

    if q_len == 1:
        work = 2 * seqs * kv_len * heads.kv * heads.dim * keys.itemsize
    else:
        seen = kv_len - (q_len - 1) / 2  # positions a query sees, on average
        work = 4 * seqs * q_len * seen * heads.query * heads.dim
    turns = []
    for _ in range(ROUNDS):
        seconds = statistics.mean(run() for _ in range(3))
        if q_len == 1:
            limit = _native.measure_read_bandwidth(STREAMING_BYTES, backend.threads)
        else:
            limit = _native.measure_peak(peak_kind(backend, "bfloat16"), backend.threads, backend.isa)
        turns.append((work / seconds / limit, seconds, limit))
    share, seconds, limit = sorted(turns)[len(turns) // 2]
    return seconds, limit, share


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_experts(
    backend: NativeBackend, mixture: Mixture, dtype: WeightType, rows: int
) -> tuple[float, float, float]:
    """(seconds, limit, share) of a layer of experts beside the read bandwidth."""
    rng = np.random.default_rng(0)
    hidden, inner = mixture.hidden, mixture.inner

    def random(outputs: int, columns: int) -> Any:
        return rng.standard_normal((outputs, columns), np.float32) / np.float32(columns**0.5)

    gate, up, down = (
        held(random(*shape), dtype) for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    experts = [
        Expert(backend.gated_matrix(gate, up, dtype), None, backend.matrix([down], dtype), None)
        for _ in range(mixture.experts)
    ]
    x, scores = random(rows, hidden), random(mixture.experts, hidden)
    table, router = backend.matrix([x], "float32"), backend.matrix([scores], "float32")
    head = backend.matrix([np.ones((1, hidden), np.float32)], "float32")
    routing = Routing(mixture.experts, mixture.chosen)

    def layer(g: Any) -> Any:
        tokens = g(Embed(table))
        return g(RunExperts(tokens, g(Route(g(Linear(tokens, router)), routing)), experts, "silu"))

    graph = record(lambda g: g(SelectRows(layer(g))), lambda g, h: g(Linear(h, head)), 1, hidden)
    kv = backend.kv_cache(KVSpec(1, 1, 4, "float32"), rows, 1)
    executable = backend.compile(graph, kv, Limits(1024, rows, rows))
    numbers = np.arange(rows, dtype=np.int32)
    ends = np.arange(rows + 1, dtype=np.int32)
    step = ModelInput(
        numbers, np.zeros_like(numbers), ends, np.ones_like(numbers), numbers, numbers[:, None], numbers
    )
    drawn = len(np.unique(np.argsort(-(x @ scores.T), axis=1)[:, : mixture.chosen]))
    read = drawn * (experts[0].up.nbytes + experts[0].down.nbytes)
    turns = []
    executable.run(step)
    for _ in range(ROUNDS):
        seconds = min(timed(lambda: executable.run(step)) for _ in range(1 + STREAMING_BYTES // read))
        limit = _native.measure_read_bandwidth(STREAMING_BYTES, backend.threads)
        turns.append((read / seconds / limit, seconds, limit))
    share, seconds, limit = sorted(turns)[len(turns) // 2]
    return seconds, limit, share


def show(name: str, streaming: bool, seconds: float, limit: float, share: float) -> None:
    unit, value = ("GB/s", "read") if streaming else ("GFLOP/s", "peak")
    print(
        f"{name}  {seconds * 1e6:10.1f} us  {share * limit / 1e9:8.1f} {unit:8} {value} {limit / 1e9:7.1f}  "
        f"share {share:.2f}",
        flush=True,
    )


def show_attention(backend: NativeBackend, models: list[str]) -> None:
    for heads in HEADS:
        for seqs, q_len, kv_len in STEPS if heads.model in models else []:
            figures = measure_attention(backend, heads, seqs, q_len, kv_len)
            show(f"{heads.model} attention {seqs:3} x {q_len:4} of {kv_len:5}", q_len == 1, *figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models")
    parser.add_argument("--rows")
    parser.add_argument("--weights", choices=list(TYPES), default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", default="auto")
    parser.add_argument(
        "--compact", action=argparse.BooleanOptionalAction, help="bfloat16 weights in 12 bits"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--attention", action="store_true", help="attention instead of matrix products")
    kinds.add_argument("--experts", action="store_true", help="layers of experts instead of matrix products")
    options = parser.parse_args()
    models = (options.models or ("E,Q" if options.experts else "S,M,T")).split(",")
    rows_of = [
        int(rows) for rows in (options.rows or ("1,8,32" if options.experts else "1,4,32,1024")).split(",")
    ]
    backend = NativeBackend(options.threads, options.isa, options.compact)
    if options.attention:
        return show_attention(backend, models)
    dtype = TYPES[options.weights]
    if options.experts:
        for mixture in MIXTURES:
            for rows in rows_of if mixture.model in models else []:
                show(
                    f"{mixture.model} experts {rows:5} rows",
                    True,
                    *measure_experts(backend, mixture, dtype, rows),
                )
        return None
    peak = peak_kind(backend, dtype)
    print(f"{backend.name}, {options.weights} weights, peak of {peak}")
    shares: dict[bool, list[float]] = {True: [], False: []}
    for shape in SHAPES:
        if shape.model not in models:
            continue
        for rows in rows_of:
            if shape.name == "head" and rows > 64:
                continue  # no step asks for so many logits at once
            streaming = rows <= 8
            weights = make_weights(backend, shape, dtype, STREAMING_BYTES if streaming else 1)
            seconds, limit, share = measure(backend, weights, rows, "read" if streaming else peak)
            show(f"{shape.model} {shape.name:8} {rows:5} rows", streaming, seconds, limit, share)
            shares[streaming].append(share)
    for streaming, label in ((True, "of the read bandwidth"), (False, "of the peak")):
        if shares[streaming]:
            print(f"median share {label}: {statistics.median(shares[streaming]):.2f}")


if __name__ == "__main__":
    main()
