"""Greedy steps find the largest logit by the head's screen: the same token as from all logits, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from quire.devices.cpu.backend import NativeBackend, NativeExecutable
from quire.devices.graph import record
from quire.devices.ops import Embed, Linear, SelectRows
from quire.devices.protocol import Limits, WeightType
from quire.weights.layouts import Int4, Int8
from quire.weights.schemes import Quantized
from tests.devices.native_cases import ISAS, KV, native, normal, rows_step, to_bf16

LAYOUTS: dict[str, tuple[WeightType, bool | None]] = {
    "float32": ("float32", None),
    "float16": ("float16", None),
    "bfloat16": ("bfloat16", False),
    "bfloat16 in 12 bits": ("bfloat16", True),
}


class Head:
    """A plan of a head alone: rows of x come in as an embedding and go to the head."""

    def __init__(
        self,
        backend: NativeBackend,
        x: Any,
        w: Any,
        dtype: WeightType = "float32",
        at_once: int | None = None,
    ) -> None:
        self.matrix = backend.head([w], dtype)
        table = backend.matrix([x], "float32")
        graph = record(
            lambda g: g(SelectRows(g(Embed(table)))),
            lambda g, h: g(Linear(h, self.matrix)),
            len(w),
            x.shape[1],
        )
        limits = Limits(len(x), 1, at_once or len(x))
        executable = backend.compile(graph, backend.kv_cache(KV, len(x), 1), limits)
        assert isinstance(executable, NativeExecutable)
        self.executable, self.step = executable, rows_step(len(x))

    def run(self, greedy: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Logits, NaN where nothing was written, and the best."""
        self.executable._plan.poison()
        logits = self.executable.run(replace(self.step, greedy=greedy))
        assert logits.best is not None
        return logits.values.copy(), logits.best.copy()

    def check(self) -> int:
        """The best is that of all logits, and its logit is there. Returns how many rows were screened."""
        whole, wanted = self.run(False)
        logits, best = self.run(True)
        assert best.tolist() == wanted.tolist() == whole.argmax(axis=1).tolist()
        rows = np.arange(len(best))
        assert np.array_equal(logits[rows, best], whole[rows, best])
        return int((logits != whole).any(axis=1).sum())


