"""One GGUF file, mapped and checked before use. Knows the format and nothing of models or tokenizers.

Layout (github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3, little-endian): magic, version, counts, metadata
pairs, tensor descriptions, then the data at a multiple of the alignment. Nothing is believed before it is compared with
the file's size; arrays stay in the file until they are asked for.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire import _native
from quire.errors import ModelError
from quire.files import map_file
from quire.weights.gguf.kinds import KINDS, Kind
from quire.weights.tensor import Array

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 22  # in all arrays together
MAX_KEY = 1 << 16  # bytes; the format's own limit
MAX_NAME = 256  # bytes of a tensor's name
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class Value:
    """A metadata value in its place: bytes begin..end of the file; `count` is None for what is no array."""

    kind: int
    count: int | None
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place. `shape` is in numpy's order (rows last but one); bytes begin..begin + nbytes of the file."""

    kind: Kind
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class GGUFFile:
    """A mapped file. Raises ModelError, naming the file, for anything out of order in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map, size = map_file(path, least=24)
        cursor = _Cursor(path, self._map, size)
        num_tensors, num_pairs = _read_preamble(cursor)
        self._values = _read_pairs(cursor, num_pairs)
        entries = [_read_entry(cursor) for _ in range(num_tensors)]
        self.tensors = _place(cursor, entries, self._alignment())

    def keys_under(self, prefix: str) -> list[str]:
        return [key for key in self._values if key.startswith(prefix)]

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        """A value as Python's own: bool, int, float, str, or a list of them; None where the key is absent."""
        value = self._values.get(key)
        if value is None:
            return None
        if value.kind == STRING:
            strings = self._strings(key, value)
            return strings if value.count is not None else strings[0]
        numbers = np.frombuffer(self._map, SCALARS[value.kind], value.count or 1, value.begin)
        if value.count == 0:
            return []
        if value.kind == BOOL:
            return (numbers != 0).tolist() if value.count is not None else bool(numbers[0])
        return numbers.tolist() if value.count is not None else numbers[0].item()

    def is_single(self, key: str) -> bool:
        """Whether the value is a float32, which has fewer digits than Python shows."""
        value = self._values.get(key)
        return value is not None and value.kind == 6 and value.count is None

    def raw(self, name: str) -> Array:
        """The bytes of a tensor as they lie in the file: uint8 [nbytes]."""
        entry = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, entry.nbytes, entry.begin)

    def _strings(self, key: str, value: Value) -> list[str]:
        count = 1 if value.count is None else value.count
        try:
            strings: list[str] = _native.read_strings(np.frombuffer(self._map, np.uint8), value.begin, count)
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {key} holds text that is not UTF-8: {error}") from error
        return strings

    def _alignment(self) -> int:
        value = self.get("general.alignment")
        if value is None:
            return DEFAULT_ALIGNMENT
        if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise ModelError(f"{self.path}: general.alignment {value!r} is not a power of two up to 65536")
        return value


