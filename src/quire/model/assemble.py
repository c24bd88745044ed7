"""From a spec and tensor names to decoder weights, part by part. Knows the place of each tensor; reads no file itself.

Over a `WeightSource` that reads and packs, it loads a model. Over one that only records requests, it lists the
tensors that a checkpoint must have. So both always agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from quire.devices.protocol import Array, FloatArray, Matrix
from quire.model.assemble_attention import AttentionAssembly
from quire.model.assemble_mlp import MLPAssembly
from quire.model.assemble_parts import PartAssembly, WeightSource
from quire.model.families.names import TensorNames
from quire.model.rope import sinusoids
from quire.model.shard import WHOLE, Shard
from quire.model.spec import ArchSpec, PerLayerSpec
from quire.model.spec_parts import AltUpSpec
from quire.model.weights import (
    ELSEWHERE,
    AltUpWeights,
    DecoderWeights,
    LaurelWeights,
    LayerWeights,
    PerLayerWeights,
)
from quire.weights.parts import Part, part, row_range


class Assembly(PartAssembly):
    """Assembles the weights of one model."""

    def __init__(
        self, spec: ArchSpec, names: TensorNames, source: WeightSource, shard: Shard = WHOLE
    ) -> None:
        super().__init__(spec, names, source, shard)
        self._parts = [
            (own, AttentionAssembly(spec, own, source, shard), MLPAssembly(spec, own, source, shard))
            for own in map(names.of_sublayer, range(names.sublayers))
        ]

    def weights(self) -> DecoderWeights:
        spec, names = self.spec, self.names
        d, width = spec.hidden_size, self._width
        shard, own = self.shard, self.shard.layers(spec)
        embeds, ends = shard.embeds(spec), shard.ends
        tied = spec.has_head and spec.tie_embeddings and shard.alone
        embedding = None
        if embeds:
            rows = self._grown(self._embedding_part(width))
            embedding = self.source.matrix(rows, "head" if tied else "table")
        positions = None
        if spec.position_offset is not None and embeds:
            shape = (spec.max_position + spec.position_offset, d)
            positions = self.source.matrix([self._positions_part(shape)], "positions")
        project_in = project_out = None
        if spec.embedding_size is not None and embeds:
            project_in = self.source.matrix([part(f"{names.project_in}.weight", (d, width))])
        if spec.embedding_size is not None and ends:
            project_out = self.source.matrix([part(f"{names.project_out}.weight", (width, d))])
        return DecoderWeights(
            embedding=embedding,
            positions=positions,
            project_in=project_in,
            embedding_norm=self._norm(names.embedding_norm) if spec.embedding_norm and embeds else None,
            layers=tuple(self.layer(i) if i in own else ELSEWHERE for i in range(spec.num_layers)),
            norm=self._norm(names.norm) if spec.final_norm and ends else None,
            project_out=project_out,
            head=self._head(embedding if tied else None) if spec.has_head and ends else None,
            head_bias=self._head_bias(self._own_rows) if ends else None,
            spread=self._spread(spec.altup) if spec.altup is not None and shard.begins else None,
            merge=self._merge(spec.altup) if spec.altup is not None and ends else None,
            layer_inputs=None if spec.per_layer is None else self._layer_inputs(spec.per_layer),
        )

    def _embedding_part(self, width: int) -> Part:
        """The embedding table of tokens; with segments, the sums of tokens and segments, segment after segment."""
        spec, names = self.spec, self.names
        if not spec.segments:
            return part(f"{names.embedding}.weight", (spec.stored_tokens, width))

        def summed(words: Array, segments: Array) -> Array:
            table = words.astype(np.float32)
            return np.concatenate([table + row for row in segments[: spec.segments].astype(np.float32)])

        words = (f"{names.embedding}.weight", (spec.vocab_size // spec.segments, width))
        segments = (f"{names.segments}.weight", (spec.segment_rows, width))
        return Part((words, segments), summed, (spec.vocab_size, width))

    def _positions_part(self, shape: tuple[int, int]) -> Part:
        if self.spec.sinusoid is None:
            return part(f"{self.names.positions}.weight", shape)
        steps = shape[1] // 2 - (self.spec.sinusoid == "half_less_one")
        return Part((), partial(sinusoids, *shape, steps), shape)

    def _head(self, embedding: Matrix | None) -> Matrix:
        """The head: the `embedding` if the same rank needs both whole, or this rank's rows of it."""
        if embedding is not None:
            return embedding
        rows = self._grown(self._head_part)
        if self.shard.whole:
            return self.source.matrix(rows, "head")
        return self.source.matrix(self._own_rows(rows), "table")

    def whole_head(self) -> tuple[Matrix, FloatArray | None]:
        """The head and its bias alone."""
        return self.source.matrix(self._grown(self._head_part), "head"), self._head_bias(list)

    @property
    def _width(self) -> int:
        return self.spec.embedding_size or self.spec.hidden_size

    @property
    def _head_part(self) -> Part:
        """The stored rows of the head: its own, or those of the embedding that it is tied to."""
        spec = self.spec
        if spec.tie_embeddings:
            return self._embedding_part(self._width)
        return part(f"{self.names.head}.weight", (spec.stored_tokens, self._width))

    def _head_bias(self, own: Callable[[list[Part]], list[Part]]) -> FloatArray | None:
        """The bias of the head, of its `own` rows; that of spare tokens keeps them from being chosen."""
        spec, size = self.spec, self.spec.stored_tokens
        if not (spec.head_bias or spec.spare_tokens):
            return None
        stored = part(f"{self.names.head}.bias", (size,)) if spec.head_bias else _filled((size,), 0.0)
        return self.source.vector(own(self._grown(stored, -np.inf)))

    def _grown(self, stored: Part, fill: float = 0.0) -> list[Part]:
        """Rows of the vocabulary: the stored ones, and those of spare tokens."""
        spare = self.spec.spare_tokens
        return [stored, _filled((spare, *stored.outline().shape[1:]), fill)] if spare else [stored]

    def _own_rows(self, parts: list[Part]) -> list[Part]:
        """Of rows of the vocabulary, those that belong to the shard."""
        if self.shard.whole:
            return parts
        found, first, own = [], 0, self.shard.columns(self.spec.vocab_size)
        for one in parts:
            rows = one.outline().shape[0]
            if mine := range(max(own.start - first, 0), min(own.stop - first, rows)):
                found.append(one.cut(mine))
            first += rows
        return found

    def layer(self, i: int) -> LayerWeights:
        spec, (names, attention, mlp) = self.spec, self._parts[i % self.names.sublayers]
        layer = names.layer.format(i=i // names.sublayers)
        before = spec.placement not in ("post", "sum")
        after = spec.placement in ("post", "sum", "sandwich")
        attends, dense, sparse = spec.attends(i), spec.is_dense(i), spec.is_sparse(i)
        mixes = sparse or dense
        return LayerWeights(
            attention_norm=self._norm(layer + names.attention_norm)
            if before and attends and (i or not spec.bare_first)
            else None,
            attention=attention.weights(i, layer) if attends else None,
            attention_post_norm=self._norm(layer + names.attention_post_norm) if after and attends else None,
            mlp_norm=self._norm(layer + names.mlp_norm)
            if before and mixes and spec.placement != "parallel"
            else None,
            mlp=mlp.mlp(i, layer) if dense else None,
            moe=mlp.moe(i, layer, spec.moe) if sparse and spec.moe is not None else None,
            mlp_post_norm=self._norm(layer + names.mlp_post_norm) if after and mixes else None,
            per_layer=None if spec.per_layer is None else self._per_layer(i, layer, spec.per_layer),
            scale=self._vector(layer + names.layer_scale, 1) if spec.layer_scale else None,
            laurel=None if spec.laurel_rank is None else self._laurel(layer + names.laurel, spec.laurel_rank),
            altup=None if spec.altup is None else self._altup(layer + names.altup, spec.altup),
        )

    def _laurel(self, prefix: str, rank: int) -> LaurelWeights:
        d = self.spec.hidden_size
        return LaurelWeights(
            left=self.source.matrix([self._linear(f"{prefix}linear_left", rank, d)]),
            right=self.source.matrix([self._linear(f"{prefix}linear_right", d, rank)]),
            norm=self._norm(f"{prefix}post_laurel_norm"),
        )

    def _altup(self, prefix: str, altup: AltUpSpec) -> AltUpWeights:
        d, streams = self.spec.hidden_size, altup.streams

        def small(name: str, rows: int, width: int) -> Matrix:
            return self.source.matrix([self._linear(prefix + name, rows, width)], "exact")

        return AltUpWeights(
            router_norm=self._norm(f"{prefix}router_norm"),
            router=small("modality_router", streams, d),
            predict=small("prediction_coefs", streams * streams, streams),
            correct=small("correction_coefs", streams, streams),
            scale=self._vector(f"{prefix}correct_output_scale", d),
        )

    def _spread(self, altup: AltUpSpec) -> Matrix:
        return self.source.matrix(self._projections(self.names.spread, altup))

    def _merge(self, altup: AltUpSpec) -> tuple[Matrix, ...]:
        return tuple(self.source.matrix([one]) for one in self._projections(self.names.merge, altup))

    def _projections(self, name: str, altup: AltUpSpec) -> list[Part]:
        d = self.spec.hidden_size
        return [self._linear(name.format(s=s), d, d) for s in range(altup.streams - 1)]

    def _per_layer(self, i: int, layer: str, per_layer: PerLayerSpec) -> PerLayerWeights:
        """What a layer makes its input of: its rows of the projection that holds all layers."""
        spec, names, size = self.spec, self.names, per_layer.size
        own, width = row_range(i * size, (i + 1) * size), spec.num_layers * size
        projected = part(f"{names.per_layer_model}.weight", (width, spec.hidden_size), own)
        return PerLayerWeights(
            model=self.source.matrix([projected]),
            norm=self._norm(names.per_layer_norm, size),
            gate=self.source.matrix([self._linear(layer + names.per_layer_gate, size, spec.hidden_size)]),
            out=self.source.matrix([self._linear(layer + names.per_layer_out, spec.hidden_size, size)]),
            post_norm=self._norm(layer + names.per_layer_post_norm),
        )

    def _layer_inputs(self, per_layer: PerLayerSpec) -> Matrix:
        """The table of all layers' inputs. Tokens beyond it have the first row."""
        count, known = self.spec.vocab_size, per_layer.vocab_size
        stored = f"{self.names.per_layer_table}.weight", (known, self.spec.num_layers * per_layer.size)
        parts = [part(*stored, None if known <= count else row_range(0, count))]
        if known < count:
            parts.append(part(*stored, lambda array: array[[0] * (count - known)]))
        return self.source.matrix(parts, "table")


def _filled(shape: tuple[int, ...], value: float) -> Part:
    """A part that no tensor holds."""
    return Part((), partial(np.full, shape, value, np.float32), shape)
