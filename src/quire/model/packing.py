"""Packs a checkpoint's tensors for a backend: checks that all are there, then reads and packs one by one.

Knows checkpoints and backends; tensors/ knows the place of each piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol, get_args

import ml_dtypes
import numpy as np

from quire.devices.protocol import Matrix, WeightPacker
from quire.errors import ConfigError, ModelError
from quire.model.families.names import TensorNames
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.parts.source import Listing, Piece, Use
from quire.model.shard import WHOLE, Shard
from quire.model.tensors import Tensors
from quire.progress import Told, untold
from quire.weights.activations import KeptActivations, Rounding
from quire.weights.checkpoint import Checkpoint
from quire.weights.layouts import AnyLayout, Blocks, Int8, stackable
from quire.weights.layouts.blocks import KINDS
from quire.weights.parts import Part
from quire.weights.schemes import Activations, Kept, Quantization, Quantized, Scheme, WeightType
from quire.weights.tensor import Array, FloatArray, FloatDtype, QuantTensor

COMPARE = 4 << 20  # elements compared at a time
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """A tensor that a checkpoint must contain. With `exact` it stays float32, whatever the model's dtype.

    `numbers` are whole.
    """

    shape: tuple[int, ...]
    exact: bool
    numbers: bool = False

    @property
    def parameters(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightTypes:
    """The type of each use of a matrix.

    `kept`: quantized matrices of the checkpoint keep their codes and are multiplied with activations of this type;
    if None, their values are rounded like all others.
    """

    types: Mapping[Use, WeightType]
    kept: KeptActivations | None

    @classmethod
    def of(cls, dtype: FloatDtype, scheme: Quantization | None) -> WeightTypes:
        """Choose the types of a model of `dtype` whose matrices a scheme quantizes, or whose checkpoint did."""
        types: dict[Use, WeightType] = dict.fromkeys(("linear", "table", "head", "positions"), dtype)
        types["exact"] = types["numbers"] = "float32"
        if scheme is None:
            return cls(types, None)
        if isinstance(scheme, Kept):
            return cls(types, scheme.activations)
        types["linear"], types["table"], types["head"] = scheme.linear, scheme.table, scheme.table
        return cls(types, None)


@dataclass(frozen=True, slots=True)
class Packer:
    """Reads parts of tensors and passes them to the backend; with `outline`, only their shapes."""

    checkpoint: Checkpoint | None
    backend: WeightPacker
    types: WeightTypes
    outline: bool = False

    def matrix(self, parts: Sequence[Part], use: Use = "linear") -> Matrix:
        if use in ("linear", "table", "head") and (kept := self._kept(parts, use == "table")):
            return self.backend.matrix(*kept)
        pack = self.backend.head if use == "head" else self.backend.matrix
        return pack(*self._rounded(parts, self.types.types[use]))

    def gated(self, gate: Part, up: Part) -> Matrix:
        if kept := self._kept([gate, up]):
            tensors, dtype = kept
            return self.backend.gated_matrix(tensors[0], tensors[1], dtype)
        (first, second), rounded = self._rounded([gate, up], self.types.types["linear"])
        return self.backend.gated_matrix(first, second, rounded)

    def vector(self, parts: Sequence[Part]) -> FloatArray:
        return np.concatenate([np.array(self._read(part), np.float32) for part in parts])

    def _read(self, part: Part) -> Array:
        return part.outline() if self.outline or self.checkpoint is None else part.read(self.checkpoint)

    def _rounded(
        self, parts: Sequence[Part], dtype: WeightType
    ) -> tuple[Sequence[Array | QuantTensor], WeightType]:
        """Round parts to a type. Blocks are made here, other types by the backend; rows of odd lengths become int8."""
        read = [self._read(part) for part in parts]
        if not isinstance(dtype, Quantized) or not isinstance(dtype.layout, Blocks):
            return read, dtype
        layout = dtype.layout
        if read[0].shape[1] % KINDS[layout.kind].columns:
            return read, Quantized(Int8(), dtype.activations)
        if self.outline:
            return [layout.outline(*array.shape) for array in read], dtype
        return [layout.quantize(np.asarray(array, np.float32)) for array in read], dtype

    def _kept(
        self, parts: Sequence[Part], table: bool = False
    ) -> tuple[list[QuantTensor], WeightType] | None:
        """Keep parts as the checkpoint quantized them, if all are in layouts that make one weight of the backend's.

        Rows of a `table` are read one by one, in the order of its columns.
        """
        if self.checkpoint is None or self.types.kept is None:
            return None
        found = [part.layout(self.checkpoint) for part in parts]
        layouts = [layout for layout in found if layout is not None and self.backend.takes(layout)]
        if len(layouts) < len(parts) or (table and any(map(_is_no_table, layouts))):
            return None
        tensors = [part.quantized(self.checkpoint, self.outline) for part in parts]
        if not stackable(tensors):
            return None
        if self.types.kept == "checkpoint":
            return tensors, Quantized(layouts[0], "float" if table else self._rounding(parts, layouts))
        kept: Activations = "float" if any(layout.floats for layout in layouts) else self.types.kept
        return tensors, Quantized(layouts[0], kept)

    def _rounding(self, parts: Sequence[Part], layouts: Sequence[AnyLayout]) -> Activations | Rounding:
        """Find how the checkpoint rounds the input of these parts; it stays float if they do not agree."""
        assert self.checkpoint is not None
        found = [self.checkpoint.rounding(part.tensors[0][0]) for part in parts]
        joined = found[0]
        for rounding in found[1:]:
            joined = None if joined is None or rounding is None else joined.joined(rounding)
        if joined is None:
            return "float"
        whole_rows = all(not layout.floats and not layout.rounds for layout in layouts)
        return "int8" if joined.is_int8_by_row and whole_rows else joined


@contextmanager
def named(path: str, *kinds: type[ConfigError | ModelError]) -> Iterator[None]:
    """Name a weight in errors of these kinds, which a device raises that cannot have it."""
    try:
        yield
    except kinds as error:
        raise type(error)(f"{path}: {error}") from error


class Parts(Protocol):
    """Places of pieces among a checkpoint's tensors."""

    def part(self, piece: Piece) -> Part: ...


