"""An engine directory: packed weights on disk as they are in memory, and a manifest that describes them.

Knows files, checksums and weights by path; knows no kernel and no checkpoint format. `engine.json` holds the
manifest and its checksum; `weights.bin` holds the tensors, each on a page boundary, so that they can be mapped and
used in place. An engine for several ranks holds such a pair for each: rank 1 has `engine.1.json` and `weights.1.bin`.
Readers refuse another format, another instruction set, and any changed byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import xxhash

from quire.devices.protocol import Backend, FloatArray, KVScales, Matrix, WeightPacker, WeightType
from quire.errors import ConfigError, EngineError, ModelError
from quire.files import map_file, read_bytes, replaced
from quire.model.families.names import TensorNames
from quire.model.info import UNLIMITED, Asked, EngineLimits, Limit, ModelInfo
from quire.model.kv_scales import check_kv_scales
from quire.model.load import BUILT, OLD, is_built
from quire.model.loaded import LoadedModel
from quire.model.packing import named
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.parts.part import config_of
from quire.model.parts.source import Piece, Use, Weights, WeightSource
from quire.model.shard import WHOLE, Shard
from quire.progress import Told, untold
from quire.weights.activations import KeptActivations
from quire.weights.layouts import AnyLayout
from quire.weights.schemes import Quantization, asks_for_other
from quire.weights.tensor import Array, FloatDtype, QuantTensor

MANIFEST, WEIGHTS = BUILT, "weights.bin"
FORMAT = 12
PAGE = 4096
MAX_MANIFEST = 64 << 20  # bytes
MAX_PARTS = 256
MAX_SUBLAYERS = 64
UNSOUND = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
_NUMBERS = re.compile(r"\{[ijens]\}")
_AGAIN = "run `quire build` or `quire convert` again"

T = TypeVar("T")
Size = Annotated[int, msgspec.Meta(ge=0)]


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor's place in weights.bin. `about` is the backend's description of a matrix, or an array's type."""

    offset: Size
    nbytes: Size
    about: dict[str, Any]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything in an engine except its tensors, whose places in weights.bin are given by their paths.

    `checksums` belong to equal parts of weights.bin, in order. `names` names the checkpoint's tensors, by which
    adapters find their place. The weights are the share of rank `rank` of `ranks`, divided as in Shard. `activations`
    is as in Checkpoint.
    """

    fingerprint: str
    spec: DecoderConfig
    dtype: FloatDtype
    quantized: Quantization | None
    num_parameters: int
    weight_bytes: int
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]
    limits: EngineLimits = UNLIMITED
    tensors: dict[str, StoredTensor]
    size: Limit
    checksums: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_PARTS)]
    names: TensorNames | None = None
    kv_scales: tuple[KVScales | None, ...] = ()
    rank: Size = 0
    ranks: Limit = 1
    exact: bool = False
    whole_experts: bool = False
    activations: KeptActivations = "float"

    @property
    def weights_file(self) -> str:
        return of_rank(WEIGHTS, self.rank)


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """engine.json. The format number is outside the manifest, where every version of Quire finds it."""

    format: int
    checksum: str
    engine: msgspec.Raw


def of_rank(name: str, rank: int) -> str:
    """Name the file of a rank; rank 0 has the plain name."""
    stem, dot, kind = name.rpartition(".")
    return f"{stem}.{rank}{dot}{kind}" if rank else name


def check_output(output: Path) -> None:
    """Raise ConfigError unless a directory to write is new or empty, or holds an engine."""
    if output.exists() and not is_built(output) and not (output / OLD).exists() and any(output.iterdir()):
        raise ConfigError(
            f"{output} holds something other than an engine: choose an empty or a new directory"
        )


@dataclass(frozen=True, slots=True, eq=False)
class InFile:
    """A matrix that lies at a place of a file, and no more in memory."""

    place: StoredTensor
    shape: tuple[int, int]
    nbytes: int
    greedy_nbytes: int

    def dequantize(self) -> FloatArray:
        raise EngineError("a weight that was written has no values here")


class Writer:
    """Writes a model's weights to weights.bin."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tensors: dict[str, StoredTensor] = {}
        self.size = 0

    def write(self, weights: Weights) -> None:
        """Name matrices that lie in the file, and write vectors."""
        for path, tensor in weights.items():
            if isinstance(tensor, InFile):
                self.tensors[path] = tensor.place
            elif isinstance(tensor, np.ndarray):
                self.add(path, _vector(tensor.size), np.ascontiguousarray(tensor, np.float32).view(np.uint8))
            else:
                raise TypeError(f"a model's weights hold a {type(tensor).__name__}")

    def add(self, path: str, about: dict[str, Any], data: Array) -> None:
        """Write a tensor by its bytes."""
        self.tensors[path] = self.place(about, data)

    def place(self, about: dict[str, Any], data: Array) -> StoredTensor:
        """Write the bytes of a tensor that has no path yet."""
        self._write(bytes(-self.size % PAGE))
        place = StoredTensor(offset=self.size, nbytes=data.nbytes, about=about)
        self._write(data.data)
        return place

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.size += len(data)


