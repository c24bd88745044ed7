"""Engine directories of GPUs: packed weights come back bit for bit, and descriptions that cannot be are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import torch

from quire.build import build_engine
from quire.config import EngineConfig
from quire.devices.cuda import stored
from quire.devices.cuda.backend import CudaBackend
from quire.devices.cuda.blocks import PROBES
from quire.devices.cuda.loading import Ring
from quire.devices.cuda.pack import CudaMatrix
from quire.devices.registry import make_backend
from quire.engine.source import quantized_weights
from quire.errors import ModelError, ResourceError
from quire.model.engine_dir import read_manifest, write_manifest
from quire.weights.layouts import AnyLayout, Blocks, Int4, Int8
from quire.weights.layouts.blocks import KINDS
from quire.weights.schemes import Kept, Quantized
from tests.devices.cuda.test_layouts import WIDE, logits
from tests.gguf_files import write_gguf
from tests.models import load_model
from tests.quantize.test_run import quantize
from tests.tiny import write_checkpoint

CPU = torch.device("cpu")
LAYOUTS: dict[str, AnyLayout] = {
    "int8": Int8(),
    **{
        f"int4 {group} {scales} {symmetric}": Int4(group_size=group, symmetric=symmetric, scales=scales)
        for group in (32, 128)
        for scales in ("float32", "bfloat16")
        for symmetric in (True, False)
    },
    **{kind: Blocks(kind) for kind in PROBES},
}


def backend(device: str = "interpreter") -> Any:
    return make_backend(threads=1, device=device)


def drawn(rows: int, columns: int) -> Any:
    return np.random.default_rng(rows + columns).standard_normal((rows, columns)).astype(np.float32)


def packed(layout: AnyLayout, gated: bool = False, activations: Any = "float") -> Any:
    """Two parts of a layout as one weight."""
    parts: list[Any] = [drawn(6, 256), drawn(6, 256) * 2]
    if isinstance(layout, Blocks):
        about = KINDS[layout.kind]
        width = about.row + 256 // about.columns * about.nbytes
        draw = np.random.default_rng(width)
        parts = [layout.tensor(draw.integers(0, 60, (6, width), dtype=np.uint8)) for _ in parts]
    dtype = Quantized(layout, activations)
    return backend().gated_matrix(*parts, dtype) if gated else backend().matrix(parts, dtype)


def assert_same(found: CudaMatrix, wanted: CudaMatrix) -> None:
    assert (found.shape, found.form, found.gated) == (wanted.shape, wanted.form, wanted.gated)
    for one, other in zip(found.tensors, wanted.tensors, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_weights_come_back_bit_for_bit(name: str, gated: bool) -> None:
    layout = LAYOUTS[name]
    for activations in ("float",) if isinstance(layout, Blocks) else ("float", "int8"):
        matrix = packed(layout, gated, activations)
        about, data = backend().export(matrix)
        assert_same(backend().restore(about, data), matrix)
        outline = backend().outline().restore(about, data)
        assert (outline.form, outline.nbytes) == (matrix.form, matrix.nbytes)


def same_from_a_directory(model: Path, tmp_path: Path, **options: Any) -> None:
    """Weights and logits of a directory are those of the checkpoint."""
    config = EngineConfig.from_options(model=str(model), device="interpreter", **options)
    build_engine(config, tmp_path / "engine")
    read: dict[str, Any] = {"quantized": load_asked(config)}
    ours, theirs = load_model(tmp_path / "engine", backend()), load_model(model, backend(), **read)
    for path, weight in theirs.decoder.weights.items():
        if isinstance(weight, CudaMatrix):
            assert_same(ours.decoder.weights[path], weight)
    prompt = [3, 9, 4]
    assert np.array_equal(logits(tmp_path / "engine", prompt), logits(model, prompt, **read))


def load_asked(config: EngineConfig) -> Any:
    return quantized_weights(config.model, Path(config.model.model))


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"quantization": "int8wo"},
        {"quantization": "int4", "quantization_symmetric": False},
        {"quantization": "fp8"},
        {"quantization": "nvfp4"},
        {"quantization": "mxfp4"},
    ],
    ids=lambda options: options["quantization"],
)
def test_a_quantized_build_is_its_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    same_from_a_directory(write_checkpoint(tmp_path / "model", "llama", **WIDE), tmp_path, **options)


def test_a_tied_table_is_one_weight(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", **WIDE, tie_word_embeddings=True)
    same_from_a_directory(model, tmp_path, quantization="int8")


@pytest.mark.parametrize("name", ["gptq", "awq", "smoothquant", "squeezellm", "fp8", "nvfp4", "mxfp4"])
def test_a_build_of_a_quantized_checkpoint_is_that_checkpoint(name: Any, tmp_path: Path) -> None:
    quantize(write_checkpoint(tmp_path / "in", "llama", **WIDE), tmp_path / "out", name)
    same_from_a_directory(tmp_path / "out", tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_and_heads_of_a_quantized_build(family: str, tmp_path: Path) -> None:
    same_from_a_directory(write_checkpoint(tmp_path / "model", family), tmp_path, quantization="int8")


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_build_of_a_gguf_file_keeps_its_codes(kind: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", "llama", **WIDE)
    same_from_a_directory(write_gguf(source, tmp_path / "model.gguf", "llama", kind), tmp_path)
    manifest = load_model(tmp_path / "engine", backend()).info
    assert isinstance(manifest.quantized, Kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "uint8 64 zeros e2m1"}, "a GPU has no weights of"),
        ({"dtype": 8}, "no description of a GPU's"),
        ({"shape": [12, 256, 1]}, "no description of a GPU's"),
        ({"shape": [0, 256]}, "no description of a GPU's"),
        ({"shape": [1 << 30, 1 << 30]}, "cannot be"),
        ({"shape": [12, 512]}, "is described as|cannot be"),
        ({"shape": [10, 256]}, "is described as"),
        ({"shape": [11, 256], "gated": True}, "cannot be"),
        ({"gated": "yes"}, "no description of a GPU's"),
        ({"further": 1}, "no description of a GPU's"),
        ({"dtype": "float8_e4m3fn 128", "rounds": True}, "cannot be"),
        ({"dtype": "bfloat16", "rounds": True}, "cannot be"),
        ({"dtype": "float32"}, "is described as"),
    ],
)
def test_a_description_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    about, data = backend().export(packed(Int4(symmetric=False)))
    for device in (backend(), backend().outline()):
        with pytest.raises(ModelError, match=message) as said:
            device.restore({**about, **change}, data)
        assert "\n" not in str(said.value)
        for cut in (data[:-1], data[:0], np.concatenate([data, data])):
            with pytest.raises(ModelError, match="bytes"):
                device.restore(about, cut)


def test_a_target_without_the_type_refuses_it() -> None:
    about, data = backend().export(packed(Blocks("e4m3_128")))
    with pytest.raises(ModelError, match="does not convert float8_e4m3fn 128"):
        stored.restore(about, data, Ring(CPU), e4m3=False)


class Full(CudaBackend):
    """Has no memory for one weight."""

    def gated_matrix(self, *given: Any) -> Any:
        raise ResourceError("no memory left")


def test_errors_name_the_weight(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", **WIDE)
    with pytest.raises(ResourceError, match=r"^layers\.0\.mlp\.[a-z_]+: no memory left"):
        load_model(model, Full(None, backend().choices))
    build_engine(EngineConfig.from_options(model=str(model), device="interpreter"), tmp_path / "engine")
    manifest = read_manifest(tmp_path / "engine")
    path = next(path for path in manifest.tensors if path.startswith("layers.0.mlp."))
    about = {**manifest.tensors[path].about, "dtype": "int3"}
    tensors = {**manifest.tensors, path: msgspec.structs.replace(manifest.tensors[path], about=about)}
    write_manifest(tmp_path / "engine", msgspec.structs.replace(manifest, tensors=tensors))
    with pytest.raises(ModelError, match=rf"{re.escape(path)}: a GPU has no weights of 'int3'"):
        load_model(tmp_path / "engine", backend())
