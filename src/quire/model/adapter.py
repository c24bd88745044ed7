"""Turns an adapter's tensors into changes of a model's packed weights. Knows specs, names and parts; reads no base
weights unless an adapter depends on them.

The model's own parts ask a source that makes changes in place of matrices, so that every row goes where the base's row
went: fused, split, reordered and sharded projections need no rule of their own. A rank that holds rows of a
weight holds the same rows of B; one that holds columns, whose products are added up, holds the same columns of A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from quire.devices.adapters import Adapter, Change, Up
from quire.devices.ops import Normalize
from quire.devices.protocol import Backend, FloatArray, Matrix, Norm
from quire.errors import ModelError
from quire.lora.options import LoraDtype
from quire.model.adapter_names import AdapterNames, Pair
from quire.model.families.names import TensorNames
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.parts.source import Piece, Use
from quire.model.pooling import HeadReader
from quire.model.shard import WHOLE, Shard
from quire.model.tensors import Tensors
from quire.weights.adapter import AdapterFiles
from quire.weights.checkpoint import Checkpoint
from quire.weights.parts import Part
from quire.weights.schemes import WeightType
from quire.weights.tensor import FloatDtype

NOT_REPLACED = ("q_norm", "k_norm", "kv_norm")  # norms that have no operation of their own


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The model, or a rank's share of it, that an adapter changes.

    `open` opens its checkpoint, for adapters that need the base's values. `head_of` reads the pooling head of such a
    checkpoint, if the model has one.
    """

    decoder: Decoder
    names: TensorNames
    backend: Backend
    dtype: FloatDtype
    open: Callable[[], Checkpoint] | None
    shard: Shard = WHOLE
    head_of: HeadReader | None = None


@dataclass(slots=True)
class Draft:
    """A change before the base's matrix is known. Rows of `ups` and vectors are outputs.

    `norms` are the norms of the changed weight's rows, if the base's matrix here has only some of its columns.
    """

    outputs: int
    where: str
    downs: list[FloatArray] = field(default_factory=list)
    ups: list[Up] = field(default_factory=list)
    magnitude: FloatArray | None = None  # NaN where a part has none
    norms: Callable[[], FloatArray] | None = None
    shift: FloatArray | None = None
    whole: FloatArray | None = None
    added: list[int] = field(default_factory=list)  # outputs that a bias of the base hides
    tokens: tuple[tuple[int, ...], FloatArray] | None = None  # new rows of a table
    _seen: dict[int, int] = field(default_factory=dict)  # by identity of an A: its first row

    @property
    def empty(self) -> bool:
        return not self.ups and self.whole is None and self.tokens is None

    def add(
        self, pair: Pair, pick: Callable[[FloatArray], FloatArray], start: int, columns: range | None = None
    ) -> None:
        """Add a module's tensors; `pick` takes the part's rows from the module's, `columns` are the part's."""
        down, up = pair.down, pair.up
        if id(down) not in self._seen:
            self._seen[id(down)] = sum(map(len, self.downs))
            self.downs.append(down if columns is None else down[:, columns.start : columns.stop])
        weight = pick(up)
        self.ups.append(Up(weight, self._seen[id(down)], start))
        stop = start + len(weight)
        if pair.magnitude is not None:
            if self.magnitude is None:
                self.magnitude = np.full(self.outputs, np.nan, np.float32)
            self.magnitude[start:stop] = pick(pair.magnitude[:, None])[:, 0]
        if pair.bias is not None:
            if self.shift is None:
                self.shift = np.zeros(self.outputs, np.float32)
            self.shift[start:stop] = pick(pair.bias[:, None])[:, 0]


