"""Codes in the orders of single kernels, packed here step by step as the kernels' own tools pack them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import ModelError
from tests.weights.test_packed_codes import read

RNG = np.random.default_rng(5)


def words(codes: Any) -> Any:
    """[..., 8] codes of four bits -> [...] words, the first in the lowest bits."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return (codes.astype(np.uint32) << shifts).sum(axis=-1, dtype=np.uint32).view(np.int32)


def marlin_packed(codes: Any) -> Any:
    """Codes [K, O] as 32 threads of a tensor core read tiles of 16 x 64: four tiles of 16 x 16 for each thread."""
    inputs, outputs = codes.shape
    packed = np.zeros((inputs // 16, outputs // 64, 32, 4), np.int32)
    for thread in range(32):
        row, column = thread % 4 * 2, thread // 4
        for tile in range(4):
            eight = []
            for half in (0, 8):  # columns of the tile
                for r in (row, row + 1, row + 8, row + 9):
                    own = codes.reshape(inputs // 16, 16, outputs // 64, 4, 16)
                    eight.append(own[:, r, :, tile, column + half])
            mixed = [eight[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
            packed[:, :, thread, tile] = words(np.stack(mixed, axis=-1))
    return packed.reshape(inputs // 16, outputs * 2)


def marlin_scales(scales: Any) -> Any:
    """[G, O] in the order in which threads use them."""
    if len(scales) > 1:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return scales.reshape(-1, len(order))[:, order].reshape(scales.shape)


def symmetric(rows: int, columns: int, size: int) -> tuple[Any, Any, Any]:
    codes = RNG.integers(0, 16, (rows, columns))
    scales = RNG.standard_normal((rows, columns // size)).astype(np.float16)
    values = (codes - 8).astype(np.float32) * scales.astype(np.float32).repeat(size, 1)
    return codes, scales, values


@pytest.mark.parametrize(("size", "named"), [(128, -1), (128, 128), (64, 64)])
@pytest.mark.parametrize("names", [("qweight", "scales"), ("B", "s")])
def test_marlin_in_gptq(size: int, named: int, names: tuple[str, str], tmp_path: Path) -> None:
    columns = 128 if named == -1 else 256
    codes, scales, values = symmetric(128, columns, size)
    tensors = {
        f"a.{names[0]}": marlin_packed(codes.T),
        f"a.{names[1]}": marlin_scales(scales.T),
        "a.workspace": np.zeros(16, np.int32),
    }
    settings: dict[str, Any] = {"bits": 4, "group_size": named, "is_marlin_format": True}
    checkpoint = read(tmp_path, "gptq", tensors, **settings)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)
    held = checkpoint.quantized("a.weight", np.arange(128))
    np.testing.assert_array_equal(held.dequantize(), values)
    assert list(checkpoint.names()) == ["a.weight"]


def test_marlin_in_awq(tmp_path: Path) -> None:
    codes, scales, values = symmetric(64, 256, 128)
    tensors = {"a.qweight": marlin_packed(codes.T), "a.scales": marlin_scales(scales.T)}
    settings: dict[str, Any] = {"bits": 4, "group_size": 128, "version": "Marlin", "zero_point": False}
    np.testing.assert_array_equal(read(tmp_path, "awq", tensors, **settings).get("a.weight"), values)


def fast_packed(codes: Any) -> Any:
    """Codes [O, K] in llm-awq's order: pairs of columns dealt to four lanes, even before odd, four rows interleaved."""
    rows, columns = codes.shape
    pairs = codes.reshape(rows, columns // 32, 4, 4, 2).transpose(0, 1, 3, 2, 4)
    apart = pairs.reshape(rows, columns // 32, 4, 4, 2).transpose(0, 1, 2, 4, 3)
    tiles = apart.reshape(rows // 4, 4, columns // 64, 64).transpose(0, 2, 1, 3)
    fours = tiles.reshape(rows // 4, columns // 64, 64, 4).astype(np.uint16)
    packed = (fours << np.arange(0, 16, 4, dtype=np.uint16)).sum(axis=-1, dtype=np.uint16)
    return packed.reshape(rows // 4, columns).view(np.int16)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("version", "zeros_name"), [("gemv_fast", "qzeros"), ("llm-awq", "scaled_zeros")])
def test_gemv_fast(size: int, version: str, zeros_name: str, tmp_path: Path) -> None:
    rows, columns = 24, 256
    codes, zeros = RNG.integers(0, 16, (rows, columns)), RNG.integers(0, 16, (rows, columns // size))
    scales = RNG.standard_normal(zeros.shape).astype(np.float16)
    offsets = -(scales * zeros.astype(np.float16))  # rounded, as the tool rounds it
    spread = scales.astype(np.float32).repeat(size, 1), offsets.astype(np.float32).repeat(size, 1)
    values = codes.astype(np.float32) * spread[0] + spread[1]

    def padded(array: Any) -> Any:  # groups are padded to eights
        return np.concatenate([array.T, np.full((8 - array.shape[1] % 8, rows), np.nan, np.float16)])[:8]

    tensors = {
        "a.qweight": fast_packed(codes),
        "a.scales": np.nan_to_num(padded(scales)),
        f"a.{zeros_name}": np.nan_to_num(padded(offsets)),
    }
    settings: dict[str, Any] = {"w_bit": 4, "q_group_size": size, "version": version}
    checkpoint = read(tmp_path, "awq", tensors, **settings)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)
    picked = np.array([5, 3])
    np.testing.assert_array_equal(checkpoint.quantized("a.weight", picked).dequantize(), values[picked])
    # Words of 16 bits are this order even if the config names none.
    again = read(tmp_path, "awq", tensors, w_bit=4, q_group_size=size)
    np.testing.assert_array_equal(again.get("a.weight"), values)


@pytest.mark.parametrize(
    ("method", "settings", "damage", "said"),
    [
        ("gptq", {"is_marlin_format": True, "desc_act": True}, {}, "without act-order"),
        ("gptq", {"is_marlin_format": True, "bits": 8}, {}, "symmetric weights of 4 bits"),
        (
            "gptq",
            {"is_marlin_format": True, "group_size": 96},
            {},
            "a.scales must be one for each group of 96",
        ),
        (
            "gptq",
            {"is_marlin_format": True, "group_size": 128},
            {"a.scales": np.ones((2, 64), np.float16)},
            "a.scales must be of 128 outputs",
        ),
        (
            "gptq",
            {"is_marlin_format": True, "group_size": 128},
            {"a.qweight": np.zeros((16, 130), np.int32)},
            "a.qweight must be in tiles of 64",
        ),
        (
            "awq",
            {"group_size": 128},
            {"a.qweight": np.zeros((32, 100), np.int16)},
            "a.qweight must be a matrix of tiles of 64",
        ),
        (
            "awq",
            {"group_size": 128},
            {"a.qweight": np.zeros((32, 128), np.int16), "a.scales": np.ones((0, 128), np.float16)},
            "a.scales must be one for each group of 128",
        ),
    ],
)
def test_what_is_no_whole_tile_is_named(
    method: str, settings: dict[str, Any], damage: dict[str, Any], said: str, tmp_path: Path
) -> None:
    codes, scales, _ = symmetric(128, 256, 128)
    tensors = {"a.qweight": marlin_packed(codes.T), "a.scales": marlin_scales(scales.T), **damage}
    with pytest.raises(ModelError, match=said):
        read(tmp_path, method, tensors, **settings).get("a.weight")
