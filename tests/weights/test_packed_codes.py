"""Quantized tensors written here bit by bit, in sizes and orders that no sample has, and such as no library writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.config import EngineConfig
from quire.engine.start import plan_engine
from quire.errors import ConfigError, ModelError
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.readers import READERS
from tests.tiny import write_checkpoint

Tensors = dict[str, Any]


def write_stream(numbers: list[int], bits: int) -> Any:
    """Numbers of `bits` bits in words of 32, the low bits first."""
    whole = sum(number << i * bits for i, number in enumerate(numbers))
    count = -(-len(numbers) * bits // 32)
    return np.frombuffer(whole.to_bytes(4 * count, "little"), np.int32)


def streams(numbers: Any, bits: int) -> Any:
    return np.stack([write_stream([int(n) for n in row], bits) for row in numbers])


def read(path: Path, method: str, tensors: Tensors, **settings: Any) -> Checkpoint:
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items() if v is not None}, path / "model.safetensors"
    )
    return READERS[method](open_checkpoint(path), settings)


def gptq(
    rows: int, columns: int, bits: int, size: int, *, first: bool, order: Any = None
) -> tuple[Tensors, Any]:
    rng = np.random.default_rng(bits)
    groups = -(-columns // size)
    codes, zeros = rng.integers(0, 1 << bits, (rows, columns)), rng.integers(1, 1 << bits, (rows, groups))
    scales = rng.standard_normal((rows, groups)).astype(np.float16)
    of = np.arange(columns) // size if order is None else order
    values = (codes - zeros[:, of]).astype(np.float32) * scales.astype(np.float32)[:, of]
    tensors = {
        "a.qweight": streams(codes, bits).T,
        "a.qzeros": streams((zeros - first).T, bits),
        "a.scales": scales.T,
        "a.g_idx": None if order is None else order.astype(np.int32),
    }
    return tensors, values


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("bits", "size", "rows", "columns"),
    [(2, 16, 32, 48), (3, 32, 32, 96), (4, 96, 8, 192), (4, 24, 16, 40), (8, 32, 12, 64), (8, 128, 4, 128)],
)
def test_gptq_of_all_sizes(
    bits: int, size: int, rows: int, columns: int, first: bool, tmp_path: Path
) -> None:
    tensors, values = gptq(rows, columns, bits, size, first=first)
    form = "gptq" if first else "gptq_v2"
    settings = {"bits": bits, "group_size": size, "sym": False, "checkpoint_format": form}
    checkpoint = read(tmp_path, "gptq", tensors, **settings)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)
    if checkpoint.layout("a.weight") is not None:
        held = checkpoint.quantized("a.weight", np.arange(rows)).dequantize()
        np.testing.assert_array_equal(held, values)


def test_gptq_in_any_order(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(np.arange(64) // 16)
    tensors, values = gptq(8, 64, 4, 16, first=True, order=order)
    checkpoint = read(tmp_path, "gptq", tensors, bits=4, group_size=16, sym=False, desc_act=True)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)
    assert checkpoint.layout("a.weight") is None


def test_a_zero_point_of_0_carries_into_the_next_one(tmp_path: Path) -> None:
    """Version 1 takes 1 from whole words, so that a field of 0 borrows."""
    tensors, _ = gptq(8, 32, 4, 32, first=False)
    zeros = [5, 0, 7, 3, 0, 0, 1, 9]
    word = (int(write_stream(zeros, 4).view(np.uint32)[0]) - 0x11111111) % (1 << 32)
    tensors["a.qzeros"] = np.array([[word]], np.uint32).view(np.int32)
    tensors["a.qweight"][:] = 0
    tensors["a.scales"][:] = 1
    checkpoint = read(tmp_path, "gptq", tensors, bits=4, group_size=32, sym=False)
    np.testing.assert_array_equal(checkpoint.get("a.weight")[:, 0], -np.array(zeros, np.float32))


@pytest.mark.parametrize(("bits", "columns"), [(3, 64), (4, 72), (5, 64), (8, 40)])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_compressed_tensors_streams(
    bits: int, columns: int, zeros: bool, padded: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    rows, size = 32, 8
    codes = rng.integers(0, 1 << bits, (rows, columns))
    points = rng.integers(0, 1 << bits, (rows, columns // size))
    scales = rng.standard_normal(points.shape).astype(np.float32)

    def pack(numbers: Any) -> Any:
        if not padded:
            return streams(numbers, bits)
        each = 32 // bits
        parts = [numbers[:, i : i + each] for i in range(0, numbers.shape[1], each)]
        return np.concatenate([streams(part, bits) for part in parts], axis=1)

    tensors = {
        "a.weight_packed": pack(codes),
        "a.weight_scale": scales,
        "a.weight_shape": np.array([rows, columns], np.int64),
        "a.weight_zero_point": pack(points.T).T if zeros else None,
    }
    settings = {
        "config_groups": {"0": {"weights": {"num_bits": bits}}},
        "version": "0.9" if padded else "0.12",
    }
    checkpoint = read(tmp_path, "compressed-tensors", tensors, **settings)
    middle = points.repeat(size, 1) if zeros else 1 << (bits - 1)
    values = (codes - middle).astype(np.float32) * scales.repeat(size, 1)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu, np.uint8])
def test_fp8_blocks_may_end_early_and_scales_be_exponents(kind: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((200, 70)).astype(ml_dtypes.float8_e4m3fn)
    powers = rng.integers(-4, 5, (4, 3))
    scales = (powers + 127).astype(np.uint8) if kind is np.uint8 else (2.0**powers).astype(kind)
    held = scales.view(np.uint8) if kind is ml_dtypes.float8_e8m0fnu else scales
    tensors = {"a.weight": weight.view(np.uint8), "a.weight_scale_inv": held}
    path = tmp_path / "model.safetensors"
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items() if name != "a.weight"}, path)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].decode().rstrip()
    end = held.nbytes
    header = (
        header[:-1]
        + f',"a.weight":{{"dtype":"F8_E4M3","shape":[200,70],"data_offsets":[{end},{end + 14000}]}}}}'
    )
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + raw[8 + size :] + weight.tobytes())
    checkpoint = READERS["fp8"](open_checkpoint(tmp_path), {"weight_block_size": [64, 32]})
    spread = (2.0**powers).repeat(64, 0)[:200].repeat(32, 1)[:, :70]
    np.testing.assert_array_equal(
        checkpoint.get("a.weight"), weight.astype(np.float32) * spread.astype(np.float32)
    )


def broken(change: Callable[[Tensors], Any]) -> Tensors:
    tensors, _ = gptq(8, 64, 4, 16, first=True, order=np.arange(64) // 16)
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.update({"a.scales": t["a.scales"][:3]}),
            "a.scales must be one for each group of 16 of 64",
        ),
        (lambda t: t.update({"a.scales": t["a.scales"].astype(np.int32)}), "a.scales must be float32"),
        (lambda t: t["a.scales"].__setitem__((0, 0), np.nan), "a.scales must be finite"),
        (lambda t: t["a.g_idx"].__setitem__(3, 4), "a.g_idx must be groups from 0 to 3"),
        (lambda t: t["a.g_idx"].__setitem__(3, -1), "a.g_idx must be groups from 0 to 3"),
        (lambda t: t.update({"a.g_idx": t["a.g_idx"][:5]}), "a.g_idx must be int32"),
        (lambda t: t.update({"a.qzeros": t["a.qzeros"][:, :0]}), "a.qzeros must be int32"),
        (lambda t: t.update({"a.qzeros": None}), "a.qzeros is missing"),
        (lambda t: t.update({"a.scales": None}), "a.scales is missing"),
        (lambda t: t.update({"a.qweight": t["a.qweight"].reshape(-1)}), "a matrix of codes"),
    ],
)
def test_modules_that_are_not_whole_name_their_tensor(
    change: Callable[[Tensors], Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=said):
        read(tmp_path, "gptq", broken(change), bits=4, group_size=16, sym=False).get("a.weight")


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("gptq", {"bits": 5, "group_size": 16}, "bits = 5"),
        ("gptq", {"bits": "4"}, "bits must be of type int"),
        ("gptq", {"bits": 4, "checkpoint_format": "marlin"}, "'marlin' is not read"),
        ("gptq", {"bits": 4, "group_size": 0}, "one for each group of 0"),
        ("gptq", {"bits": 4, "dynamic": {"(": {}}}, "dynamic"),
        ("awq", {"version": "gemv_fast"}, "'gemv_fast' is not read"),
        ("awq", {"bits": 3}, "AWQ has 4"),
        ("auto-round", {"packing_format": "x"}, "packing_format 'x'"),
        ("squeezellm", {"wbits": 2}, "wbits = 2"),
        ("compressed-tensors", {"format": "marlin-24"}, "marlin-24"),
        ("compressed-tensors", {"transform_config": {"a": 1}}, "transform_config"),
        ("modelopt", {"quantization": {"quant_algo": "NVFP4_SVD"}}, "NVFP4_SVD"),
        ("fp8", {}, "no quantized weight of a known kind|weight"),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(
    method: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    tensors = broken(lambda t: None)
    if method == "fp8":
        tensors = {"a.weight": np.zeros((4, 4), np.int32), "a.weight_scale": np.ones(1, np.float32)}
    with pytest.raises(ModelError, match=said):
        read(tmp_path, method, tensors, **settings)


@pytest.mark.parametrize("name", ["gptq_model-4bit-128g.safetensors", "4bit-128g.safetensors"])
def test_the_one_file_of_weights_may_have_a_tool_s_name(name: str, tmp_path: Path) -> None:
    tensors, values = gptq(8, 64, 4, 16, first=True)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items() if v is not None}, tmp_path / name)
    settings = {"bits": 4, "group_size": 16, "sym": False}
    checkpoint = READERS["gptq"](open_checkpoint(tmp_path), settings)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)


@pytest.mark.parametrize(
    ("name", "method", "said"),
    [
        ("awq", "awq", ""),
        ("awq_marlin", "awq", ""),
        ("gptq", "awq", "--quantization gptq: the model is quantized by awq"),
        ("squeezellm", None, "--quantization squeezellm: the model is not quantized"),
    ],
)
def test_a_method_that_is_named_must_be_the_checkpoint_s(
    name: str, method: str | None, said: str, tmp_path: Path
) -> None:
    section = {} if method is None else {"quantization_config": {"quant_method": method}}
    directory = write_checkpoint(tmp_path / "model", **section)
    config = EngineConfig.from_options(model=str(directory), quantization=name)
    if not said:
        plan_engine(config)
        return
    with pytest.raises(ConfigError, match=said):
        plan_engine(config)