@dataclass(frozen=True, slots=True)
class WritingPacker:
    """A `WeightPacker` that writes each matrix as soon as it is packed: memory holds one."""

    packer: WeightPacker
    writer: Writer

    @property
    def fingerprint(self) -> str:
        return self.packer.fingerprint

    def matrix(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> InFile:
        return self._written(self.packer.matrix(parts, dtype))

    def head(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> InFile:
        return self._written(self.packer.head(parts, dtype))

    def gated_matrix(self, gate: Array | QuantTensor, up: Array | QuantTensor, dtype: WeightType) -> InFile:
        return self._written(self.packer.gated_matrix(gate, up, dtype))

    def takes(self, layout: AnyLayout) -> bool:
        return self.packer.takes(layout)

    def export(self, matrix: Matrix) -> tuple[dict[str, Any], Array]:
        return self.packer.export(matrix)

    def restore(self, about: dict[str, Any], data: Array) -> InFile:
        return self._written(self.packer.restore(about, data))

    def _written(self, matrix: Matrix) -> InFile:
        place = self.writer.place(*self.packer.export(matrix))
        return InFile(place, matrix.shape, matrix.nbytes, matrix.greedy_nbytes)


def write_share(
    directory: Path, write: Callable[[Writer], None], parts: int, info: ModelInfo, shard: Shard, **rest: Any
) -> Manifest:
    """Write a rank's weights, with checksums of `parts` parts, and its manifest. `rest` are further fields of it."""
    path = directory / of_rank(WEIGHTS, shard.rank)
    with replaced(path) as new, new.open("wb") as file:
        writer = Writer(file)
        write(writer)
    manifest = Manifest(
        dtype=info.dtype,
        quantized=info.quantized,
        num_parameters=info.num_parameters,
        weight_bytes=info.weight_bytes,
        eos_token_ids=info.eos_token_ids,
        generation=info.generation,
        tensors=writer.tensors,
        size=writer.size,
        checksums=Checksums(map_weights(path, writer.size), parts).result(),
        kv_scales=info.kv_scales,
        rank=shard.rank,
        ranks=shard.size,
        exact=shard.exact,
        whole_experts=shard.whole_experts,
        **rest,
    )
    write_manifest(directory, manifest)
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    engine = msgspec.json.encode(manifest)
    file = _File(format=FORMAT, checksum=_checksum(engine), engine=msgspec.Raw(engine))
    (directory / of_rank(MANIFEST, manifest.rank)).write_bytes(msgspec.json.encode(file))


def read_manifest(directory: Path, rank: int = 0, shard: Shard | None = None) -> Manifest:
    """Read the manifest of a rank's share, or of `shard`.

    Raises ModelError if the file is not a manifest, has another format, or was altered, and ConfigError if the engine
    is divided in another way.
    """
    first = _read_manifest(directory / MANIFEST)
    if shard is not None:
        if first.ranks != shard.size:
            raise ConfigError(
                f"{directory} was built for --tensor-parallel-size {first.ranks}, and {shard.size} is asked for: give "
                f"{first.ranks}, or run `quire build -tp {shard.size}` on the checkpoint"
            )
        rank = shard.rank
    if not rank:
        return first
    path = directory / of_rank(MANIFEST, rank)
    found = _read_manifest(path)
    theirs = rank, first.ranks, first.spec, first.fingerprint
    if (found.rank, found.ranks, found.spec, found.fingerprint) != theirs:
        raise ModelError(f"{path}: it does not belong to {MANIFEST} beside it; {_AGAIN}")
    return found


def _read_manifest(path: Path) -> Manifest:
    try:
        file = msgspec.json.decode(_intact(read_bytes, path, MAX_MANIFEST), type=_File)
        if file.format != FORMAT:
            raise ModelError(f"{path}: format {file.format}, this version of Quire reads {FORMAT}; {_AGAIN}")
        if _checksum(bytes(file.engine)) != file.checksum:
            raise ModelError(f"{path}: the file was altered after it was built; {_AGAIN}")
        manifest = msgspec.json.decode(file.engine, type=Manifest, dec_hook=config_of)
        _check(path, manifest)
        return manifest
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{path}: not an engine's manifest ({error}); {_AGAIN}") from error


def _check(path: Path, manifest: Manifest) -> None:
    """Raise ModelError for sizes and tokens that no engine has: a valid checksum is no proof of a sane manifest."""
    manifest.spec.check(str(path))
    check_kv_scales(manifest.kv_scales, manifest.spec, str(path))
    for token in manifest.eos_token_ids:
        if not 0 <= token < manifest.spec.vocab_size:
            raise ModelError(
                f"{path}: eos_token_ids holds {token}, the vocabulary {manifest.spec.vocab_size} tokens"
            )
    if manifest.names is not None:
        _check_names(path, manifest.names)
    for tensor in manifest.tensors.values():
        if tensor.offset % PAGE or tensor.offset + tensor.nbytes > manifest.size:
            raise ModelError(f"{path}: a tensor does not lie on a page inside the weights; {_AGAIN}")


def _check_names(path: Path, names: TensorNames) -> None:
    """Check that names, which are formatted with numbers, hold nothing else that format would read."""
    for module, name in {**names.modules, "layer": names.layer}.items():
        if set("{}") & {*_NUMBERS.sub("", name)}:
            raise ModelError(f"{path}: {module:.200} cannot be {name!r:.200}")
    if not 1 <= names.sublayers <= MAX_SUBLAYERS:
        raise ModelError(f"{path}: sublayers must be from 1 to {MAX_SUBLAYERS}, got {names.sublayers}")


class Places:
    """The tensors of a mapped weights.bin by path, and which of them were `read`."""

    def __init__(self, manifest: Manifest, data: Array) -> None:
        self._tensors, self._data = manifest.tensors, data
        self.read: set[str] = set()

    def about(self, path: str) -> dict[str, Any]:
        """Give the description of a tensor. ModelError: there is none."""
        if path not in self._tensors:
            raise ModelError(f"there is no tensor {path}")
        return self._tensors[path].about

    def data(self, path: str) -> Array:
        """Give the bytes of a tensor. ModelError: there is none."""
        self.about(path)
        self.read.add(path)
        entry = self._tensors[path]
        return self._data[entry.offset : entry.offset + entry.nbytes]


class _Reader:
    """A `WeightSource` of tensors in place. ModelError: one is missing, or of another shape."""

    def __init__(self, places: Places, backend: WeightPacker) -> None:
        self._places, self._backend = places, backend

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Matrix:
        about, data = self._places.about(path), self._places.data(path)
        with named(path, ConfigError, ModelError):
            matrix = self._backend.restore(about, data)
        shape = sum(piece.own_shape[0] for piece in pieces), pieces[0].own_shape[1]
        if matrix.shape != shape:
            raise ModelError(f"{path} is {list(matrix.shape)}, the model says {list(shape)}")
        return matrix

    def gated(self, path: str, gate: Piece, up: Piece) -> Matrix:
        return self.matrix(path, (gate, up))

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        about, size = self._places.about(path), sum(piece.own_shape[0] for piece in pieces)
        if about != _vector(size):
            raise ModelError(f"{path} is {about}, the model says {size} numbers")
        return self._places.data(path).view(np.float32)


def _vector(size: int) -> dict[str, Any]:
    """Describe a vector."""
    return {"dtype": "float32", "shape": [size]}


class BuiltFiles:
    """`ModelFiles` of an engine directory, which is mapped and used in place."""

    def __init__(self, directory: Path, manifest: Manifest, asked: Asked) -> None:
        self._directory, self.manifest, self.ranks = directory, manifest, manifest.ranks
        dtype, quantized = self._types(asked)
        self._longest = asked.max_len or manifest.limits.max_seq_len or manifest.spec.max_position
        self.info = ModelInfo(
            directory=directory,
            spec=manifest.spec.for_length(self._longest),
            dtype=dtype,
            num_parameters=manifest.num_parameters,
            weight_bytes=manifest.weight_bytes,
            eos_token_ids=manifest.eos_token_ids,
            generation=manifest.generation,
            limits=manifest.limits,
            quantized=quantized,
            kv_scales=manifest.kv_scales,
        )

    def outline(self, backend: Backend, shard: Shard = WHOLE) -> LoadedModel:
        return self._read(backend, shard, outline=True, told=untold)

    def load(self, backend: WeightPacker, shard: Shard = WHOLE, told: Told = untold) -> LoadedModel:
        return self._read(backend, shard, outline=False, told=told)

    def _types(self, asked: Asked) -> tuple[FloatDtype, Quantization | None]:
        """Give the types of the weights. ModelError: others are asked for."""
        directory, manifest = self._directory, self.manifest
        if asked.reading.config or asked.reading.dummy or asked.reading.spare_tokens:
            raise ModelError(
                f"{directory} is a built engine: give --hf-overrides and --load-format to `quire build`; for "
                "--lora-extra-vocab-size serve the checkpoint"
            )
        if asked.dtype not in ("auto", manifest.dtype):
            raise ModelError(
                f"{directory} was built in {manifest.dtype} and --dtype asks for {asked.dtype}; leave it out, or run "
                f"`quire build --dtype {asked.dtype}`"
            )
        if asks_for_other(asked.quantized, manifest.quantized):
            raise ModelError(
                f"{directory} was built with other weights than --quantization asks for; leave it out, or run "
                "`quire build` with it"
            )
        return manifest.dtype, manifest.quantized

    def _source(
        self, places: Places, manifest: Manifest, backend: WeightPacker, outline: bool, told: Told
    ) -> WeightSource:
        """Give the weights of a share. ModelError: they are another machine's."""
        if backend.fingerprint != manifest.fingerprint:
            raise ModelError(
                f"{self._directory} was built for {manifest.fingerprint}, and this is {backend.fingerprint}: "
                "run `quire build` again, or choose --isa or --device as for the build"
            )
        return _Reader(places, backend)

    def _read(self, backend: WeightPacker, shard: Shard, outline: bool, told: Told) -> LoadedModel:
        directory = self._directory
        manifest = read_manifest(directory, shard=shard)
        shard = shard.divided(manifest.exact, manifest.whole_experts, str(directory))
        manifest.spec.check_share(shard)
        data = map_weights(directory / manifest.weights_file, manifest.size)
        places = Places(manifest, data)
        source = self._source(places, manifest, backend, outline, told)
        try:
            decoder = Decoder(manifest.spec.for_length(self._longest), source, shard)
            left = manifest.tensors.keys() - places.read - decoder.weights.keys()
            if left and shard.stages == 1:
                raise ModelError(f"nothing reads {min(left)}")
        except (ModelError, *UNSOUND) as error:  # a description of no model that was written
            path = directory / of_rank(MANIFEST, manifest.rank)
            raise ModelError(f"{path}: {error}; {_AGAIN}") from error
        check = None
        if not outline:
            check = partial(Checksums(data, len(manifest.checksums)).check, directory, manifest)
        return LoadedModel(self.info, decoder, check, shard, names=manifest.names)


class Checksums:
    """Checksums of equal parts of a mapped file; computing them also brings the file into memory.

    Each part has a thread, which makes one call without the GIL, so the caller's own work goes on beside it.
    """

    def __init__(self, data: Array, parts: int) -> None:
        """Start the threads."""
        self._bounds = [len(data) * i // parts for i in range(parts + 1)]
        threads = ThreadPoolExecutor(parts, "checksums")
        self._found = [threads.submit(_checksum, data[a:b]) for a, b in pairwise(self._bounds)]
        threads.shutdown(wait=False)

    def result(self) -> tuple[str, ...]:
        """Wait for them."""
        return tuple(found.result() for found in self._found)

    def check(self, directory: Path, manifest: Manifest) -> None:
        """Wait for them. ModelError if they differ from the manifest's."""
        for start, found, right in zip(self._bounds, self.result(), manifest.checksums, strict=False):
            if found != right:
                place = f"{directory / manifest.weights_file}: bytes after {start}"
                raise ModelError(f"{place} were altered since it was built; {_AGAIN}")


def map_weights(path: Path, right: int) -> Array:
    """Map a file of weights, which must have the size `right`, as read-only bytes; it stays mapped while in use."""
    data, size = _intact(map_file, path)
    if size != right:
        raise ModelError(
            f"{path} has {size} bytes and the manifest says {right}: cut off or altered; {_AGAIN}"
        )
    return np.frombuffer(data, np.uint8)


def _intact(read: Callable[..., T], *args: Any) -> T:
    """Read a file of an engine. ModelError also says how to make it anew."""
    try:
        return read(*args)
    except ModelError as error:
        raise ModelError(f"{error}; {_AGAIN}") from error


def _checksum(data: Any) -> str:
    """Compute 64-bit XXH3 (github.com/Cyan4973/xxHash): finds damage at the speed of memory, but no attacks."""
    return xxhash.xxh3_64_hexdigest(data)