def peaked(rng: np.random.Generator, rows: int, w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows of x whose largest outputs stand out as those of a model do."""
    return w[rng.integers(0, len(w), rows)] + 0.5 * normal(rng, rows, w.shape[1])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 14, 15, 33, 70])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("isa", ISAS)
def test_the_best_is_that_of_all_logits(isa: str, layout: str, rows: int) -> None:
    dtype, compact = LAYOUTS[layout]
    rng = np.random.default_rng(rows)
    for vocab, width in ((16, 8), (1000, 64), (517, 129), (2050, 288)):
        w = normal(rng, vocab, width)
        head = Head(native(isa, compact=compact), peaked(rng, rows, w), w, dtype)
        screened = head.check()
        if vocab > 1000 and (rows == 1 or isa.startswith("avx")):
            assert screened == rows


@pytest.mark.parametrize("width", [1, 3, 40, 700, 1300, 2600])
@pytest.mark.parametrize("threads", [1, 3, 9])
def test_any_width_and_any_threads(threads: int, width: int) -> None:
    rng = np.random.default_rng(width)
    w = normal(rng, 1200, width)
    for rows in (1, 2, 20):
        Head(native(threads=threads), peaked(rng, rows, w), w, "bfloat16").check()


@pytest.mark.parametrize("isa", ISAS)
def test_outputs_that_rounding_to_int8_cannot_tell_apart(isa: str) -> None:
    """Rows of the weight that differ in their last bits, some equal: the first of the largest is found."""
    rng = np.random.default_rng(5)
    w = normal(rng, 4000, 96)
    for i in range(0, 4000, 40):
        w[i : i + 4] = w[i] * (1 + rng.integers(-2, 3, (4, 1)).astype(np.float32) * np.float32(2**-20))
    for dtype in ("float32", "bfloat16"):
        for start in range(0, 400, 40):
            head = Head(native(isa), w[start : start + 1] + 0.01 * normal(rng, 1, 96), w, dtype)
            assert head.check() == 1


def test_rows_that_are_computed_piece_by_piece() -> None:
    rng = np.random.default_rng(6)
    w = normal(rng, 2000, 64)
    x = peaked(rng, 7, w)
    wanted = Head(native(), x, w).run(False)[1]
    head = Head(native(), x, w, at_once=3)
    found = head.run(True)[1].tolist()
    for start, stop in ((3, 6), (6, 7)):
        best = head.executable.logits(start, stop).best
        assert best is not None
        found += best.tolist()
    assert found == wanted.tolist()


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e-3, 1e4, 9e7])
def test_magnitudes(scale: float) -> None:
    rng = np.random.default_rng(7)
    w = normal(rng, 1000, 64)
    x = (peaked(rng, 2, w) * np.float32(scale)).astype(np.float32)
    Head(native(), x, w, "bfloat16").check()
    Head(native(), peaked(rng, 2, w), (w * np.float32(scale)).astype(np.float32), "bfloat16").check()
    Head(native(), x, w - np.float32(4), "float32").check()  # all logits may be negative


def test_few_large_activations() -> None:
    """As hidden states of models have them: int8 leaves little of the others, and bounds are wide."""
    rng = np.random.default_rng(11)
    w, x = normal(rng, 3000, 128), normal(rng, 8, 128)
    x[:, 5] *= 300
    Head(native(), x, w, "bfloat16").check()


def test_where_too_many_may_be_the_largest_all_are_computed() -> None:
    rng = np.random.default_rng(3)
    w = np.repeat(normal(rng, 1, 64), 1000, axis=0)
    head = Head(native(), peaked(rng, 1, w), w)
    assert head.check() == 0
    # The same shape where few may be: it is the values that decide.
    easy = normal(rng, 1000, 64)
    head = Head(native(), peaked(rng, 1, easy), easy)
    assert head.check() == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e11])
def test_values_that_no_screen_takes(value: float) -> None:
    rng = np.random.default_rng(4)
    w = normal(rng, 1000, 64)
    assert native().export(native().head([w], "float32"))[0]["screened"]
    x = peaked(rng, 2, w)
    x[1, 3] = value
    head = Head(native(), x, w)
    with np.errstate(invalid="ignore"):
        whole, wanted = head.run(False)
        logits, best = head.run(True)
    assert np.array_equal(logits, whole, equal_nan=True)
    assert best.tolist() == wanted.tolist()
    w[70, 1] = value
    assert not native().export(native().head([w], "float32"))[0]["screened"]


def test_weights_without_a_screen() -> None:
    w = normal(np.random.default_rng(2), 100, 64)
    for backend, dtype in (
        (native(screened=False), "float32"),
        (native(), Quantized(Int8())),
        (native(), Quantized(Int4(32))),
    ):
        matrix = backend.head([w], dtype)  # type: ignore[arg-type]
        assert not backend.export(matrix)[0].get("screened", False)
        assert matrix.nbytes == backend.matrix([w], dtype).nbytes  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("isa", ISAS)
def test_the_screen_is_the_weight_in_int8_with_bounds(isa: str, layout: str) -> None:
    """Read back from the packed bytes (csrc/linear/format.h, MatrixView)."""
    dtype, compact = LAYOUTS[layout]
    backend, w = native(isa, compact=compact), normal(np.random.default_rng(9), 37, 90)
    w[5] = 0
    data = backend.export(backend.head([w], dtype))[1]
    values = np.zeros((48, 92))
    values[:37, :90] = to_bf16(w) if dtype == "bfloat16" else w.astype(dtype)
    panels = data[-3 * (92 * 16 + 192) :].reshape(3, -1)
    held = panels[:, : 92 * 16].reshape(3, 23, 16, 4).swapaxes(1, 2).reshape(48, 92).astype(int) - 128
    scale, length, rounding = (
        panels[:, 92 * 16 :].copy().view(np.float32).reshape(3, 3, 16).swapaxes(0, 1).reshape(3, 48)
    )
    rounded = held * scale[:, None].astype(float)
    assert np.abs(held).max() == 127
    assert np.abs(rounded - values).max() <= scale.max() * 0.5001
    norms = np.maximum(np.linalg.norm(values, axis=1), np.linalg.norm(rounded, axis=1))
    apart = np.linalg.norm(values - rounded, axis=1)
    assert (length >= norms).all()
    assert (length[:37] <= norms[:37] * 1.02).all()
    assert (rounding >= apart).all()
    assert (rounding[:37] <= apart[:37] * 1.01).all()
    assert (rounding[37:] > 1e19).all(), "rows that are padding must not say what the largest is at least"


def test_restored_weights_are_screened(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, rng = native(), np.random.default_rng(8)
    w = normal(rng, 1000, 64)
    about, data = backend.export(backend.head([w], "bfloat16"))
    memory = np.empty(len(data) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    aligned = memory[start : start + len(data)]
    aligned[:] = data
    restored = backend.restore(about, aligned)
    monkeypatch.setattr(NativeBackend, "head", lambda *_: restored)
    assert Head(backend, peaked(rng, 1, w), w).check() == 1