class AdapterSource:
    """A `WeightSource` that notes `drafts` of changes by the paths of matrices, and `vectors` by their own paths.

    Vectors are NaN where the adapter leaves the base's.
    """

    def __init__(self, base: AdapterBase, files: AdapterFiles) -> None:
        self._spec: DecoderConfig = base.decoder.config
        self.names = AdapterNames(self._spec, base.names, files, base.open)
        self._base, self._files, self._tensors = base, files, Tensors(self._spec, base.names)
        self.drafts: dict[str, Draft] = {}
        self.vectors: dict[str, FloatArray] = {}

    def ask(self) -> None:
        """Ask for all weights of the base's share."""
        spec, shard = self._spec, self._base.shard
        Decoder(spec, self, shard)
        if spec.embeds(shard) and not spec.segments:
            self._note("embedding", self._embedding())
        if spec.has_head and shard.ends:
            self._note("head", self._head())

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Any:
        self._note(path, self._draft([self._tensors.part(piece) for piece in pieces], use))

    def gated(self, path: str, gate: Piece, up: Piece) -> Any:
        self.matrix(path, [gate, up])

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        found = []
        for part in (self._tensors.part(piece) for piece in pieces):
            given = [self.names.whole(name, shape) for name, shape in part.tensors]
            whole = [values for values in given if values is not None]
            if whole and len(whole) == len(given):
                found.append(np.array(part.taken(*whole), np.float32))
            else:
                found.append(np.full(part.outline().shape, np.nan, np.float32))
        self.vectors[path] = np.concatenate(found)
        return self.vectors[path]

    def _note(self, path: str, draft: Draft | None) -> None:
        if draft is not None:
            self.drafts[path] = draft

    @property
    def _width(self) -> int:
        return self._spec.embedding.width

    def _embedding(self) -> Draft | None:
        """Draft the adapter's change of the rows of the embedding [V, D]."""
        table, outputs = self._base.names["embedding"], self._width
        draft, stored = Draft(outputs, table), (self._spec.embedding.stored_tokens, outputs)
        pair = self.names.pair(table, embedding=True)
        if pair is not None:
            self._check_table(pair.down.shape[1], pair, table)
            pair = replace(pair, down=self._padded(pair.down.T).T)
            self._check_shape(pair, table, (outputs, self._spec.vocab_size))
            draft.add(pair, lambda values: values, 0)
        whole = self.names.whole(f"{table}.weight", stored, table=True)
        draft.whole = None if whole is None else self._padded(whole)
        draft.tokens = self.names.token_rows(table, stored)
        return None if draft.empty else draft

    def _head(self) -> Draft | None:
        """Draft the adapter's change of the head, or of the rank's rows of it.

        Trained and added rows of a tied table change in both.
        """
        base, names, spec = self._base, self._base.names, self._spec
        stored = spec.embedding.stored_tokens, self._width
        own = base.shard.columns(spec.vocab_size)
        draft = Draft(len(own), names["head"])

        def mine(values: FloatArray) -> FloatArray:
            return self._padded(values)[own.start : own.stop]

        whole = self.names.whole(f"{names['head']}.weight", stored, table=True)
        tokens = self.names.token_rows(names["head"], stored)
        if spec.tied:
            table = self.names.whole(f"{names['embedding']}.weight", stored, table=True)
            whole = table if whole is None and table is not None and len(table) > stored[0] else whole
            tokens = tokens or self.names.token_rows(names["embedding"], stored)
        draft.whole = None if whole is None else mine(whole)
        pair = self.names.pair(names["head"])
        if pair is not None:
            self._check_table(len(pair.up), pair, names["head"])
            self._check_shape(pair, names["head"], (len(pair.up), stored[1]))
            draft.add(pair, mine, 0)
        added = set(
            range(stored[0], max(0 if whole is None else len(whole), 0 if pair is None else len(pair.up)))
        )
        if tokens is not None:
            ids, rows = tokens
            added |= {token for token in ids if token >= stored[0]}
            kept = [i for i, token in enumerate(ids) if token in own]
            draft.tokens = (tuple(ids[i] - own.start for i in kept), rows[kept]) if kept else None
        draft.added = [token - own.start for token in sorted(added) if token in own]
        return None if draft.empty else draft

    def _check_table(self, tokens: int, pair: Pair, module: str) -> None:
        """Raise ModelError unless a pair changes the base's tokens, and perhaps added ones that fit."""
        if tokens > self._spec.embedding.stored_tokens:
            self.names.check_room(tokens, module)
        elif tokens < self._spec.embedding.stored_tokens:
            found = [len(pair.up), pair.down.shape[1]]
            raise ModelError(
                f"{self._files.path}: {module}: B and A make a change of {found}, the base has "
                f"{self._spec.embedding.stored_tokens} tokens"
            )

    def _padded(self, rows: FloatArray) -> FloatArray:
        """Pad the rows of a table with zeros for the spare tokens that it lacks."""
        missing = self._spec.vocab_size - len(rows)
        return np.pad(rows, ((0, missing), (0, 0))) if missing else rows

    def _draft(self, parts: Sequence[Part], use: Use) -> Draft | None:
        shapes = [part.outline().shape for part in parts]
        draft = Draft(sum(shape[0] for shape in shapes), ", ".join(n for p in parts for n, _ in p.tensors))
        start = 0
        for part, shape in zip(parts, shapes, strict=True):
            if len(part.tensors) == 1:
                self._add(draft, part, shape, start, use)
            else:
                self._refuse(part)
            start += shape[0]
        return None if draft.empty else draft

    def _refuse(self, part: Part) -> None:
        """Refuse a weight that the base computes from several tensors: changing one does not change its rows."""
        for name, _ in part.tensors:
            module = name.removesuffix(".weight")
            if self.names.pair(module) is not None:
                raise ModelError(
                    f"{self._files.path}: {module} cannot be changed by an adapter in this model"
                )

    def _add(self, draft: Draft, part: Part, shape: tuple[int, ...], start: int, use: Use) -> None:
        name, stored = part.tensors[0]
        module = name.removesuffix(".weight")
        if module in (self._base.names["embedding"], self._base.names["head"]):
            return  # see `embedding` and `head`
        if use in ("table", "positions"):
            if self.names.whole(name, stored) is not None or self.names.pair(module, embedding=True):
                raise ModelError(f"{self._files.path}: {module} cannot be changed by an adapter")
            return
        if self.names.whole(name, stored) is not None:
            raise ModelError(
                f"{self._files.path}: modules_to_save {module} is not supported: only embeddings, heads, norms and "
                "biases can be replaced"
            )
        flip = self._base.names.transposed and use == "linear"
        if len(stored) == 3:
            pair, pick = self.names.stacked(part, module)
        else:
            pair = self.names.pair(module, transposed=flip)
            outputs = stored[1] if flip else stored[0]
            pick = self._picker(part, module, outputs, shape[0], flip) if pair else None
            if pair is not None:
                self._check_shape(pair, module, (outputs, stored[0] if flip else stored[1]))
        if pair is None or pick is None:
            return
        divided = part.columns is not None and len(part.columns) < pair.down.shape[1]
        if divided and pair.bias is not None and not self._base.shard.first:
            pair = replace(pair, bias=None)  # added once to the sum of all ranks
        draft.add(pair, pick, start, part.columns)
        if divided and pair.magnitude is not None:
            draft.norms = partial(self._row_norms, part, pick(pair.up), pair.down)

    def _row_norms(self, part: Part, up: FloatArray, down: FloatArray) -> FloatArray:
        """Compute the norms of a changed weight's rows, if the rank holds only some of its columns."""
        if self._base.open is None:
            raise ModelError(
                f"{self._files.path}: use_dora needs the base's own weights: serve the checkpoint"
            )
        weight = np.array(replace(part, columns=None).read(self._base.open()), np.float32)
        return _norms(weight + _product(up, down))

    def _picker(
        self, part: Part, module: str, outputs: int, rows: int, flip: bool
    ) -> Callable[[FloatArray], FloatArray]:
        def pick(values: FloatArray) -> FloatArray:
            values = values.T if flip else values
            return np.ascontiguousarray(part.all_columns(values))

        for width in (1, 2):  # a part that picks columns or turns the matrix gives other shapes
            try:
                fits = pick(np.ones((outputs, width), np.float32)).shape == (rows, width)
            except (ValueError, IndexError):
                fits = False
            if not fits:
                raise ModelError(f"{self._files.path}: {module} cannot be changed by an adapter")
        return pick

    def _check_shape(self, pair: Pair, module: str, shape: tuple[int, int]) -> None:
        found = len(pair.up), pair.down.shape[1]
        if found != shape:
            raise ModelError(
                f"{self._files.path}: {module}: B and A make a change of {list(found)}, the base has {list(shape)}"
            )