@dataclass(frozen=True, slots=True)
class Packed:
    """A `WeightSource` that packs the tensors of a checkpoint."""

    tensors: Parts
    packer: Packer
    told: Told = untold

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Matrix:
        with named(path, ConfigError):
            matrix = self.packer.matrix([self.tensors.part(piece) for piece in pieces], use)
        self.told(matrix.nbytes)
        return matrix

    def gated(self, path: str, gate: Piece, up: Piece) -> Matrix:
        with named(path, ConfigError):
            matrix = self.packer.gated(self.tensors.part(gate), self.tensors.part(up))
        self.told(matrix.nbytes)
        return matrix

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        return self.packer.vector([self.tensors.part(piece) for piece in pieces])


def wanted_tensors(config: DecoderConfig, names: TensorNames) -> dict[str, WantedTensor]:
    """List every tensor that a checkpoint must contain, without a tied head."""
    return wanted_of(Tensors(config, names))


def wanted_of(tensors: Tensors) -> dict[str, WantedTensor]:
    listing, wanted = Listing(), dict[str, WantedTensor]()
    Decoder(tensors.config, listing)
    for piece, use in listing.pieces.items():
        for name, shape in tensors.part(piece).tensors:
            wanted[name] = WantedTensor(shape, use in ("exact", "numbers"), use == "numbers")
    return wanted


def pack_weights(
    config: DecoderConfig, names: TensorNames, packer: Packer, shard: Shard = WHOLE, told: Told = untold
) -> Decoder:
    """Read and pack a checkpoint that `check_tensors` accepted, or a rank's share of it."""
    if not packer.outline and packer.checkpoint is not None:
        _check_tied_head(config, names, packer.checkpoint)
    return Decoder(config, Packed(Tensors(config, names), packer, told), shard)


def check_tensors(
    config: DecoderConfig, names: TensorNames, checkpoint: Checkpoint, directory: Path
) -> dict[str, WantedTensor]:
    """List the tensors to load. Raises ModelError if one is missing, left over or wrong."""
    expected = wanted_tensors(config, names)
    present = set(checkpoint.names())
    missing = [name for name in expected if name not in present]
    if missing:
        raise ModelError(f"{directory}: missing {_list(missing)}; the checkpoint does not match config.json")
    tied = {f"{names['head']}.weight"} if config.tied else set()
    left = sorted(
        name
        for name in present - expected.keys() - tied
        if not names.is_ignored(name) and not _holds_nothing(checkpoint, name)
    )
    if left:
        raise ModelError(
            f"{directory}: unexpected {_list(left)}; {config.architecture} has no place for them"
        )
    wanted = dict(expected)
    for name in tied & present:
        wanted[name] = expected[f"{names['embedding']}.weight"]
    for name, tensor in wanted.items():
        if checkpoint.shape(name) != tensor.shape:
            found = list(checkpoint.shape(name))
            raise ModelError(
                f"{checkpoint.path(name)}: tensor {name} is {found}, config.json says {list(tensor.shape)}"
            )
        supported = INTEGERS if tensor.numbers else FLOATS
        if checkpoint.dtype(name) not in supported:
            raise ModelError(
                f"{checkpoint.path(name)}: tensor {name} is {checkpoint.dtype(name)}; "
                f"supported are {', '.join(map(str, supported))}"
            )
    return expected


