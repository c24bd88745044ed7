"""A PyTorch zip checkpoint (pytorch_model.bin) read without torch and without running anything in it.

The pickle inside may hold only dictionaries, lists, tuples, numbers, strings and tensors. Opcodes that could
build other objects are refused before unpickling, and every global resolves to one of a few inert, immutable
stand-ins, so that no opcode can alter anything. Storages are mapped, never copied.
"""

from __future__ import annotations

import collections
import io
import mmap
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from quire.errors import ModelError
from quire.files import map_file, open_regular
from quire.weights.checkpoint.protocol import Unquantized
from quire.weights.tensor import Array

MAX_PICKLE = 256 << 20  # bytes; the pickle holds names and shapes only
STORAGES: dict[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype("<f8"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
OPCODES_BY_USE = {
    "frame": "PROTO FRAME STOP MARK POP POP_MARK",
    "memo": "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET",
    "numbers": "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT NONE NEWTRUE NEWFALSE",
    "strings": "STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES",
    "containers": "EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3",
    "tensors": "GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID",
}
OPCODES = frozenset(name for names in OPCODES_BY_USE.values() for name in names.split())


class Storage(NamedTuple):
    """A run of `size` elements kept in the archive under data/`key`."""

    dtype: str
    key: str
    size: int


class Tensor(NamedTuple):
    """A strided view of a storage; offset and strides in elements. Unchecked until `_check_tensor`."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


class RebuildTensor:
    """Stands in for torch._utils._rebuild_tensor_v2."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, strides: Any, *_grad_and_hooks: Any) -> Tensor:
        return Tensor(storage, offset, shape, strides)


class RebuildParameter:
    """Stands in for torch._utils._rebuild_parameter: a parameter is its tensor."""

    __slots__ = ()

    def __call__(self, tensor: Any, *_grad_and_hooks: Any) -> Any:
        return tensor


class Unpickler(pickle.Unpickler):
    """Resolves only what a state dict needs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return RebuildTensor()
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return RebuildParameter()
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name in STORAGES:
            return name
        raise ModelError(
            f"the pickle asks for {module}.{name}, which no checkpoint needs; refused, it may be hostile"
        )

    def persistent_load(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise ModelError("a persistent id in the pickle is not a storage")
        _, dtype, key, _device, count = pid
        if dtype not in STORAGES or not isinstance(key, str) or not _is_size(count):
            raise ModelError("a storage in the pickle has no known type, key or size")
        return Storage(dtype, key, count)


class TorchFile(Unquantized):
    """A `Checkpoint` of one file. Raises ModelError, naming the file, for anything it will not read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._map, _ = map_file(path)
            _check_zip(path, self._map[:8])
            with open_regular(path) as file, zipfile.ZipFile(file) as archive:
                self._records = _records(path, archive, self._map)
        except ModelError:
            raise
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, EOFError) as error:
            raise ModelError(
                f"{path}: the archive is truncated or corrupt: {error}; fetch it again"
            ) from error
        if self._record("byteorder", b"little") != b"little":
            raise ModelError(f"{path}: big-endian checkpoints are not supported; save it again")
        self._tensors = _load_tensors(path, self._record("data.pkl"))
        for name, tensor in self._tensors.items():
            self._check_tensor(name, tensor)

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> np.dtype[Any]:
        return STORAGES[self._tensors[name].storage.dtype]

    def path(self, name: str) -> Path:
        return self._path

    def get(self, name: str) -> Array:
        tensor, dtype = self._tensors[name], self.dtype(name)
        begin, _ = self._records[f"data/{tensor.storage.key}"]
        strides = tuple(s * dtype.itemsize for s in tensor.strides)
        if 0 in tensor.shape:
            return np.empty(tensor.shape, dtype)
        offset = begin + tensor.offset * dtype.itemsize
        array: Array = np.ndarray(tensor.shape, dtype, self._map, offset, strides)
        return np.require(array, requirements=["C", "A"])

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
        if not isinstance(storage, Storage) or not _is_size(tensor.offset):
            raise ModelError(f"{where} is not made from a storage and an offset")
        if not all(isinstance(v, tuple) and all(_is_size(n) for n in v) for v in sizes):
            raise ModelError(f"{where} has shape {tensor.shape!r} and strides {tensor.strides!r}")
        if len(tensor.shape) != len(tensor.strides) or len(tensor.shape) > 8:
            raise ModelError(f"{where} has {len(tensor.shape)} sizes and {len(tensor.strides)} strides")
        record = self._records.get(f"data/{storage.key}")
        if record is None:
            raise ModelError(f"{where}: its data (data/{storage.key}) is not in the archive")
        last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        if 0 not in tensor.shape and (last + 1) * STORAGES[storage.dtype].itemsize > record[1] - record[0]:
            raise ModelError(f"{where} reaches beyond its data (data/{storage.key}); the file is corrupt")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _check_zip(path: Path, head: bytes) -> None:
    if head[:4] == b"PK\x03\x04":
        return
    if head[:1] == b"\x80":
        raise ModelError(
            f"{path}: PyTorch's old format (before 1.6) is not supported; load it with torch and save it "
            "again, best as safetensors"
        )
    raise ModelError(
        f"{path}: not a PyTorch checkpoint (no zip archive); it may be truncated or a pointer to a file"
    )


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


def check_opcodes(data: bytes) -> None:
    """Raise ModelError unless every opcode is one that a state dict needs. Memo indices stay small."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in OPCODES:
            raise ModelError(f"the pickle uses {opcode.name}, which no checkpoint needs; it may be hostile")
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise ModelError("the pickle has a memo index beyond its size; it may be hostile")


def _load_tensors(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        check_opcodes(data)
        state = Unpickler(io.BytesIO(data)).load()
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except Exception as error:  # a corrupt pickle can fail in any way; nothing in it has run
        raise ModelError(f"{path}: the pickle is corrupt: {error}") from error
    if not isinstance(state, dict):
        raise ModelError(f"{path}: holds a {type(state).__name__}, not a state dict of tensors")
    for name, value in dict.items(state):
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ModelError(f"{path}: entry {name!r} is not a tensor; save the model's state dict alone")
    return dict(dict.items(state))
