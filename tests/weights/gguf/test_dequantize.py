"""Decoding against the gguf package: the same bits for every type, on random blocks and on quantized data."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from quire.weights.gguf.kinds import KINDS, PLAIN, Kind
from quire.weights.layouts.blocks import decode

KIND_LIST = [kind for kind in KINDS.values() if kind.name not in PLAIN]
# The package decodes the others and cannot make them.
QUANTIZABLE = [k for k in KIND_LIST if not k.name.endswith("_K") and not k.name.startswith(("IQ", "TQ"))]


def theirs(kind: Kind, raw: Any) -> Any:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.code)).reshape(-1)


def assert_same_bits(ours: Any, expected: Any) -> None:
    """Equal as bits; a NaN is any NaN."""
    assert ours.dtype == expected.dtype == np.float32
    numbers = ~np.isnan(expected)
    assert np.array_equal(numbers, ~np.isnan(ours))
    assert np.array_equal(ours[numbers].view(np.uint32), expected[numbers].view(np.uint32))


def test_kinds_are_those_of_the_format() -> None:
    for code, kind in KINDS.items():
        official = gguf.GGMLQuantizationType(code)
        assert (kind.code, kind.name) == (code, official.name)
        assert (kind.block, kind.nbytes) == gguf.GGML_QUANT_SIZES[official]


@pytest.mark.parametrize("kind", KIND_LIST, ids=lambda kind: kind.name)
def test_random_blocks_decode_to_the_same_bits(kind: Kind) -> None:
    rng = np.random.default_rng(kind.code)
    # more blocks than one piece holds, and a last piece that is not full
    raw = rng.integers(0, 256, 1030 * kind.nbytes, dtype=np.uint8)
    assert_same_bits(decode(kind.name.lower(), raw), theirs(kind, raw))


@pytest.mark.parametrize("kind", QUANTIZABLE, ids=lambda kind: kind.name)
def test_quantized_data_decodes_to_the_same_bits_and_near_the_data(kind: Kind) -> None:
    data = np.random.default_rng(3).standard_normal((8, 512)).astype(np.float32)
    raw = gguf.quants.quantize(data, gguf.GGMLQuantizationType(kind.code)).view(np.uint8).reshape(-1)
    ours = decode(kind.name.lower(), raw)
    assert_same_bits(ours, theirs(kind, raw))
    assert np.abs(ours.reshape(data.shape) - data).max() < 1


def test_a_piece_is_not_felt() -> None:
    kind = KINDS[12]
    raw = np.random.default_rng(1).integers(0, 256, 2500 * kind.nbytes, dtype=np.uint8)
    whole = decode(kind.name.lower(), raw)
    parts = [
        decode(kind.name.lower(), raw[i : i + 7 * kind.nbytes]) for i in range(0, len(raw), 7 * kind.nbytes)
    ]
    assert_same_bits(whole, np.concatenate(parts))
