"""Weights from a checkpoint to a backend: what must be there, and each part read and packed, one at a time.

Knows checkpoints and backends; assemble.py knows what goes where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from msgspec.structs import replace

from quire.devices.protocol import (
    GROUPS_OF_INT4,
    Array,
    Backend,
    FloatArray,
    FloatDtype,
    Matrix,
    Quantized,
    Scheme,
    WeightType,
)
from quire.errors import ModelError
from quire.model.assemble import Assembly, Use
from quire.model.decoder import DecoderWeights
from quire.model.families.names import TensorNames
from quire.model.spec import ArchSpec
from quire.weights.checkpoint import Checkpoint
from quire.weights.parts import Part

COMPARE = 4 << 20  # elements compared at a time
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a checkpoint must hold. `parameters` may be more than elements, where these are packed.

    `exact`: kept as float32, whatever the model's type.
    """

    shape: tuple[int, ...]
    dtypes: tuple[np.dtype[Any], ...]
    parameters: int
    exact: bool


class _Wanted:
    """A `Source` that only notes what it is asked for."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def note(self, parts: Sequence[Part], exact: bool = False) -> None:
        for part in parts:
            for (name, shape), per_element in zip(part.tensors, part.per_element, strict=True):
                self.tensors[name] = Tensor(shape, part.dtypes, per_element * prod(shape), exact)

    def matrix(self, parts: Sequence[Part], use: Use = "linear") -> Any:
        self.note(parts, use == "exact")

    def gated(self, gate: Part, up: Part) -> Any:
        self.note((gate, up))

    def vector(self, parts: Sequence[Part]) -> FloatArray:
        self.note(parts, exact=True)
        return np.concatenate([part.outline() for part in parts])


@dataclass(frozen=True, slots=True)
class _Packer:
    """A `Source` that reads parts and hands them to the backend; with `outline`, only their shapes.

    `types` has "stored" where a matrix that the checkpoint keeps in int4 stays as it is.
    """

    checkpoint: Checkpoint | None
    backend: Backend
    types: Mapping[Use, WeightType]
    outline: bool = False

    def matrix(self, parts: Sequence[Part], use: Use = "linear") -> Matrix:
        groups = self._groups(parts) if use in ("linear", "table", "head") else []
        if groups:
            return self.backend.matrix(groups, self._stored(groups))
        pack = self.backend.head if use == "head" else self.backend.matrix
        return pack([self._read(part) for part in parts], self.types[use])

    def gated(self, gate: Part, up: Part) -> Matrix:
        groups = self._groups([gate, up])
        if groups:
            return self.backend.gated_matrix(groups[0], groups[1], self._stored(groups))
        return self.backend.gated_matrix(self._read(gate), self._read(up), self.types["linear"])

    def vector(self, parts: Sequence[Part]) -> FloatArray:
        return np.concatenate([np.array(self._read(part), np.float32) for part in parts])

    def _read(self, part: Part) -> Array:
        return part.outline() if self.outline or self.checkpoint is None else part.read(self.checkpoint)

    def _groups(self, parts: Sequence[Part]) -> list[Array]:
        """All parts in groups of int4, of one type; else none."""
        if self.checkpoint is None or "stored" not in self.types:
            return []
        found = [part.groups(self.checkpoint, self.outline) for part in parts]
        kept = [groups for groups in found if groups is not None and groups.dtype == found[0].dtype]  # type: ignore[union-attr]
        return kept if len(kept) == len(parts) else []

    def _stored(self, groups: list[Array]) -> WeightType:
        stored = self.types["stored"]
        assert isinstance(stored, Quantized)
        return replace(stored, symmetric=groups[0].dtype == GROUPS_OF_INT4[0])


def wanted_tensors(spec: ArchSpec, names: TensorNames) -> dict[str, Tensor]:
    """Every tensor that must be there. A tied head is not among them."""
    wanted = _Wanted()
    Assembly(spec, names, wanted).weights()
    return wanted.tensors


def pack_weights(
    spec: ArchSpec,
    names: TensorNames,
    checkpoint: Checkpoint,
    backend: Backend,
    types: Mapping[Use, WeightType],
) -> DecoderWeights:
    """Read and pack all of a checkpoint that `check_tensors` found in order."""
    _check_tied_head(spec, names, checkpoint)
    return Assembly(spec, names, _Packer(checkpoint, backend, types)).weights()


def outline_weights(
    spec: ArchSpec,
    names: TensorNames,
    backend: Backend,
    types: Mapping[Use, WeightType],
    checkpoint: Checkpoint | None = None,
) -> DecoderWeights:
    """The weights without values, for a backend that plans."""
    return Assembly(spec, names, _Packer(checkpoint, backend, types, outline=True)).weights()


def check_tensors(
    spec: ArchSpec, names: TensorNames, checkpoint: Checkpoint, directory: Path
) -> dict[str, Tensor]:
    """The tensors to load. Raises ModelError where one is missing, left over or wrong."""
    expected = wanted_tensors(spec, names)
    present = set(checkpoint.names())
    missing = [name for name in expected if name not in present]
    if missing:
        raise ModelError(f"{directory}: missing {_list(missing)}; the checkpoint does not match config.json")
    tied = {f"{names.head}.weight"} if spec.tie_embeddings else set()
    left = sorted(name for name in present - expected.keys() - tied if not names.is_ignored(name))
    if left:
        raise ModelError(f"{directory}: unexpected {_list(left)}; {spec.architecture} has no place for them")
    wanted = dict(expected)
    for name in tied & present:
        wanted[name] = expected[f"{names.embedding}.weight"]
    for name, tensor in wanted.items():
        if checkpoint.shape(name) != tensor.shape:
            found = list(checkpoint.shape(name))
            raise ModelError(
                f"{checkpoint.path(name)}: tensor {name} is {found}, config.json says {list(tensor.shape)}"
            )
        if checkpoint.dtype(name) not in tensor.dtypes:
            raise ModelError(
                f"{checkpoint.path(name)}: tensor {name} is {checkpoint.dtype(name)}; "
                f"supported are {', '.join(map(str, tensor.dtypes))}"
            )
    return expected


def weight_types(dtype: FloatDtype, scheme: Scheme | None, stored: bool = False) -> dict[Use, WeightType]:
    """The type of a weight by its use.

    With `stored`, and where int4 is asked for, what the checkpoint keeps in int4 stays as it is.
    """
    types: dict[Use, WeightType] = dict.fromkeys(("linear", "table", "head", "positions"), dtype)
    types["exact"] = "float32"
    kept = Quantized(4, 32, int8_rows=False, scales="float32")
    if scheme is None:
        return types | {"stored": kept} if stored else types
    types["linear"], types["table"], types["head"] = scheme.linear, scheme.table, scheme.table
    if scheme.linear.bits == 4:
        types["stored"] = replace(kept, int8_rows=scheme.linear.int8_rows)
    return types


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:5])}{more}"


def choose_dtype(dtype: str, wanted: Mapping[str, Tensor], checkpoint: Checkpoint) -> FloatDtype:
    """ "auto" is bfloat16 where all matrices are, or are in a form that bfloat16 holds exactly; else float32."""
    if dtype == "bfloat16" or dtype == "float32":
        return "bfloat16" if dtype == "bfloat16" else "float32"
    if dtype != "auto":
        raise ModelError(f"dtype must be auto, float32 or bfloat16, got {dtype!r}")
    matrices = [name for name, tensor in wanted.items() if not tensor.exact]
    exact = (BFLOAT16, np.dtype(np.uint8))
    return "bfloat16" if all(checkpoint.dtype(name) in exact for name in matrices) else "float32"


def _check_tied_head(spec: ArchSpec, names: TensorNames, checkpoint: Checkpoint) -> None:
    """A tied head is the embedding; a checkpoint that also stores it must store the same values."""
    head, embedding = f"{names.head}.weight", f"{names.embedding}.weight"
    if not spec.tie_embeddings or head not in set(checkpoint.names()):
        return
    if not _equal(checkpoint.get(head), checkpoint.get(embedding)):
        raise ModelError(
            f"{checkpoint.path(head)}: tie_word_embeddings is true but {head} differs "
            f"from {embedding}; set it to false in config.json if the head is meant to be used"
        )


def _equal(first: Array, second: Array) -> bool:
    """Bit for bit, in pieces; tensors of two types are never equal."""
    a, b = first.reshape(-1), second.reshape(-1)
    if a.dtype != b.dtype:
        return False
    bits = f"u{a.dtype.itemsize}"
    pieces = (slice(i, i + COMPARE) for i in range(0, len(a), COMPARE))
    return all(np.array_equal(a[piece].view(bits), b[piece].view(bits)) for piece in pieces)
