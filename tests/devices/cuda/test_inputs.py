"""Weights whose columns have an order and factors of their own: products have the bits of those of arranged inputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import msgspec
import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from quire.devices import ops
from quire.devices.cuda.encoders.products import codes_of, head_linear, multiply
from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.pack import CudaMatrix
from quire.devices.registry import make_backend
from quire.errors import ModelError
from quire.weights.layouts import AnyLayout, Blocks, Int4, Int8
from quire.weights.schemes import Quantized
from quire.weights.tensor import Inputs, QuantTensor
from tests.devices.cuda.test_layouts import WIDE, logits
from tests.devices.cuda.test_stored import assert_same, backend, same_from_a_directory
from tests.models import load_model
from tests.quantize.test_run import quantize
from tests.tiny import write_checkpoint

RUN = InterpretedLauncher()
COLUMNS = 160
CASES: list[tuple[AnyLayout, Any]] = [
    (Int8(), "int8"), (Int4(32), "float"), (Int4(32, False), "int8"), (Blocks("e4m3"), "float"),
]  # fmt: skip


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(sum(shape) + seed).standard_normal(shape).astype(np.float32)


def inputs(seed: int = 1, factors: bool = True) -> Inputs:
    draw = np.random.default_rng(seed)
    given = draw.random(COLUMNS) + 0.5 if factors else np.ones(COLUMNS)
    return Inputs(draw.permutation(COLUMNS).astype(np.int32), given.astype(np.float32))


def tensors(layout: AnyLayout, own: Inputs, count: int = 2) -> list[QuantTensor]:
    marked = msgspec.structs.replace(layout, inputs=True)
    plain = [layout.quantize(drawn(24, COLUMNS, seed=part)) for part in range(count)]
    return [replace(tensor, layout=marked, inputs=own) for tensor in plain]


def packed(parts: list[QuantTensor], dtype: Quantized, gated: bool = False) -> Any:
    return backend().gated_matrix(*parts, dtype) if gated else backend().matrix(parts, dtype)


def product(x: Any, weight: CudaMatrix, **about: Any) -> Any:
    out = torch.full((len(x), weight.shape[0] // (2 if about.get("gated") else 1)), torch.nan).to(x.dtype)
    multiply(RUN, x, codes_of(RUN, x), weight, out, **about)
    return out


@pytest.mark.parametrize(("layout", "activations"), CASES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("factors", [False, True])
def test_products_are_those_of_arranged_inputs(
    layout: AnyLayout, activations: Any, gated: bool, factors: bool
) -> None:
    own, dtype = inputs(factors=factors), Quantized(layout, activations)
    given = tensors(layout, own)
    plain = [replace(tensor, layout=layout, inputs=None) for tensor in given]
    arranged, usual = packed(given, dtype, gated), packed(plain, dtype, gated)
    assert arranged.form == usual.form
    assert arranged.nbytes - usual.nbytes == 8 * COLUMNS
    values = np.concatenate([tensor.dequantize() for tensor in given])
    np.testing.assert_array_equal(arranged.dequantize(), values)
    for act in (torch.float32, torch.bfloat16):
        x = torch.from_numpy(drawn(70, COLUMNS)).to(act)
        seen = (x.float()[:, own.order] * torch.from_numpy(own.factors)).to(act)
        about = {"gated": True, "activation": "silu"} if gated else {"bias": torch.from_numpy(drawn(48))}
        every = product(x, arranged, **about)
        assert torch.equal(every, product(seen, usual, **about))
        for rows in ([5], [69, 5], list(range(17))):
            assert torch.equal(product(x[rows], arranged, **about), every[rows])


@pytest.mark.parametrize(("layout", "activations"), CASES[:2], ids=str)
def test_heads_have_inputs_of_their_own(layout: AnyLayout, activations: Any) -> None:
    """Also beside a head whose inputs are as they come."""
    owns, dtype = [inputs(1), inputs(2)], Quantized(layout, activations)
    given = [tensors(layout, own, 1) for own in owns]
    given.append([replace(given[0][0], layout=layout, inputs=None)])
    weights = [packed(parts, dtype) for parts in given]
    x, out = torch.from_numpy(drawn(5, 3 * COLUMNS)), torch.full((5, 72), torch.nan)
    recorder: Any = SimpleNamespace(run=RUN, tensor=lambda values: None)
    call = head_linear(recorder, ops.HeadLinear(ops.Value(0), tuple(weights)), ops.Value(1))
    call({0: x, 1: out})  # type: ignore[arg-type]
    for head, weight in enumerate(weights):
        alone = product(x[:, head * COLUMNS : (head + 1) * COLUMNS].contiguous(), weight)
        assert torch.equal(out[:, head * 24 : head * 24 + 24], alone)


def test_they_come_back_bit_for_bit_and_no_other_order() -> None:
    matrix = packed(tensors(Int4(32), inputs()), Quantized(Int4(32), "int8"))
    about, data = backend().export(matrix)
    assert_same(backend().restore(about, data), matrix)
    assert backend().outline().restore(about, data).nbytes == matrix.nbytes
    for wrong in (-1, COLUMNS, np.nan, 0.5):
        changed = data.copy()
        changed[-8 * COLUMNS :].view(np.float32)[3] = wrong
        with pytest.raises(ModelError, match="a weight's inputs are no order"):
            backend().restore(about, changed)
    with pytest.raises(ModelError, match="is described as"):
        backend().restore({**about, "inputs": False}, data)
    with pytest.raises(ModelError, match=r"cannot be|is described as"):
        backend().restore({**about, "dtype": "float32"}, data)


def act_order(folder: Path) -> Path:
    """Give each column of a GPTQ checkpoint's weights the group of another, in one order for each width."""
    for file in folder.glob("*.safetensors"):
        found = load_file(file)
        for name, values in found.items():
            if name.endswith("g_idx"):
                found[name] = np.random.default_rng(len(values)).permutation(values)
        save_file(found, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("options", [{}, {"quantization_activations": "int8"}], ids=["float", "int8"])
def test_act_order_keeps_its_codes(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    quantize(write_checkpoint(tmp_path / "in", family, **WIDE), tmp_path / "out", "gptq")
    model = act_order(tmp_path / "out")
    here, there = (logits(model, [3, 9, 4], device) for device in ("interpreter", "cpu"))
    assert np.abs(here - there).max() < 0.02 * np.abs(there).max()
    weights = load_model(model, make_backend(threads=1, device="interpreter")).decoder.weights
    forms = [one for one in weights.values() if isinstance(one, CudaMatrix) and one.packed is not None]
    assert forms
    assert all(one.inputs is not None for one in forms)
    same_from_a_directory(model, tmp_path, **options)