def _holds_nothing(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is empty, or a bias of zeros: tools wrote them for models that have none."""
    shape = checkpoint.shape(name)
    if 0 in shape:
        return True
    return name.endswith(".bias") and len(shape) == 1 and not checkpoint.get(name).any()


def _is_no_table(layout: AnyLayout) -> bool:
    """Whether rows of a weight of this layout cannot be read one by one."""
    return layout.inputs or (isinstance(layout, Blocks) and layout.entries > 0)


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:5])}{more}"


def choose_dtype(dtype: str, wanted: Mapping[str, WantedTensor], checkpoint: Checkpoint) -> FloatDtype:
    """Choose the dtype that holds the model: "auto" is its matrices' dtype, or float32 if they have several.

    Matrices that keep their codes don't count, since they name bfloat16 whatever the others are.
    """
    names: dict[str, FloatDtype] = {name: name for name in get_args(FloatDtype)}
    if dtype in names:
        return names[dtype]
    if dtype != "auto":
        raise ModelError(f"dtype must be auto, float32, float16 or bfloat16, got {dtype!r}")
    rounded = [name for name, tensor in wanted.items() if not tensor.exact]
    found = set(map(checkpoint.dtype, rounded))
    if len(found) > 1:
        found = {checkpoint.dtype(name) for name in rounded if checkpoint.layout(name) is None}
    return names[found.pop().name] if len(found) == 1 else "float32"


def own_quantization(
    dtype: str, wanted: Iterable[str], checkpoint: Checkpoint, asked: Quantization | None
) -> Quantization | None:
    """Find how a checkpoint's matrices stay quantized, if they do and nothing else is asked for.

    A `dtype` decodes them, unless activations are to be rounded as the checkpoint says.
    """
    if isinstance(asked, Scheme):
        return asked
    layouts = [layout for name in wanted if (layout := checkpoint.layout(name)) is not None]
    if (dtype == "float32" and asked != Kept("checkpoint")) or not layouts:
        if asked in (Kept("int8"), Kept("checkpoint")):
            raise ConfigError(
                f"--quantization-activations {asked.activations} is for weights that are quantized; leave it out, or "
                "choose --quantization int8"
            )
        return None
    names = tuple(name for name, _ in Counter(layout.label for layout in layouts).most_common())
    first = next(layout for layout in layouts if layout.label == names[0])
    if asked == Kept("checkpoint") and checkpoint.activations == "int8":
        asked = Kept("int8")
    if asked == Kept("int8") and all(layout.floats for layout in layouts):
        raise ConfigError(
            f"--quantization-activations int8 multiplies integers, and the weights are {', '.join(names)}; leave it "
            "out, or choose --quantization int8"
        )
    return Kept(checkpoint.activations if asked is None else asked.activations, names, first)


def _check_tied_head(config: DecoderConfig, names: TensorNames, checkpoint: Checkpoint) -> None:
    """Check that a checkpoint that also stores a tied head stores the embedding's values."""
    head, embedding = f"{names['head']}.weight", f"{names['embedding']}.weight"
    if not config.tied or head not in set(checkpoint.names()):
        return
    if not _equal(checkpoint.get(head), checkpoint.get(embedding)):
        raise ModelError(
            f"{checkpoint.path(head)}: tie_word_embeddings is true but {head} differs "
            f"from {embedding}; set it to false in config.json if the head is meant to be used"
        )


def _equal(first: Array, second: Array) -> bool:
    """Compare bit for bit, in pieces. Numbers of two types are equal if they are as float32."""
    a, b = first.reshape(-1), second.reshape(-1)
    kind = a.dtype if a.dtype == b.dtype else np.dtype(np.float32)
    bits = f"u{kind.itemsize}"
    pieces = (slice(i, i + COMPARE) for i in range(0, len(a), COMPARE))
    return all(
        np.array_equal(a[piece].astype(kind).view(bits), b[piece].astype(kind).view(bits)) for piece in pieces
    )