def build_adapter(base: AdapterBase, files: AdapterFiles, dtype: LoraDtype = "auto") -> Adapter:
    """Build the adapter's changes of the base's weights. ModelError if it does not fit, or a part has no place."""
    source = AdapterSource(base, files)
    source.ask()
    builder = _Builder(base, source, files, "float16" if dtype == "float16" else None)
    builder.build()
    pooling = None if base.head_of is None else source.names.pooling_head(base.head_of)
    if base.shard.first and base.shard.ends:  # some biases are there alone; it is the engine's own rank
        changes = bool(builder.changes or builder.norms or pooling)
        if base.shard.stages > 1 or base.shard.whole_experts:  # others have the rest
            whole = AdapterSource(replace(base, shard=WHOLE, open=None), files.outline())
            whole.ask()
            source.names.used |= whole.names.used
            changes = changes or bool(files.modules or files.whole or files.tokens)
        source.names.check_all_used()
        if not changes:
            raise ModelError(f"{files.path}: the adapter changes nothing in this model")
    narrow = (base.dtype if dtype == "auto" else dtype) == "bfloat16"
    kept: WeightType = "bfloat16" if narrow else "float32"
    return Adapter(builder.changes, builder.norms, kept, str(files.path), files.digest, pooling)


class _Builder:
    """Makes changes of the base's weights from drafts, by path."""

    def __init__(
        self, base: AdapterBase, source: AdapterSource, files: AdapterFiles, rounded: str | None
    ) -> None:
        self._base, self._source, self._files, self._rounded = base, source, files, rounded
        self._weights = base.decoder.weights
        self.changes: dict[str, Change] = {}
        self.norms: dict[str, Norm] = {}

    def build(self) -> None:
        """Go through the drafts of matrices, then through the vectors."""
        drafts, vectors = self._source.drafts, self._source.vectors
        biases = {
            f"{path}.bias": path for path, weight in self._weights.items() if isinstance(weight, Matrix)
        }
        for path in dict.fromkeys([*drafts, *(biases[name] for name in vectors if name in biases)]):
            bias = f"{path}.bias"
            if path == "embedding":
                self.embedding(self._weights[path], drafts[path])
            else:
                self.product(path, drafts.get(path), self._weights.get(bias), vectors.get(bias))
        operands = {op.path: op.norm for op in self._base.decoder.graph().ops if isinstance(op, Normalize)}
        for name, values in vectors.items():
            path, _, kind = name.rpartition(".")
            if name in biases or not np.isfinite(values).any():
                continue
            if path in operands and kind in ("weight", "bias"):
                self._norm(path, kind, operands[path], values)
            elif kind not in ("weight", "bias") or not self._same(name, values):
                raise ModelError(f"{self._files.path}: {name} cannot be replaced by an adapter")

    def _same(self, path: str, values: FloatArray) -> bool:
        """Whether the adapter stores the base's own vector."""
        return np.array_equal(values, self._weights[path])

    def product(
        self, path: str, draft: Draft | None, bias: FloatArray | None, new_bias: FloatArray | None
    ) -> None:
        matrix: Matrix = self._weights[path]
        shift = None
        if bias is not None and new_bias is not None and np.isfinite(new_bias).any():
            shift = np.where(np.isnan(new_bias), 0, new_bias - bias).astype(np.float32)
        if draft is None:
            if shift is not None:
                self.changes[path] = Change(shift=shift)
            return
        if draft.tokens is not None:
            self._replace_rows(matrix, draft, as_product=True)
        own_bias = None
        if draft.added:
            assert bias is not None
            own_bias = bias.copy()
            own_bias[draft.added] = 0
        if draft.shift is not None:
            shift = draft.shift if shift is None else shift + draft.shift
        self.changes[path] = self._change(matrix, draft, shift, own_bias, axis=1)

    def embedding(self, table: Matrix, draft: Draft) -> None:
        if draft.tokens is not None:
            self._replace_rows(table, draft, as_product=False)
        self.changes["embedding"] = self._change(table, draft, None, None, axis=0)

    def _change(
        self, matrix: Matrix, draft: Draft, shift: FloatArray | None, bias: FloatArray | None, axis: int
    ) -> Change:
        down = self._round(np.concatenate(draft.downs)) if draft.downs else None
        ups = tuple(Up(self._round(up.weight), up.first, up.start) for up in draft.ups)
        weight = None
        if draft.whole is not None:
            weight = self._base.backend.matrix([draft.whole], self._base.dtype)
        change = Change(down, ups, None, shift, weight, bias)
        if draft.magnitude is None:
            return change
        return msgspec.structs.replace(change, gain=_gain(matrix, change, draft, axis))

    def _round(self, values: FloatArray) -> FloatArray:
        if self._rounded is None:
            return np.ascontiguousarray(values, np.float32)
        with np.errstate(over="ignore"):
            rounded = values.astype(self._rounded).astype(np.float32)
        if not np.isfinite(rounded).all():
            raise ModelError(f"{self._files.path}: a value does not fit --lora-dtype {self._rounded}")
        return rounded

    def _replace_rows(self, table: Matrix, draft: Draft, as_product: bool) -> None:
        """Replace rows of a table by a change of rank len(ids): one-hot columns times the rows' differences."""
        assert draft.tokens is not None
        ids, rows = draft.tokens
        changed = rows - table.dequantize()[list(ids)]
        hot = np.zeros((len(ids), table.shape[0]), np.float32)
        hot[np.arange(len(ids)), list(ids)] = 1
        first = sum(map(len, draft.downs))
        down, up = (changed, hot.T) if as_product else (hot, changed.T)
        draft.downs.append(np.ascontiguousarray(down))
        draft.ups.append(Up(np.ascontiguousarray(up), first, 0))

    def _norm(self, path: str, kind: str, own: Norm, values: FloatArray) -> None:
        before = own.weight if kind == "weight" else own.bias
        if before is None or (kind == "weight" and np.array_equal(values, before)):
            return
        if path.rpartition(".")[2] in NOT_REPLACED:
            raise ModelError(f"{self._files.path}: {path} cannot be replaced by an adapter")
        changed = np.where(np.isnan(values), before, values).astype(np.float32)
        self.norms[path] = msgspec.structs.replace(self.norms.get(path, own), **{kind: changed})


