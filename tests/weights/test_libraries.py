"""Weights that the formats' own libraries pack here, in bits, groups and types that no sample has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.quantize import formats
from quire.weights.checkpoint import open_checkpoint
from quire.weights.readers import load_reader

bitsandbytes = pytest.importorskip("bitsandbytes.functional")
compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")

ROWS, COLUMNS = 64, 256


def weight(rows: int = ROWS, columns: int = COLUMNS) -> Any:
    generator = torch.Generator().manual_seed(rows + columns)
    wide = torch.randn(rows, columns, generator=generator)
    wide[3, 5] = 9.0
    return wide * torch.rand(rows, 1, generator=generator)


def check(path: Path, method: str, settings: dict[str, Any], right: Any, tolerance: float = 0) -> Any:
    """The weight "a" as the reader decodes it, and as a layout holds it, if one does."""
    checkpoint = load_reader(method)(open_checkpoint(path), settings=settings)
    assert list(checkpoint.names()) == ["a.weight"]
    got = np.asarray(checkpoint.get("a.weight"), np.float32)
    right = right.detach().float().numpy()
    np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance * np.abs(right).max())
    if checkpoint.layout("a.weight") is not None:
        held = checkpoint.quantized("a.weight", np.arange(len(got))[::-1])
        np.testing.assert_array_equal(held.dequantize(), got[::-1])
    return checkpoint.layout("a.weight")


def compress(
    form: str, args: dict[str, Any], columns: int = COLUMNS
) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Tensors by the library's compressor, its own decompression, and the settings of the config."""
    own = quantization.QuantizationArgs(**args)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=own, format=form)
    dense, size = weight(columns=columns), args.get("group_size")
    groups = dense.reshape(ROWS, -1, size or columns)
    if args["strategy"] == "tensor":
        groups = dense.reshape(1, 1, -1)
    state = {"weight": dense}
    if args["strategy"] == "tensor_group":
        state["weight_global_scale"] = torch.tensor([2688 / dense.abs().max()])
    scale, zero = quantization.utils.calculate_qparams(
        groups.amin(-1), groups.amax(-1), own, state.get("weight_global_scale")
    )
    state |= {"weight_scale": scale.reshape(-1) if args["strategy"] == "tensor" else scale}
    if not own.symmetric:
        state["weight_zero_point"] = zero.round().to(torch.int8)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(dict(state), scheme)
    right = compressor.decompress(dict(packed), scheme)["weight"]
    settings = {
        "config_groups": {"g": {"weights": args, "format": form}},
        "format": form,
        "version": "0.20.0",
    }
    return packed, right, settings


INT = {"type": "int", "symmetric": True}


