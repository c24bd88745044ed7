"""Dummy weights of a GPU: made on the device from shapes alone, always the same, and as wide as those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import numpy as np
import torch

from quire.devices.cuda.pack import CudaMatrix, random_matrix
from quire.model import dummy
from quire.model.dummy import STANDARD_DEVIATION, DummyCheckpoint
from quire.model.info import Reading
from quire.weights.schemes import Quantized, scheme
from tests.devices.cuda.test_layouts import WIDE, logits
from tests.devices.cuda.test_stored import LAYOUTS, assert_same, backend
from tests.models import load_model
from tests.tiny import write_checkpoint

DUMMY = Reading(dummy=True)


@pytest.mark.parametrize("name", ["bfloat16", *LAYOUTS])
@pytest.mark.parametrize("gated", [False, True])
def test_random_weights_of_each_form(name: str, gated: bool) -> None:
    dtype: Any = Quantized(LAYOUTS[name], "float") if name in LAYOUTS else name
    parts: list[Any] = [LAYOUTS[name].outline(48, 512) if name in LAYOUTS else np.empty((48, 512))] * 2
    outline = backend().outline()
    matrix = outline.gated_matrix(*parts, dtype) if gated else outline.matrix(parts, dtype)
    made, again, other = (random_matrix(matrix, torch.device("cpu"), 0.02, seed) for seed in (1, 1, 2))
    assert (made.shape, made.form, made.gated, made.nbytes) == (
        matrix.shape, matrix.form, gated, matrix.nbytes,
    )  # fmt: skip
    assert_same(made, again)
    values = made.dequantize()
    assert not np.array_equal(values, other.dequantize())
    assert 0.017 < values.std() < 0.023
    assert abs(values.mean()) < 0.004
    assert len(np.unique(values, axis=0)) == 96


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
def test_large_weights_are_not_read(
    quantization: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = write_checkpoint(tmp_path, "mixtral", **WIDE), list[tuple[int, ...]]()

    class Reads(DummyCheckpoint):
        def get(self, name: str) -> Any:
            values = super().get(name)
            read.append(values.shape)
            return values

    monkeypatch.setattr(dummy, "DummyCheckpoint", Reads)
    asked = None if quantization is None else scheme(quantization, rounds=True)
    first, second = (load_model(model, backend(), quantized=asked, reading=DUMMY) for _ in range(2))
    assert read
    assert all(len(shape) == 1 or shape[0] <= 8 for shape in read), "norms and routers alone"
    large = {path: weight for path, weight in first.decoder.weights.items() if isinstance(weight, CudaMatrix)}
    assert len(large) > 8
    for path, weight in large.items():
        assert_same(weight, second.decoder.weights[path])  # type: ignore[arg-type]
        assert 0.5 < weight.dequantize().std() / STANDARD_DEVIATION < 1.5, path
    found = logits(model, [3, 9, 4], quantized=asked, reading=DUMMY)
    assert np.isfinite(found).all()
    assert found.std() > 1e-3
