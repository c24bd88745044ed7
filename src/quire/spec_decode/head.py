"""A drafter that runs a model: its graphs, what it reads of the target, and its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.devices.hidden import HiddenRows, join, normalized
from quire.devices.protocol import Backend, FloatArray, Graph, IntArray, KVSpec, Matrix
from quire.engine.drafter_config import read_drafter
from quire.errors import ModelError
from quire.model.families.names import TensorNames
from quire.model.loaded import LoadedModel
from quire.model.packing import Packer, WeightTypes
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.source import Piece, Use
from quire.model.tensors import Tensors
from quire.model.tensors.stored import plus
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.checkpoint.safetensors import SafetensorsFile
from quire.weights.checkpoint.torch_pickle import TorchFile
from quire.weights.parts import Part, Take

MEDUSA_FILES: tuple[tuple[str, Callable[[Path], Checkpoint]], ...] = (
    ("medusa_lm_head.safetensors", SafetensorsFile),
    ("medusa_lm_head.pt", TorchFile),
)


@dataclass(frozen=True, slots=True)
class Head:
    """The graphs of a drafter.

    `first` computes new tokens of a sequence: it receives the `features` of the target's hidden states (nothing if
    `taps` is empty). `again` computes drafted tokens and receives the only tap of the pass before; None:
    `first` does both, from tokens alone. Heads without attention have one graph per token in `stages` instead.

    `taps` are the target's layers whose outputs are read, joined in this order. `target_ids` [D] maps the drafter's
    token ids to the target's, if they differ. It drafts `num_tokens` tokens unless told otherwise, and at most `most`.
    """

    first: Graph | None = None
    again: Graph | None = None
    stages: tuple[Graph, ...] = ()
    block: Graph | None = None
    kv_spec: KVSpec | None = None
    taps: tuple[int, ...] = ()
    tap_norms: tuple[FloatArray, ...] = ()
    tap_eps: float = 0.0
    target_ids: IntArray | None = None
    draft_ids: IntArray | None = None
    num_tokens: int = 3
    most: int = 256
    mask_token: int = 0
    max_len: int | None = None
    weight_bytes: int = 0

    @property
    def graphs(self) -> list[Graph]:
        return [g for g in (self.first, self.again, self.block, *self.stages) if g is not None]

    def features(self, taps: Sequence[HiddenRows], rows: range) -> HiddenRows:
        """Join rows of the target's tapped layers side by side: [rows, F]. `taps` are the graph's, ascending."""
        order = sorted(set(self.taps))
        parts = [taps[order.index(tap)][rows.start : rows.stop] for tap in self.taps]
        if self.tap_norms:
            parts = [normalized(x, w, self.tap_eps) for x, w in zip(parts, self.tap_norms, strict=True)]
        return join(parts, axis=1)


class HeadSource:
    """The config and the tensors of a head, packed one by one for a backend. `outline`: shapes without values."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        checkpoint: Checkpoint,
        backend: Backend,
        target: LoadedModel,
        outline: bool,
    ) -> None:
        self.path, self.config, self.checkpoint = path, config, checkpoint
        self.packer = Packer(checkpoint, backend, WeightTypes.of(target.dtype, None), outline)
        self.nbytes = 0
        self._present = frozenset(checkpoint.names())
        self._used: set[str] = set()

    @classmethod
    def open(cls, path: Path, backend: Backend, target: LoadedModel, outline: bool) -> HeadSource:
        """ModelError: there are no weights, or they cannot be read."""
        return cls(path, read_drafter(path), _open(path), backend, target, outline)

    def has(self, name: str) -> bool:
        return name in self._present

    def matrix(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        width: int,
        take: Take | None = None,
        use: Any = "linear",
    ) -> Matrix:
        """Matrices [rows[i], width] stacked; `take` picks from each."""
        parts = [self.part(name, (count, width), take) for name, count in zip(names, rows, strict=True)]
        return self.count(self.packer.matrix(parts, use))

    def halves(self, names: Sequence[str], rows: Sequence[int], width: int) -> tuple[Matrix, Matrix]:
        """Split matrices [rows[i], 2 * width] of two inputs side by side, and stack each half."""
        first = self.matrix(names, rows, 2 * width, lambda array: array[:, :width])
        return first, self.matrix(names, rows, 2 * width, lambda array: array[:, width:])

    def vector(self, name: str, size: int) -> FloatArray:
        return self.packer.vector([self.part(name, (size,))])

    def norm(self, name: str, size: int, eps: float, bias: bool = False, offset: float = 0.0) -> Norm:
        """Read a norm, whose weight is stored less `offset`."""
        return Norm(NormConfig("rms", eps, bias=bias), Named(self, offset=offset), name, size)

    def shape(self, name: str) -> tuple[int, ...]:
        if not self.has(name):
            raise ModelError(f"{self.path}: tensor {name} is missing; it is not a drafter of this kind")
        if not self.checkpoint.shape(name):
            raise ModelError(f"{self.checkpoint.path(name)}: tensor {name} is a single number")
        return self.checkpoint.shape(name)

    def part(self, name: str, shape: tuple[int, ...], take: Take | None = None) -> Part:
        found = self.shape(name)
        if found != shape:
            raise ModelError(
                f"{self.checkpoint.path(name)}: tensor {name} is {list(found)}, and this drafter with its target needs "
                f"{list(shape)}: use a drafter that was made for the target"
            )
        self._used.add(name)
        return Part(((name, shape),), take)

    def count(self, matrix: Matrix) -> Matrix:
        """Add the matrix to the bytes of the head."""
        self.nbytes += matrix.nbytes
        return matrix

    def refuse_left(self, ignored: Sequence[str] = ()) -> None:
        """ModelError if nothing read some tensor of the checkpoint. Names that begin with `ignored` may be left."""
        left = sorted(
            name
            for name in self.checkpoint.names()
            if name not in self._used and not name.startswith(tuple(ignored))
        )
        if left:
            raise ModelError(
                f"{self.path}: nothing reads tensor {left[0]}; this kind of drafter has none of that name"
            )


