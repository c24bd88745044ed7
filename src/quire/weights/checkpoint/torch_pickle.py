"""A PyTorch checkpoint (pytorch_model.bin) read without torch and without running anything in it.

The pickle inside is read by pickles.py, which runs nothing. Storages are mapped, never copied.
"""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelError
from quire.files import map_file, open_regular
from quire.weights.checkpoint.pickles import MAX_OPERATIONS, STORAGES, Storage, Tensor, is_size, read_pickle
from quire.weights.checkpoint.protocol import MAX_TENSORS, Unquantized, check_entry, held
from quire.weights.tensor import Array

MAX_PICKLE = 64 << 20  # bytes; the pickle holds names and shapes only
MAGIC = 0x1950A86A20F9469CFC6C  # begins a file of the format before archives
MAX_DIRECTORY = 16 << 20  # bytes of the archive's list of members
MAX_MEMBER = 512  # of which a tensor's member takes about 100
OPERATIONS = 100  # of a pickle for each tensor, of which a state dict takes 30


class TorchFile(Unquantized):
    """A `Checkpoint` of one file. Raises ModelError, naming the file, for anything it will not read."""

    def __init__(self, path: Path, most: int = MAX_TENSORS) -> None:
        self._path = path
        try:
            self._map, _ = map_file(path)
            if self._map[:1] == b"\x80":
                state, self._records = _before_archives(path, self._map, most)
            else:
                _check_zip(path, self._map[:8])
                _check_directory(path, self._map, most)
                with open_regular(path) as file, zipfile.ZipFile(file) as archive:
                    self._records = _records(path, archive, self._map)
                if self._record("byteorder", b"little") != b"little":
                    raise ModelError(f"{path}: big-endian checkpoints are not supported; save it again")
                state = _unpickled(path, self._record("data.pkl"), most)
        except ModelError:
            raise
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, EOFError) as error:
            raise ModelError(
                f"{path}: the archive is truncated or corrupt: {error}; fetch it again"
            ) from error
        self._tensors = _tensors(path, state)
        if len(self._tensors) > most:
            raise ModelError(f"{path}: holds {len(self._tensors)} tensors; at most {most} are read")
        for name, tensor in self._tensors.items():
            self._check_tensor(name, tensor)

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> np.dtype[Any]:
        return held(STORAGES[self._tensors[name].storage.dtype])

    def path(self, name: str) -> Path:
        return self._path

    def get(self, name: str) -> Array:
        tensor = self._tensors[name]
        dtype = STORAGES[tensor.storage.dtype]
        begin, _ = self._records[f"data/{tensor.storage.key}"]
        strides = tuple(s * dtype.itemsize for s in tensor.strides)
        if 0 in tensor.shape:
            return np.empty(tensor.shape, held(dtype))
        offset = begin + tensor.offset * dtype.itemsize
        array: Array = np.ndarray(tensor.shape, dtype, self._map, offset, strides)
        return np.require(array, held(dtype), requirements=["C", "A"])

    def _record(self, name: str, default: bytes | None = None) -> bytes:
        if name not in self._records:
            if default is None:
                raise ModelError(f"{self._path}: the archive has no {name}; it is not a PyTorch checkpoint")
            return default
        begin, end = self._records[name]
        if end - begin > MAX_PICKLE:
            raise ModelError(f"{self._path}: {name} has {end - begin} bytes, more than {MAX_PICKLE}")
        return self._map[begin:end]

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        storage, sizes = tensor.storage, (tensor.shape, tensor.strides)
        where = f"{self._path}: tensor {name}"
        if not isinstance(storage, Storage) or not is_size(tensor.offset):
            raise ModelError(f"{where} is not made from a storage and an offset")
        if not all(isinstance(v, tuple) and all(is_size(n) for n in v) for v in sizes):
            raise ModelError(f"{where} has shape or strides that are no tuples of sizes")
        if len(tensor.shape) != len(tensor.strides) or len(tensor.shape) > 8:
            raise ModelError(f"{where} has {len(tensor.shape)} sizes and {len(tensor.strides)} strides")
        check_entry(self._path, name, tensor.shape)
        record = self._records.get(f"data/{storage.key}")
        if record is None:
            raise ModelError(f"{where}: its data (data/{storage.key}) is not in the archive")
        last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        if 0 not in tensor.shape and (last + 1) * STORAGES[storage.dtype].itemsize > record[1] - record[0]:
            raise ModelError(f"{where} reaches beyond its data (data/{storage.key}); the file is corrupt")


