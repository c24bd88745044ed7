"""Every layout of docs/quantization.md is served on a device, or refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

from quire.devices.cuda.blocks import PROBES, taken_apart
from quire.devices.cuda.kernels.packed import PackedWeight
from quire.devices.ops import GatedLinear, Linear
from quire.devices.protocol import Limits, ModelInput
from quire.devices.registry import make_backend
from quire.errors import ConfigError
from quire.quantize.methods import Name
from quire.weights.layouts import Blocks
from quire.weights.layouts.blocks import KINDS
from quire.weights.schemes import FLOAT_KINDS, Kept, Quantized, scheme
from quire.weights.tensor import QuantTensor
from tests.gguf_files import write_gguf
from tests.models import load_model
from tests.quantize.test_run import quantize
from tests.shared import DATA, cases_of, require
from tests.tiny import write_checkpoint

QUANTIZED = DATA / "quantized"
EVERY = [
    path for path in QUANTIZED.glob("*") if (path / "expected.npz").exists() and path.name[:6] != "float-"
]
FIRST = {path.name.split("-")[0]: path for path in sorted(EVERY, reverse=True)}
REFUSED = {
    "ct-int8-w8a8-static": "no GPU kernel rounds activations as the checkpoint says: choose --quantization-activations",
}
MIXTURES = ["ct-moe-w4a16-g32", "gptq-moe-4bit-g32"]
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}


def logits(model: Path, tokens: list[int], device: str = "interpreter", **more: Any) -> Any:
    backend = make_backend(threads=1, device=device)
    loaded, places = load_model(model, backend, **more), np.arange(len(tokens), dtype=np.int32)

    def row(*values: int) -> Any:
        return np.array(values, np.int32)

    kv = backend.kv_cache(loaded.info.kv_spec("float32"), 2, 16)
    executable = backend.compile(loaded.graph, kv, Limits(16, 1, 16))
    bounds, length = row(0, len(tokens)), row(len(tokens))
    step = ModelInput(row(*tokens), places, bounds, length, row(0), row(1).reshape(1, 1), places)
    return executable.run(step).numpy()


CHECKED = [*FIRST.values(), *(path for path in EVERY if path.name in MIXTURES)]


@pytest.mark.parametrize("folder", cases_of(QUANTIZED, sorted(CHECKED)), ids=lambda path: path.name)
def test_a_checkpoint_of_each_method_gives_its_logits(folder: Path) -> None:
    expected = np.load(folder / "expected.npz")
    found = logits(folder, expected["prompt"].tolist()[:6])
    assert np.abs(found - expected["logits"][:6]).max() < 0.04


@pytest.mark.parametrize("name", REFUSED)
def test_other_forms_are_refused_by_name(name: str) -> None:
    folder = require(QUANTIZED / name)
    with pytest.raises(ConfigError, match=REFUSED[name]):
        logits(folder, [1])


@pytest.mark.parametrize("name", [name for name in get_args(Name) if name != "int8-static"])
def test_what_quire_quantize_writes_is_served(name: Name, tmp_path: Path) -> None:
    quantize(
        write_checkpoint(tmp_path / "in", "llama", **WIDE, num_key_value_heads=4), tmp_path / "out", name
    )
    here, there = (logits(tmp_path / "out", [3, 9, 4], device) for device in ("interpreter", "cpu"))
    assert np.abs(here - there).max() < 0.02 * np.abs(there).max()


@pytest.mark.parametrize("name", ["int8", "int8wo", "int4", "int4wo", *FLOAT_KINDS])
def test_every_quantization_is_served(name: str, tmp_path: Path) -> None:
    model, asked = write_checkpoint(tmp_path, "llama", **WIDE), scheme(name, rounds=True)
    here, there = (logits(model, [3, 9, 4], device, quantized=asked) for device in ("interpreter", "cpu"))
    assert np.abs(here - there).max() < 0.02 * np.abs(there).max()


def test_a_layout_that_no_kernel_multiplies_is_refused_by_name() -> None:
    layout, backend = Blocks("lut4", entries=3), make_backend(threads=1, device="interpreter")
    assert not backend.takes(layout)
    with pytest.raises(ConfigError, match=r"no GPU kernel multiplies LUT4 weights of this form"):
        backend.matrix([layout.outline(4, 64)], Quantized(layout, "float"))


def test_every_kind_of_blocks_keeps_its_codes() -> None:
    assert PROBES.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", PROBES)
def test_blocks_taken_apart_have_the_values_of_their_layout(kind: str) -> None:
    about, draw = KINDS[kind], np.random.default_rng(len(kind))
    raw = draw.integers(0, 256, (6, about.row + 3 * about.nbytes), dtype=np.uint8)
    layout = Blocks(kind)
    if kind[:4] in ("e4m3", "e5m2", "mxfp"):
        raw &= 0x7B  # no infinity and no NaN
    if kind.startswith("lut"):
        raw[:, : about.row] &= 0x3F
    values = layout.dequantize(layout.tensor(raw))
    finite = np.isfinite(values).all(1) & (np.abs(values).max(1) < 1e30)
    apart = taken_apart(layout.tensor(raw))
    packed = PackedWeight.pack(
        apart.form, apart.codes, apart.scales, offsets=apart.offsets, table=apart.table
    )
    found = packed.values().numpy()
    assert finite.any()
    for row, wanted in zip(found[finite], values[finite], strict=True):
        np.testing.assert_allclose(row, wanted, rtol=2e-6, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("kinds", [("q4_k", "q6_k"), ("q8_0", "q4_0"), ("mxfp4", "nvfp4")])
def test_parts_of_several_kinds_become_one_weight(kinds: tuple[str, str]) -> None:
    tensors, draw = list[QuantTensor](), np.random.default_rng(1)
    for kind in kinds:
        width = KINDS[kind].row + 256 // KINDS[kind].columns * KINDS[kind].nbytes
        tensors.append(Blocks(kind).tensor(draw.integers(0, 60, (16, width), dtype=np.uint8)))
    matrix = make_backend(threads=1, device="interpreter").matrix(
        tensors, Quantized(Blocks(kinds[0]), "int8")
    )
    wanted = np.concatenate([tensor.dequantize() for tensor in tensors])
    np.testing.assert_allclose(matrix.dequantize(), wanted, rtol=2e-6, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_files_of_gguf_keep_their_codes(kind: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", "llama", **WIDE)
    file = write_gguf(source, tmp_path / "model.gguf", "llama", kind)
    floats = Kept("float")
    here, there = (logits(file, [3, 9, 4], device, quantized=floats) for device in ("interpreter", "cpu"))
    assert np.abs(here - there).max() < 1e-2 * np.abs(there).max()
    weights = load_model(file, make_backend(threads=1, device="interpreter"), quantized=floats).graph.ops
    forms = {op.weight.form[0] for op in weights if isinstance(op, (Linear, GatedLinear))}
    assert forms == {PROBES[kind.lower()].form}
