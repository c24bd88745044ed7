"""One safetensors file: mapped and checked before use, or written. Knows the format and nothing of models.

Layout: 8 bytes N little-endian, N bytes of JSON {name: {dtype, shape, data_offsets}}, then the data, which
the tensors must cover without holes or overlaps. The header is read here rather than by the safetensors
library, whose numpy loader copies each tensor.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from quire.errors import ModelError
from quire.files import map_file, replaced
from quire.weights.checkpoint.protocol import MAX_TENSORS, Unquantized, check_entry, held
from quire.weights.tensor import Array

MAX_HEADER = 16 << 20  # bytes: more than 100,000 tensors take; the format allows 100 MB
MAX_ENTRY = 1 << 10  # bytes of a tensor's entry
MAX_METADATA = 1 << 20
MAX_DIMENSIONS = 8
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place: `begin` and `end` are bytes from the start of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile(Unquantized):
    """A `Checkpoint` of one file. Raises ModelError, naming the file, for anything out of order in it."""

    def __init__(self, path: Path, most: int = MAX_TENSORS) -> None:
        self._path = path
        self._map, size = map_file(path, least=8)
        self._entries = read_header(path, self._map, size, most)

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        return held(self._entries[name].dtype)

    def path(self, name: str) -> Path:
        return self._path

    def get(self, name: str) -> Array:
        entry = self._entries[name]
        array: Array = np.ndarray(entry.shape, entry.dtype, self._map, entry.begin)
        return np.require(array, held(entry.dtype), requirements=["C", "A"])


def read_header(path: Path, data: mmap.mmap, size: int, most: int = MAX_TENSORS) -> dict[str, Entry]:
    """All tensors of the file by name, every offset checked against the file's size."""
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER, size - 8):
        raise ModelError(
            f"{path}: the header claims {length} bytes of {size}; the file is truncated or not safetensors"
        )
    counted = data[8 : 8 + length].count(b'"data_offsets"')
    if counted > most or length > MAX_METADATA + most * MAX_ENTRY:
        raise ModelError(f"{path}: the header lists {counted} tensors in {length} bytes; at most {most}")
    try:
        header = msgspec.json.decode(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    if len(header) > most:
        raise ModelError(f"{path}: the header lists {len(header)} tensors; at most {most} are read")
    if counted > len(header):
        raise ModelError(f"{path}: a tensor occurs twice in the header")
    start = 8 + length
    entries = {name: _entry(path, name, value, start) for name, value in header.items()}
    _check_cover(path, entries, start, size)
    return entries


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _entry(path: Path, name: str, value: object, start: int) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{path}: tensor {name}: expected dtype, shape and data_offsets")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ModelError(f"{path}: tensor {name}: dtype {code!r:.200} is not supported")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ModelError(f"{path}: tensor {name}: shape {shape!r:.200} is not up to {MAX_DIMENSIONS} sizes")
    check_entry(path, name, shape)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{path}: tensor {name}: data_offsets {offsets!r:.200} are not a range of bytes")
    needed = math.prod(shape) * DTYPES[code].itemsize
    if offsets[1] - offsets[0] != needed:
        raise ModelError(
            f"{path}: tensor {name}: {code} {shape} needs {needed} bytes, not {offsets[1] - offsets[0]}"
        )
    return Entry(DTYPES[code], tuple(shape), start + offsets[0], start + offsets[1])


def _check_cover(path: Path, entries: dict[str, Entry], start: int, size: int) -> None:
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            raise ModelError(
                f"{path}: tensor {name} ends at byte {entry.end} of {size}; the file is truncated"
            )
        if entry.begin != at:
            what = "overlaps the tensor before it" if entry.begin < at else "leaves a hole before it"
            raise ModelError(f"{path}: tensor {name} {what}; the file is corrupt")
        at = entry.end
    if at != size:
        raise ModelError(f"{path}: {size - at} bytes follow the last tensor; the file is corrupt")


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a file. Each tensor is asked for twice, so a mapping may make them when they are asked for."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in tensors.items():
        end = at + array.nbytes
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path) as new, new.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