class _Cursor:
    """Reads forward through the file and never past its end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0
        self.num_strings = 0

    def skip(self, count: int, what: str) -> int:
        """Step over `count` bytes; returns where they begin."""
        begin = self.at
        if count > self.size - begin:
            raise ModelError(f"{self.path}: ends inside {what}; the file is truncated, fetch it again")
        self.at = begin + count
        return begin

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.data, self.skip(8, what))[0])

    def text(self, what: str, most: int) -> str:
        length = self.u64(what)
        if length > most:
            raise ModelError(f"{self.path}: {what} claims {length} bytes; at most {most} are read")
        begin = self.skip(length, what)
        try:
            return self.data[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {what} is not UTF-8: {error}") from error

    def skip_strings(self, count: int, what: str) -> None:
        self.num_strings += count
        if count > (self.size - self.at) // 8 or self.num_strings > MAX_STRINGS:
            raise ModelError(f"{self.path}: {what} claims {count} strings, more than the file can hold")
        try:
            self.at = _native.strings_end(np.frombuffer(self.data, np.uint8), self.at, count)
        except IndexError as error:
            raise ModelError(
                f"{self.path}: ends inside {what}; the file is truncated, fetch it again"
            ) from error


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of metadata pairs)."""
    path = cursor.path
    if cursor.data[:4] != MAGIC:
        raise ModelError(f"{path}: not a GGUF file (it does not begin with GGUF)")
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in VERSIONS:
        turned = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        why = "is big-endian" if turned else f"is of version {version}"
        raise ModelError(f"{path}: {why}; versions 2 and 3, little-endian, are read: convert it again")
    num_tensors, num_pairs = cursor.u64("the number of tensors"), cursor.u64("the number of metadata keys")
    if num_tensors > MAX_TENSORS or num_pairs > MAX_PAIRS:
        raise ModelError(
            f"{path}: claims {num_tensors} tensors and {num_pairs} metadata keys; the file is corrupt"
        )
    return num_tensors, num_pairs


def _read_pairs(cursor: _Cursor, count: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.text("a metadata key", MAX_KEY)
        if key in values:
            raise ModelError(f"{cursor.path}: metadata key {key} occurs twice")
        kind, many = cursor.u32(key), None
        if kind == ARRAY:
            kind, many = cursor.u32(key), cursor.u64(key)
        begin = cursor.at
        if kind == STRING:
            cursor.skip_strings(1 if many is None else many, key)
        elif kind in SCALARS:
            cursor.skip(SCALARS[kind].itemsize * (1 if many is None else many), key)
        else:
            raise ModelError(
                f"{cursor.path}: {key} is of type {kind}, which is not read (arrays do not nest)"
            )
        values[key] = Value(kind, many, begin, cursor.at)
    return values


def _read_entry(cursor: _Cursor) -> tuple[str, Kind, tuple[int, ...], int]:
    """(name, kind, shape, offset in the data)."""
    path = cursor.path
    name = cursor.text("a tensor's name", MAX_NAME)
    num_dimensions = cursor.u32(f"tensor {name}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ModelError(
            f"{path}: tensor {name} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are read"
        )
    sizes = [cursor.u64(f"tensor {name}") for _ in range(num_dimensions)]
    code, offset = cursor.u32(f"tensor {name}"), cursor.u64(f"tensor {name}")
    if code not in KINDS:
        raise ModelError(
            f"{path}: tensor {name} is of type {code}; types that are read: {', '.join(k.name for k in KINDS.values())}"
        )
    kind = KINDS[code]
    if not all(1 <= size < 1 << 48 for size in sizes) or sizes[0] % kind.block:
        raise ModelError(
            f"{path}: tensor {name} of {kind.name} cannot be {sizes}: rows are multiples of {kind.block}"
        )
    return name, kind, tuple(reversed(sizes)), offset


def _place(
    cursor: _Cursor, entries: list[tuple[str, Kind, tuple[int, ...], int]], alignment: int
) -> dict[str, TensorEntry]:
    """Tensors by name, each inside the file and none over another."""
    path = cursor.path
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, kind, shape, offset in entries:
        if name in tensors:
            raise ModelError(f"{path}: tensor {name} occurs twice")
        nbytes = math.prod(shape) // kind.block * kind.nbytes
        if offset % alignment:
            raise ModelError(f"{path}: tensor {name} lies at {offset}, not a multiple of {alignment}")
        if start + offset + nbytes > cursor.size:
            raise ModelError(
                f"{path}: tensor {name} ends at byte {start + offset + nbytes} of {cursor.size}; "
                "the file is truncated, fetch it again"
            )
        tensors[name] = TensorEntry(kind, shape, start + offset, nbytes)
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < at:
            raise ModelError(f"{path}: tensor {name} overlaps the tensor before it; the file is corrupt")
        at = tensor.begin + tensor.nbytes
    return tensors