@dataclass(frozen=True, slots=True)
class Named:
    """A `WeightSource` over a head's tensors: the parts of a decoder, or paths that are names themselves."""

    source: HeadSource
    tensors: Tensors | None = None
    offset: float = 0.0

    @classmethod
    def of(cls, source: HeadSource, config: DecoderConfig, names: TensorNames) -> Named:
        return cls(source, Tensors(config, names))

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Matrix:
        return self.source.count(self.source.packer.matrix([self._part(piece) for piece in pieces], use))

    def gated(self, path: str, gate: Piece, up: Piece) -> Matrix:
        return self.source.count(self.source.packer.gated(self._part(gate), self._part(up)))

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        return self.source.packer.vector([self._part(piece) for piece in pieces])

    def _part(self, piece: Piece) -> Part:
        if self.tensors is None:
            return self.source.part(piece.path, piece.shape, plus(self.offset))
        wanted = self.tensors.part(piece)
        for name, shape in wanted.tensors:
            self.source.part(name, shape)
        return wanted


def _open(path: Path) -> Checkpoint:
    for name, opener in MEDUSA_FILES:
        if (path / name).exists():
            return opener(path / name)
    return open_checkpoint(path)


def integer(config: dict[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = config.get(key, default)
    if type(value) is not int or value < 0:
        raise ModelError(f"{path}/config.json: {key} must be a whole number, got {value!r}")
    return value


def target_map(source: HeadSource, draft_vocab: int, vocab_size: int) -> IntArray | None:
    """Read the target's id of each draft id: `d2t` holds the difference. None: they are the same."""
    if not source.has("d2t"):
        if draft_vocab != vocab_size:
            raise ModelError(
                f"{source.path}: the drafter has {draft_vocab} tokens and its target {vocab_size}, and there is no "
                "d2t that maps them"
            )
        return None
    source.part("d2t", (draft_vocab,))
    offsets = np.asarray(source.checkpoint.get("d2t")).astype(np.int64)
    ids = np.arange(draft_vocab) + offsets
    if draft_vocab and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ModelError(f"{source.path}: d2t names tokens outside the target's vocabulary of {vocab_size}")
    return ids.astype(np.int32)
