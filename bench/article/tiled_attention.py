"""The speed of attention: tiles with a running softmax beside a matrix of all scores."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bench.article.curves import Curves
from bench.article.study import ENGINES, Claim, Result, Setting, Study
from quire import _native
from quire.devices.cpu.backend import NativeBackend

LENGTHS = (256, 512, 1024, 2048, 4096)
HEADS, KV_HEADS, DIM, BLOCK = 16, 8, 128, 16
ROUNDS = 3


def measure(setting: Setting) -> Result:
    device = setting.config.device
    backend = NativeBackend(device.threads or 2, device.isa)
    most = max(2, round(len(LENGTHS) * setting.scale))
    rows: list[tuple[str | float, ...]] = []
    curves: dict[str, list[tuple[float, float]]] = {"tiles": [], "all scores": []}
    ratios = []
    for length in LENGTHS[:most]:
        tiled, whole = setting.once(f"{length} tokens", partial(_both, backend, length))
        operations = 2 * length * (length + 1) * HEADS * DIM
        ratios.append(whole / tiled)
        rows.append(
            (f"{length:,}", 1e3 * tiled, operations / tiled / 1e9, 1e3 * whole, f"{whole / tiled:.1f} x")
        )
        curves["tiles"].append((length, 1e3 * tiled))
        curves["all scores"].append((length, 1e3 * whole))
    return Result(
        ("tokens", "tiles, ms", "GFLOP/s", "all scores, ms", "tiles are faster"),
        rows,
        f"Tiles are {min(ratios):.1f} to {max(ratios):.1f} times as fast as a matrix of all scores.",
        f"Causal attention of one layer, {HEADS} heads of {DIM} over {KV_HEADS} KV heads, one prompt. All scores: "
        "numpy's matrix products (OpenBLAS, all cores) in float32, head by head, the softmax in place; results are "
        "compared.",
        Curves("tokens", "ms", curves),
    )


def _both(backend: NativeBackend, length: int) -> list[float]:
    """Measure seconds of both; they must agree."""
    rng = np.random.default_rng(0)
    blocks = length // BLOCK
    keys = rng.standard_normal((length, KV_HEADS, DIM)).astype(ml_dtypes.bfloat16)
    values = rng.standard_normal((length, KV_HEADS, DIM)).astype(ml_dtypes.bfloat16)
    paged = (blocks, BLOCK, KV_HEADS, DIM)
    cache = _native.AttentionCache(
        np.ascontiguousarray(keys.reshape(paged).transpose(0, 2, 3, 1)).view(np.uint16),
        np.ascontiguousarray(values.reshape(paged).transpose(0, 2, 1, 3)).view(np.uint16),
    )
    q = rng.standard_normal((length, HEADS, DIM), np.float32)
    out = np.empty_like(q)
    one = np.array([length], np.int32)
    table = np.arange(blocks, dtype=np.int32)[None]

    def tiles() -> None:
        zero = np.zeros(1, np.int32)
        ends = np.array([0, length], np.int32)
        _native.attention(backend.isa, backend.pool, cache, q, out, ends, one, zero, table, DIM**-0.5, 0)

    plain = np.empty_like(q)
    k, v = (np.ascontiguousarray(a.astype(np.float32).transpose(1, 0, 2)) for a in (keys, values))
    hidden = np.triu(np.full((length, length), -np.inf, np.float32), 1)

    def whole() -> None:
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = q[:, head] @ k[group].T
            scores *= np.float32(DIM**-0.5)
            scores += hidden
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=1, keepdims=True)
            plain[:, head] = scores @ v[group]

    found = [min(_seconds(run) for _ in range(ROUNDS)) for run in (tiles, whole)]
    np.testing.assert_allclose(out, plain, atol=0.05)
    return found


def _seconds(run: Any) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


STUDY = Study(
    "Speed of attention",
    (Claim("FlashAttention makes attention 2 to 4 times as fast", (ENGINES,)),),
    measure,
)