def _gain(matrix: Matrix, change: Change, draft: Draft, axis: int) -> FloatArray:
    """Compute DoRA's m / ||W + s B A|| by output: over rows of a product's weight, over columns of a table."""
    magnitude = draft.magnitude
    assert magnitude is not None
    assert change.down is not None
    if draft.norms is not None:
        norms = draft.norms()
    else:
        values = matrix.dequantize()
        values = values if axis else values.T
        norms = np.ones(len(values), np.float32)
        for up in change.ups:
            stop = up.start + len(up.weight)
            down = change.down[up.first : up.first + up.weight.shape[1]]
            norms[up.start : stop] = _norms(values[up.start : stop] + _product(up.weight, down))
    gain: FloatArray = np.where(np.isnan(magnitude), 1, magnitude / np.maximum(norms, 1e-30)).astype(
        np.float32
    )
    return gain


def _product(up: FloatArray, down: FloatArray) -> FloatArray:
    """Compute up @ down row by row, so that a row's bits do not depend on how many rows there are."""
    product: FloatArray = (up[:, None, :] @ down)[:, 0]
    return product


def _norms(values: FloatArray) -> FloatArray:
    """Compute the Euclidean norm of each row."""
    norms: FloatArray = np.sqrt((values.astype(np.float64) ** 2).sum(axis=1)).astype(np.float32)
    return norms