def _check_zip(path: Path, head: bytes) -> None:
    if head[:4] == b"PK\x03\x04":
        return
    raise ModelError(
        f"{path}: not a PyTorch checkpoint (no zip archive); it may be truncated or a pointer to a file"
    )


def _check_directory(path: Path, data: mmap.mmap, most: int) -> None:
    """Refuse an archive whose list of members is long: zipfile reads all of it when it opens."""
    end = data.rfind(b"PK\x05\x06", max(0, len(data) - (1 << 16) - 22))
    longer = data.rfind(b"PK\x06\x06", max(0, end - (1 << 12)), max(0, end))
    sizes = [int.from_bytes(data[end + 12 : end + 16], "little")] if end >= 0 else [0]
    sizes = [0 if sizes[0] == (1 << 32) - 1 else sizes[0]]
    if longer >= 0:
        sizes.append(int.from_bytes(data[longer + 40 : longer + 48], "little"))
    if max(sizes) > min(MAX_DIRECTORY, (64 + most) * MAX_MEMBER):
        raise ModelError(f"{path}: the archive lists its members in {max(sizes)} bytes; the file is corrupt")


def _records(path: Path, archive: zipfile.ZipFile, data: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Byte ranges of the archive's members by name below its one top folder. Members must be uncompressed."""
    records: dict[str, tuple[int, int]] = {}
    tops = set()
    for info in archive.infolist():
        top, _, name = info.filename.partition("/")
        tops.add(top)
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.file_size != info.compress_size
            or info.flag_bits & 1
        ):
            raise ModelError(
                f"{path}: {info.filename} is compressed or encrypted, which PyTorch never writes"
            )
        header = data[info.header_offset : info.header_offset + 30]
        signature, name_length, extra_length = struct.unpack("<4s22xHH", header)
        begin = info.header_offset + 30 + name_length + extra_length
        if signature != b"PK\x03\x04" or begin + info.file_size > len(data) or name in records:
            raise ModelError(f"{path}: {info.filename} is out of bounds or occurs twice; the file is corrupt")
        records[name] = (begin, begin + info.file_size)
    if len(tops) != 1:
        raise ModelError(f"{path}: the archive has {len(tops)} top folders, a PyTorch checkpoint has one")
    return records


def _before_archives(path: Path, data: mmap.mmap, most: int) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Read the format before PyTorch 1.6: pickles of a number, a version, the system, the state and the storages' keys.

    The storages follow in the order of the keys, each after its size.
    """
    pickles = io.BytesIO(data[:MAX_PICKLE])
    number, _, system, state, keys = (_unpickled(path, pickles, most) for _ in range(5))
    if number != MAGIC or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise ModelError(f"{path}: not a PyTorch checkpoint, or a big-endian one")
    sizes = {t.storage.key: STORAGES[t.storage.dtype].itemsize for t in _tensors(path, state).values()
             if isinstance(t.storage, Storage)}  # fmt: skip
    at, records = pickles.tell(), {}
    for key in keys if isinstance(keys, list) else ():
        if not isinstance(key, str) or key not in sizes:
            raise ModelError(f"{path}: the list of storages has {key!r:.80}, which no tensor uses")
        end = at + 8 + int.from_bytes(data[at : at + 8], "little") * sizes[key]
        if end > len(data):
            raise ModelError(
                f"{path}: storage {key} ends at byte {end} of {len(data)}; the file is truncated"
            )
        records[f"data/{key}"] = at + 8, end
        at = end
    return state, records


def _unpickled(path: Path, data: bytes | io.BytesIO, most: int) -> Any:
    try:
        return read_pickle(data, min(MAX_OPERATIONS, (64 + most) * OPERATIONS))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except Exception as error:  # a corrupt pickle can fail in any way; nothing in it has run
        raise ModelError(f"{path}: the pickle is corrupt: {error}") from error


def _tensors(path: Path, state: Any) -> dict[str, Tensor]:
    if not isinstance(state, dict):
        raise ModelError(f"{path}: holds a {type(state).__name__}, not a state dict of tensors")
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"{path}: entry {name!r:.200} is not a tensor; save the model's state dict alone"
            )
    return state
