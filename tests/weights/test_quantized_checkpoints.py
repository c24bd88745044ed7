"""Checkpoints that the formats' own libraries wrote: each weight as its library decodes it, and the logits it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.devices.cpu.backend import NativeBackend
from quire.devices.reference.backend import ReferenceBackend
from quire.weights.layouts import Int4
from quire.weights.schemes import Kept
from quire.weights.source import open_source
from tests.devices.native_cases import EXACT, native
from tests.model.tiny_models import Session
from tests.models import load_model
from tests.shared import DATA, cases_of, needs

QUANTIZED = DATA / "quantized"
FOLDERS = sorted(
    path for path in QUANTIZED.glob("*") if (path / "expected.npz").exists() and path.name[:6] != "float-"
)
OTHERS = ("prompt", "logits", "logits_act")

pytestmark = needs(QUANTIZED)


@pytest.mark.parametrize("folder", cases_of(QUANTIZED, FOLDERS), ids=lambda path: path.name)
def test_weights_are_those_of_the_format_s_library(folder: Path) -> None:
    expected = np.load(folder / "expected.npz")
    checkpoint = open_source(folder).tensors()
    names = set(checkpoint.names())
    weights = [name for name in expected.files if name not in OTHERS]
    assert weights
    for name in weights:
        assert name in names
        right = expected[name]
        if folder.name == "mxfp4-gpt-oss":  # transformers keeps these with inputs first
            right = right.swapaxes(-1, -2)
        got = checkpoint.get(name).astype(np.float32)
        assert checkpoint.shape(name) == right.shape
        # bitsandbytes multiplies by 1/127 where the format divides by 127.
        np.testing.assert_allclose(got, right, rtol=2e-7 if folder.name == "bnb-int8" else 0, atol=0)
        if checkpoint.layout(name) is not None:
            rows = np.arange(right.size // right.shape[-1])[::-1]
            held = checkpoint.quantized(name, rows).dequantize()
            np.testing.assert_array_equal(held, got.reshape(-1, got.shape[-1])[rows])


@pytest.mark.parametrize("folder", cases_of(QUANTIZED, FOLDERS), ids=lambda path: path.name)
def test_a_model_gives_its_logits(folder: Path) -> None:
    """In float32 as transformers computes them; codes that a layout holds give the same without being decoded."""
    expected = np.load(folder / "expected.npz")
    backend = native(EXACT)
    checkpoint = open_source(folder).tensors()
    sizes: dict[str, Any] = {}
    for dtype in ("float32", "auto"):
        model = load_model(folder, backend, dtype)  # type: ignore[arg-type]
        logits = Session(model, backend).feed(expected["prompt"].tolist())
        exact = dtype == "float32" or model.dtype == "float32"
        rounds = isinstance(model.info.quantized, Kept) and model.info.quantized.activations == "checkpoint"
        right = expected["logits_act" if rounds else "logits"]  # W8A8 is multiplied as integers
        assert np.abs(logits - right).max() < (1e-4 if exact else 0.03)
        sizes[dtype] = model.weight_bytes
        held = dtype == "auto" and any(checkpoint.layout(name) for name in checkpoint.names())
        assert (model.info.quantized is not None) == held
    # Projections that were ordered apart from each other (on random activations here) are not stacked, but decoded.
    apart = "desc-act" in folder.name or "g-idx" in folder.name
    assert sizes["auto"] <= sizes["float32"] * (0.75 if apart else 0.65 if held else 1)


@pytest.mark.parametrize(
    "name", ["awq-gemm-g32", "gptq-4bit-g32-desc-act", "ct-w4a16-g128", "gptq-moe-4bit-g32"]
)
def test_activations_in_int8_beside_weights_of_4_bits(name: str) -> None:
    """W4A8: the oracle rounds each row to int8 and multiplies the decoded weights."""
    folder = QUANTIZED / name
    expected, logits = np.load(folder / "expected.npz"), []
    for backend in (NativeBackend(threads=2), ReferenceBackend()):
        model = load_model(folder, backend, quantized=Kept("int8"))
        assert isinstance(model.info.quantized, Kept)
        assert isinstance(model.info.quantized.layout, Int4)
        assert model.info.quantized == Kept("int8", ("int4",), model.info.quantized.layout)
        logits.append(Session(model, backend).feed(expected["prompt"].tolist()))
    assert np.abs(logits[0] - logits[1]).max() < 0.05
    assert 1e-3 < np.abs(logits[1] - expected["logits"]).max() < 0.6
