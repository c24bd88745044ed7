"""The safetensors reader against the official writer, and against files that are not what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ModelError
from quire.weights.checkpoint.safetensors import SafetensorsFile

TORCH = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_reads_what_the_official_library_wrote(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "matrix": (4 * torch.randn(3, 5)).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 4).to(dtype),
    }
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert set(file.names()) == set(tensors)
    for name, expected in tensors.items():
        got = file.get(name)
        assert got.shape == file.shape(name) == tuple(expected.shape)
        assert got.dtype == file.dtype(name)
        assert (
            got.tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes() if got.ndim else True
        )
        assert not got.flags.writeable
        np.testing.assert_array_equal(got.astype(np.float64), expected.double().numpy())


def test_float64_is_read_as_float32(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    numbers = torch.randn(3, 5, dtype=torch.float64)
    safetensors.torch.save_file({"a": numbers}, path)
    file = SafetensorsFile(path)
    assert file.dtype("a") == file.get("a").dtype == np.float32
    np.testing.assert_array_equal(file.get("a"), numbers.float().numpy())


def test_bfloat16_is_a_view_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"a": torch.arange(4).bfloat16()}, path)
    got = SafetensorsFile(path).get("a")
    assert got.dtype == ml_dtypes.bfloat16
    assert not got.flags.owndata
    assert not got.flags.writeable


def test_unaligned_data_is_copied_into_place(tmp_path: Path) -> None:
    header = json.dumps({"a": tensor(0, 8, [2])}).encode()
    header += b" " * ((1 - len(header)) % 4)  # the data starts one byte past a multiple of four
    path = write(tmp_path / "m.safetensors", header, np.array([1.5, -2.0], np.float32).tobytes())
    got = SafetensorsFile(path).get("a")
    assert got.flags.aligned
    np.testing.assert_array_equal(got, [1.5, -2.0])


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": tensor(0, 8, [2])}, 4, "ends at byte .* truncated"),
        ({"a": tensor(0, 8, [2])}, 12, "4 bytes follow the last tensor"),
        ({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, 12, "tensor b overlaps"),
        ({"a": tensor(0, 8, [2]), "b": tensor(12, 16, [1])}, 16, "tensor b leaves a hole"),
        ({"a": tensor(4, 8, [1])}, 8, "tensor a leaves a hole"),
        ({"a": tensor(0, 8, [3])}, 8, r"F32 \[3\] needs 12 bytes, not 8"),
        ({"a": tensor(8, 0, [2])}, 8, "not a range"),
        ({"a": tensor(-4, 4, [2])}, 8, "not a range"),
        ({"a": tensor(0, 1 << 62, [1 << 60])}, 8, "are too large"),
        ({"a": tensor(0, 8, [1 << 40, 1 << 40])}, 8, "are too large"),
        ({"a": tensor(0, 8, [True, 2])}, 8, "shape"),
        ({"a": tensor(0, 8, [-2, -1])}, 8, "shape"),
        ({"a": tensor(0, 4, [1] * 9)}, 4, "shape"),
        ({"a": tensor(0, 8, [2], "Q4")}, 8, "dtype 'Q4' is not supported"),
        ({"a": tensor(0, 8, [2], ["F32"])}, 8, "is not supported"),  # type: ignore[arg-type]
        ({"a": {"dtype": "F32"}}, 0, "expected dtype, shape and data_offsets"),
        ({"a": 3}, 0, "expected dtype"),
        ([1], 0, "not a JSON object"),
        (b"{not json", 0, "not valid JSON"),
        (b"\xff\xfe", 0, "not valid JSON"),
        (
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
            b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            4,
            "occurs twice",
        ),
        ({f"t{i}": tensor(0, 0, [0]) for i in range((1 << 17) + 1)}, 0, "lists 131073 tensors"),
        (b'{"a": ' + b"[0," * 2_000_000 + b"0" + b"]" * 2_000_000 + b"}", 0, "not valid JSON"),
        (b"[" * 100_000, 0, "not valid JSON"),
    ],
)
def test_broken_files_are_refused(header: Any, size: int, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "broken.safetensors", header, bytes(size))
    with pytest.raises(ModelError, match=message) as raised:
        SafetensorsFile(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("length", [1 << 63, 200_000_000, 3_000])
def test_absurd_header_lengths_are_refused(length: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"claims {length} bytes"):
        SafetensorsFile(write(tmp_path / "m.safetensors", {}, length=length))


def test_tiny_and_absent_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ModelError, match="0 bytes are too few"):
        SafetensorsFile(tmp_path / "empty")
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        SafetensorsFile(tmp_path / "absent")


@settings(max_examples=200, deadline=None)
@given(draw=st.data())
def test_a_damaged_file_is_refused_or_read_within_its_bounds(
    draw: st.DataObject, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("damaged", numbered=True)
    whole = safetensors.torch.save({"a": torch.ones(3, 2), "b": torch.ones(4).bfloat16()})
    damaged = bytearray(whole[: draw.draw(st.integers(0, len(whole)))])
    for _ in range(draw.draw(st.integers(0, 3))):
        if damaged:
            damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    (folder / "m").write_bytes(damaged)
    try:
        file = SafetensorsFile(folder / "m")
    except ModelError:
        return
    for name in file.names():
        assert file.get(name).shape == file.shape(name)
