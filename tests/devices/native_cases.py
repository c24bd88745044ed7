"""What the tests of the native backend share: every instruction set, random weights, one-op graphs and their steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from quire import _native
from quire.devices.cpu.backend import NativeBackend
from quire.devices.cpu.pack import multiplies_pairs
from quire.devices.graph import Recorder, record
from quire.devices.ops import Embed, GatedLinear, Linear, SelectRows
from quire.devices.protocol import Backend, KVSpec, Limits, ModelInput, WeightType
from quire.weights.schemes import Quantized

ISAS = _native.available_isas()
EXACT = next(isa for isa in ISAS if "bf16" not in isa)  # never rounds activations to bfloat16
KV = KVSpec(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32")


@cache
def native(
    isa: str = "auto", threads: int = 2, compact: bool | None = None, screened: bool = True
) -> NativeBackend:
    """One backend for each set of options, so that the tests do not start thousands of threads."""
    return NativeBackend(threads, isa, compact, screened)


def rounds_activations(isa: str) -> bool:
    """Whether the set multiplies activations rounded to bfloat16 where bfloat16 holds the weights' numbers."""
    return "bf16" in isa


def seen(isa: str, x: Any, dtype: WeightType) -> Any:
    """The float activations as the set's kernels see them."""
    pairs = multiplies_pairs(dtype.layout) if isinstance(dtype, Quantized) else dtype == "bfloat16"
    plain = not isinstance(dtype, Quantized) or dtype.activations == "float"
    return to_bf16(x) if pairs and plain and rounds_activations(isa) else x


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


def to_bf16(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def int32(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def rows_step(rows: int) -> ModelInput:
    """A step of one sequence of `rows` new tokens 0..rows-1, all of whose rows are wanted."""
    numbers = np.arange(rows, dtype=np.int32)
    table = np.arange(rows, dtype=np.int32).reshape(1, -1)
    return ModelInput(numbers, numbers, int32(0, rows), int32(rows), int32(0), table, numbers)


def apply_rows(
    backend: Backend, x: np.ndarray[Any, Any], op: Callable[[Recorder, Any], Any], width: int
) -> np.ndarray[Any, Any]:
    """The rows of `x` through `op` as one step of a plan whose memory is poisoned first.

    Rows come in as a float32 embedding table, which gives them back unchanged.
    """
    rows = len(x)
    table, head = (
        backend.matrix([x], "float32"),
        backend.matrix([np.ones((rows, width), np.float32)], "float32"),
    )
    graph = record(
        lambda g: g(SelectRows(op(g, g(Embed(table))))),
        lambda g, h: g(Linear(h, head)),
        rows,
        width,
    )
    kv = backend.kv_cache(KV, rows, 1)
    executable = backend.compile(graph, kv, Limits(rows, 1, rows))
    if isinstance(backend, NativeBackend):
        executable._plan.poison()  # type: ignore[attr-defined]
    executable.run(rows_step(rows))
    return executable.hidden().copy()


def linear(backend: Backend, x: Any, w: Any, dtype: WeightType, **options: Any) -> Any:
    """x [L, K] times a weight [O, K], as `apply_rows` runs it."""
    weight = backend.matrix([w], dtype)
    return apply_rows(backend, x, lambda g, t: g(Linear(t, weight, **options)), weight.shape[0])


def gated(backend: Backend, x: Any, gate: Any, up: Any, dtype: WeightType, **options: Any) -> Any:
    """x [L, K] through a gated weight of gate and up, [I, K] each."""
    weight = backend.gated_matrix(gate, up, dtype)
    return apply_rows(backend, x, lambda g, t: g(GatedLinear(t, weight, **options)), len(gate))