@pytest.mark.parametrize(
    ("form", "args", "columns", "kind"),
    [
        ("pack-quantized", {**INT, "num_bits": 2, "strategy": "group", "group_size": 32}, 256, "int4"),
        ("pack-quantized", {**INT, "num_bits": 3, "strategy": "group", "group_size": 64}, 256, "int4"),
        ("pack-quantized", {**INT, "num_bits": 3, "strategy": "channel"}, 96, "int4"),
        ("pack-quantized", {**INT, "num_bits": 4, "strategy": "group", "group_size": 16}, 256, None),
        ("pack-quantized", {**INT, "num_bits": 4, "strategy": "group", "group_size": 256}, 512, "int4"),
        ("pack-quantized", {**INT, "num_bits": 5, "strategy": "group", "group_size": 32}, 256, "blocks"),
        ("pack-quantized", {**INT, "num_bits": 6, "strategy": "channel"}, 256, "blocks"),
        ("pack-quantized", {**INT, "num_bits": 7, "strategy": "group", "group_size": 128}, 256, "blocks"),
        ("pack-quantized", {**INT, "num_bits": 8, "strategy": "group", "group_size": 128}, 256, "blocks"),
        (
            "pack-quantized",
            {**INT, "num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
            256,
            "blocks",
        ),
        (
            "pack-quantized",
            {**INT, "num_bits": 3, "strategy": "channel", "symmetric": False},
            256,
            "blocks",
        ),
        (
            "pack-quantized",
            {**INT, "num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
            256,
            "blocks",
        ),
        ("int-quantized", {**INT, "num_bits": 8, "strategy": "tensor"}, 256, "int8"),
        ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel", "symmetric": False}, 256, None),
        ("float-quantized", {"type": "float", "num_bits": 8, "strategy": "channel"}, 96, "blocks"),
        ("float-quantized", {"type": "float", "num_bits": 8, "strategy": "tensor"}, 256, "blocks"),
    ],
)
def test_compressed_tensors(
    form: str, args: dict[str, Any], columns: int, kind: str | None, tmp_path: Path
) -> None:
    packed, right, settings = compress(form, args, columns)
    save_file(
        {f"a.{name}": tensor.contiguous() for name, tensor in packed.items()}, tmp_path / "model.safetensors"
    )
    layout = check(tmp_path, "compressed-tensors", settings, right)
    assert (None if layout is None else layout.name) == kind


@pytest.mark.parametrize(("kind", "size"), [("nf4", 64), ("nf4", 128), ("fp4", 256), ("nf4", 512)])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 512), (33, 40)])
def test_bitsandbytes(
    kind: str, size: int, double: bool, storage: Any, shape: tuple[int, int], tmp_path: Path
) -> None:
    packed, state = bitsandbytes.quantize_4bit(
        weight(*shape), blocksize=size, compress_statistics=double, quant_type=kind, quant_storage=storage
    )
    beside = {f"a.weight.{name}": tensor.contiguous() for name, tensor in state.as_dict(packed=True).items()}
    save_file({"a.weight": packed, **beside}, tmp_path / "model.safetensors")
    right = bitsandbytes.dequantize_4bit(packed, state).reshape(shape)
    layout = check(tmp_path, "bitsandbytes", {"load_in_4bit": True}, right, 1e-6)
    assert (layout is not None) == (shape[1] % 64 == 0)


WRITTEN = {
    "smoothquant": formats.int8_tensors,
    "int8-static": formats.int8_tensors,
    "fp8": formats.fp8_tensors,
    "mxfp4": formats.mxfp4_tensors,
    "nvfp4": lambda weight: formats.nvfp4_tensors(weight, float(np.abs(weight).max())),
}


@pytest.mark.parametrize("method", WRITTEN)
def test_the_library_reads_what_quire_quantize_writes(method: str) -> None:
    section = formats.compressed_section(method, ["b"])
    scheme = quantization.QuantizationConfig(**section).config_groups["group_0"]
    tensors, values = WRITTEN[method](weight().numpy())
    state = {name: torch_of(array) for name, array in tensors.items()}
    compressor = compressors.BaseCompressor.get_value_from_registry(section["format"])
    got = compressor.decompress(state, scheme)["weight"].float().numpy()
    # Some of its formats are multiplied in bfloat16.
    np.testing.assert_allclose(got, values, rtol=8e-3 if "fp4" in method else 1e-6)


def torch_of(array: Any) -> Any:
    if array.dtype.name == "float8_e4m3fn":
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


def test_torchao_int4_tensors(tmp_path: Path) -> None:
    """The library packs them on a GPU only: code * scale + zero, two codes in a byte, scales by group, then by row."""
    rng, size = np.random.default_rng(0), 64
    codes = rng.integers(-8, 8, (ROWS, COLUMNS)).astype(np.int8)
    scales, zeros = (rng.standard_normal((COLUMNS // size, ROWS)).astype(np.float32) for _ in range(2))
    scales, zeros = (torch.tensor(x).bfloat16() for x in (scales, zeros))
    factors = torch.tensor(rng.random(COLUMNS, np.float32) + 0.5)
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    tensors = {"qdata": torch.tensor(packed), "scale": scales, "zero_point": zeros, "act_pre_scale": factors}
    save_file({f"a._weight_{name}": x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    spread = [x.float().T.repeat_interleave(size, 1) for x in (scales, zeros)]
    right = (torch.tensor(codes).float() * spread[0] + spread[1]) * factors
    layout = check(tmp_path, "torchao", {}, right, 1e-6)
    assert layout is not None
    assert layout.name == "int4"
