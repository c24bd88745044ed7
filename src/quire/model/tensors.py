"""Finds the pieces of a decoder among a checkpoint's tensors. Knows configs and names; reads no file.

A family keeps a piece in a module of its own, or fused with others, stacked with other experts' pieces, transposed, or
with its rows in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from quire.model.families.names import TensorNames
from quire.model.parts.attention import AttentionConfig
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.distances import position_buckets, sinusoids
from quire.model.parts.embedding import EmbeddingConfig
from quire.model.parts.latent import LatentConfig
from quire.model.parts.layer import LayerConfig
from quire.model.parts.mixture import MixtureConfig
from quire.model.parts.rope import RopeSpec
from quire.model.parts.scores import RelativeConfig
from quire.model.parts.source import Piece
from quire.weights.parts import (
    Part,
    Take,
    chain,
    halves,
    padded_rows,
    part,
    row_range,
    rows_of_groups,
    transposed,
)
from quire.weights.tensor import Array

Shape = tuple[int, ...]
# Modules below a layer, by the field of TensorNames that names them.
LINEARS = {
    "attention.gate": "attention_gate",
    "mlp.down": "down",
    "input.gate": "per_layer_gate",
    "input.out": "per_layer_out",
}
PLAIN = {"attention.q_down": "q_down", "mixture.router": "router", "mixture.shared_gate": "shared_gate"}
NORMS = {
    "attention_norm": "attention_norm",
    "attention_post_norm": "attention_post_norm",
    "mlp_norm": "mlp_norm",
    "mlp_post_norm": "mlp_post_norm",
    "attention.out_norm": "out_norm",
    "attention.kv_norm": "kv_down_norm",
    "mlp.down_norm": "down_norm",
    "mixture.norm": "moe_norm",
    "mixture.experts_norm": "moe_pre_norm",
    "mixture.mlp_norm": "mlp_beside_norm",
    "input.post_norm": "per_layer_post_norm",
}
VECTORS = {
    "attention.sinks": "sinks",
    "scale": "layer_scale",
    "mixture.router_scale": "router_scale",
    "mixture.expert_scales": "expert_scales",
}
# Modules of LAuReL and AltUp, below the prefixes of these names.
ADDITIONS = {
    "laurel.left": "linear_left",
    "laurel.right": "linear_right",
    "altup.router": "modality_router",
    "altup.predict": "prediction_coefs",
    "altup.correct": "correction_coefs",
}
ADDED_NORMS = {"laurel.norm": "post_laurel_norm", "altup.router_norm": "router_norm"}


def filled(piece: Piece) -> Part:
    """A piece of one value everywhere, which no tensor holds."""
    return Part((), partial(np.full, piece.shape, piece.fill, np.float32), piece.shape).cut(
        piece.rows, piece.columns
    )


class Tensors:
    """The tensors of a model by the paths of its pieces."""

    def __init__(self, config: DecoderConfig, names: TensorNames) -> None:
        self.config, self.names = config, names
        self._layers: dict[int, LayerTensors] = {}
        ropes = (layer.attention.rope for layer in config.layers if layer.attention is not None)
        self._rope = next((rope for rope in ropes if rope is not None), None)

    def part(self, piece: Piece) -> Part:
        """Find the part of a piece: which tensors it reads, and which rows it takes."""
        if piece.fill is not None:
            return filled(piece)
        if piece.path.startswith("layers."):
            _, index, path = piece.path.split(".", 2)
            found = self.layer(int(index)).part(path, piece.shape)
        else:
            found = self._part(piece.path, piece.shape)
        return found.cut(piece.rows, piece.columns)

    def layer(self, index: int) -> LayerTensors:
        """Find the tensors of a layer; one after the last, which predicts further tokens, is like the last."""
        if index not in self._layers:
            config, names = self.config, self.names
            layer = config.layers[min(index, config.num_layers - 1)]
            own = names.of_sublayer(index % names.sublayers)
            prefix = own.layer.format(i=index // names.sublayers)
            about = index, config.num_layers, self._rope
            self._layers[index] = LayerTensors(layer, own, prefix, *about)
        return self._layers[index]

    def _part(self, path: str, shape: Shape) -> Part:
        names, (module, _, kind) = self.names, path.rpartition(".")
        base, _, number = module.partition(".")
        if base == "embedding" or (path == "head.weight" and self.config.tied):
            return self._embedding(self.config.embedding)
        if base == "positions":
            return self._positions(shape)
        if base in ("norm", "embedding_norm"):
            return _norm(names, getattr(names, base), kind, shape)
        if base in ("spread", "merge"):
            return _linear(names, getattr(names, base).format(s=number), shape)
        if base == "layer_inputs":
            return self._layer_inputs(shape, number == "others")
        return part(f"{getattr(names, base)}.{kind}", shape)

    def _embedding(self, config: EmbeddingConfig) -> Part:
        """Find the table of tokens; with segments, sums of tokens and segments, segment after segment."""
        names, width, segments = self.names, config.width, config.segments
        if not segments:
            return part(f"{names.embedding}.weight", (config.stored_tokens, width))

        def summed(words: Array, rows: Array) -> Array:
            table = words.astype(np.float32)
            return np.concatenate([table + row for row in rows[:segments].astype(np.float32)])

        words = (f"{names.embedding}.weight", (config.vocab_size // segments, width))
        rows = (f"{names.segments}.weight", (config.segment_rows, width))
        return Part((words, rows), summed, (config.vocab_size, width))

    def _positions(self, shape: Shape) -> Part:
        positions = self.config.embedding.positions
        assert positions is not None
        if positions.sinusoid is None:
            return part(f"{self.names.positions}.weight", shape)
        steps = shape[1] // 2 - (positions.sinusoid == "half_less_one")
        return Part((), partial(sinusoids, shape[0], shape[1], steps), shape)

    def _layer_inputs(self, shape: Shape, others: bool) -> Part:
        """Find the stored rows; other tokens get the first one."""
        inputs = self.config.inputs
        assert inputs is not None
        stored = f"{self.names.per_layer_table}.weight", (inputs.vocab_size, shape[1])
        return part(*stored, (lambda array: array[[0] * shape[0]]) if others else None)


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of layer `index` of `count`, whose names begin with `prefix`. `rope` rotates the first layers."""

    config: LayerConfig
    names: TensorNames
    prefix: str
    index: int
    count: int
    rope: RopeSpec | None

    def part(self, path: str, shape: Shape) -> Part:
        """Find a piece by its path below the layer."""
        names, (module, _, kind) = self.names, path.rpartition(".")
        if path in VECTORS:
            return part(self.prefix + getattr(names, VECTORS[path]), shape)
        if module in NORMS:
            return _norm(names, self.prefix + getattr(names, NORMS[module]), kind, shape)
        if module in LINEARS and kind == "weight":
            return _linear(names, self.prefix + getattr(names, LINEARS[module]), shape)
        if module in LINEARS or module in PLAIN:
            field = LINEARS.get(module) or PLAIN[module]
            return part(f"{self.prefix}{getattr(names, field)}.{kind}", shape)
        group, _, name = module.partition(".")
        if group in ("laurel", "altup"):
            return self._addition(module, kind, shape)
        if group == "input":
            return self._input(name, kind, shape)
        if group == "mlp":
            return self._mlp(name, kind, shape)
        if group == "mixture":
            assert self.config.mixture is not None
            return self._mixture(self.config.mixture, name, kind, shape)
        if self.config.latent is not None and name != "out":
            return self._latent(self.config.latent, name, kind, shape)
        return self._attention(name, kind, shape)

    def _addition(self, module: str, kind: str, shape: Shape) -> Part:
        names, group = self.names, module.partition(".")[0]
        prefix = self.prefix + (names.laurel if group == "laurel" else names.altup)
        if module in ADDED_NORMS:
            return _norm(names, prefix + ADDED_NORMS[module], kind, shape)
        if module in ADDITIONS:
            return _linear(names, prefix + ADDITIONS[module], shape)
        return part(f"{prefix}correct_output_scale", shape)

    def _input(self, name: str, kind: str, shape: Shape) -> Part:
        names, (size, *rest) = self.names, shape
        if name == "norm":
            return _norm(names, names.per_layer_norm, kind, shape)
        own = row_range(self.index * size, (self.index + 1) * size)
        return part(f"{names.per_layer_model}.weight", (self.count * size, *rest), own)

    def _mlp(self, name: str, kind: str, shape: Shape) -> Part:
        names = self.names
        if name == "xielu":
            scalar = kind in ("beta", "eps")
            stored = f"{self.prefix}{names.xielu}.{kind}"
            return part(stored, () if scalar else shape, np.atleast_1d if scalar else None)
        if names.gate_up is None or name == "down":
            module = self.prefix + {"gate": names.gate, "up": names.up, "down": names.down}[name]
            return _linear(names, module, shape) if kind == "weight" else part(f"{module}.{kind}", shape)
        inner, take = shape[0], row_range(0, shape[0])
        if name == "up":
            take = row_range(inner, 2 * inner)
        return _fused(names, self.prefix + names.gate_up, kind, (2 * inner, *shape[1:]), take)

    # --- attention

    def _attention(self, name: str, kind: str, shape: Shape) -> Part:
        config, names = self.config.attention, self.names
        name, _, number = name.partition(".")
        if name == "out":
            return self._out(config, kind, shape)
        assert config is not None
        if name in ("q", "k", "v"):
            return self._qkv(config, name, kind)
        if name in ("q_norm", "k_norm"):
            return self._head_norm(config, name, kind, number, shape)
        if name == "relative":
            assert config.relative is not None
            return self._distances(config, config.relative, number, shape)
        assert kind == "position_bias"
        assert config.scores.position_buckets is not None
        buckets = config.scores.position_buckets
        places = position_buckets(buckets)
        return part(
            f"{names.position_bias}.weight",
            (buckets, config.num_heads),
            lambda table: table[places].T.reshape(-1),
        )

    def _out(self, config: AttentionConfig | None, kind: str, shape: Shape) -> Part:
        """Find the output projection [D, N V]; the columns of short values are padded as the values are."""
        names = self.names
        if kind == "bias":
            return part(self.prefix + (names.out_bias or f"{names.out}.bias"), shape)
        if config is None or config.value_dim is None:
            return _linear(names, self.prefix + names.out, shape)
        stored = _linear(names, self.prefix + names.out, (shape[0], config.num_heads * config.value_dim))
        pad = padded_rows(config.value_dim, config.head_dim)
        return Part(stored.tensors, chain(stored.take, lambda array: pad(array.T).T), shape)

    def _turn(self, config: AttentionConfig) -> Take | None:
        rope = config.rope or self.rope
        if not self.names.interleaved or rope is None:
            return None
        return halves(config.head_dim, rope.rotary_dim)

    def _qkv(self, config: AttentionConfig, name: str, kind: str) -> Part:
        names, d = self.names, config.hidden_size
        module, size, take = self._place(config, name)
        if kind == "bias":
            if not names.q_bias:
                return part(f"{module}.bias", (size,), take)
            own = config.num_heads * config.head_dim  # vectors of their own; keys have none
            if name == "k":
                return Part((), lambda: np.zeros(own, np.float32), (own,))
            return part(self.prefix + (names.q_bias if name == "q" else names.v_bias), (own,))
        found = _fused(names, module, kind, (size, d), take)
        if name == "v" and config.value_dim is not None:
            return replace(found, shape=(config.num_kv_heads * config.head_dim, d))
        return found

    def _place(self, config: AttentionConfig, name: str) -> tuple[str, int, Take | None]:
        """Find the module of queries, keys or values, its stored rows, and the part to take."""
        names, h = self.names, config.head_dim
        n, g = config.num_heads, config.num_kv_heads
        turn = None if name == "v" else self._turn(config)
        if names.qkv is None:
            field = {"q": names.q, "k": names.k, "v": names.v}[name]
            if name == "v" and config.keys_as_values:
                field = names.k
            if name == "v" and config.value_dim is not None:
                return self.prefix + field, g * config.value_dim, padded_rows(config.value_dim, h)
            return self.prefix + field, (n if name == "q" else g) * h, turn
        size, each = (n + 2 * g) * h, n // g * h
        if names.qkv_layout == "stacked":
            bounds = {"q": (0, n * h), "k": (n * h, (n + g) * h), "v": ((n + g) * h, size)}
            rows: Take | None = row_range(*bounds[name])
        elif names.qkv_layout == "blocks":
            block = n * h // 4
            bounds = {"q": (0, block), "k": (2 * block, 3 * block), "v": (block, 2 * block)}
            rows = rows_of_groups(4, *bounds[name])
        else:
            bounds = {"q": (0, each), "k": (each, each + h), "v": (each + h, each + 2 * h)}
            rows = rows_of_groups(g, *bounds[name])
        return self.prefix + names.qkv, size, chain(rows, turn)

    def _head_norm(self, config: AttentionConfig, name: str, kind: str, number: str, shape: Shape) -> Part:
        """Find the norm of all heads, or of head `number`."""
        names, turn = self.names, self._turn(config)
        module = self.prefix + (names.q_norm if name == "q_norm" else names.k_norm)
        if number and names.norm_by_head:
            return _norm(names, f"{module}.{number}", kind, shape, turn)
        if number:
            heads, own = config.num_heads if name == "q_norm" else config.num_kv_heads, int(number)
            stored, take = (heads, *shape), chain(lambda array: array[own], turn)
            return _norm(names, module, kind, stored, take)
        return _norm(names, module, kind, shape, turn)

    def _distances(self, config: AttentionConfig, relative: RelativeConfig, name: str, shape: Shape) -> Part:
        """Project the embeddings of distances by the rows that belong to a head: [2 span, H]."""
        names, (role, _, head) = self.names, name.partition(".")
        shared, h = relative.shared, config.head_dim
        module = names.relative_keys if role == "keys" else names.relative_queries
        if shared:
            module = names.k if role == "keys" else names.q
        bias = role == "queries" or shared or names.relative_keys_bias
        d, size, eps = config.hidden_size, config.num_heads * h, self.config.norm.eps
        own = slice(int(head) * h, (int(head) + 1) * h)
        norm, module = names.relative_norm if relative.normed else "", self.prefix + module
        wanted: list[tuple[str, Shape]]
        wanted = [(f"{names.relative}.weight", (2 * relative.span, d)), (f"{module}.weight", (size, d))]
        wanted += [(f"{module}.bias", (size,))] if bias else []
        wanted += [(f"{norm}.{kind}", (d,)) for kind in ("weight", "bias")] if norm else []

        def project(*arrays: Array) -> Array:
            table, weight, *others = arrays
            table = table.astype(np.float64)
            if norm:
                table = table - table.mean(axis=1, keepdims=True)
                table = table / np.sqrt((table * table).mean(axis=1, keepdims=True) + eps)
                table = table * others[-2] + others[-1]
            made = table @ weight[own].T.astype(np.float64)
            return np.asarray(made + others[0][own] if bias else made, np.float32)

        return Part(tuple(wanted), project, shape)

    def _latent(self, config: LatentConfig, name: str, kind: str, shape: Shape) -> Part:
        names, nope, rope = self.names, config.nope_dim, config.rope_dim
        turn = halves(rope, rope) if names.interleaved else None
        if name == "q_norm":
            return _norm(names, self.prefix + names.q_down_norm, kind, shape)
        if name in ("q_nope", "q_rope"):
            module = self.prefix + (names.q if config.q_rank is None else names.q_up)
            take: Take | None = rows_of_groups(config.num_heads, 0, nope)
            if name == "q_rope":
                take = chain(rows_of_groups(config.num_heads, nope, nope + rope), turn)
            return part(f"{module}.weight", (config.num_heads * (nope + rope), *shape[1:]), take)
        if name.startswith("kv_down"):
            picked: Take | None
            rank, size = config.kv_rank, config.kv_rank + rope
            latent = name.endswith("latent")
            picked = row_range(0, rank) if latent else chain(row_range(rank, size), turn)
            return part(f"{self.prefix}{names.kv_down}.{kind}", (size, *shape[1:]), picked)
        name, _, head = name.partition(".")
        size = nope + config.value_dim
        first = int(head) * size
        rows: Take | None = row_range(first + nope, first + size)
        if name == "keys":
            rows = chain(row_range(first, first + nope), transposed)
        return part(f"{self.prefix}{names.kv_up}.weight", (config.num_heads * size, config.kv_rank), rows)

    # --- mixtures

    def _mixture(self, config: MixtureConfig, name: str, kind: str, shape: Shape) -> Part:
        names, (group, _, rest) = self.names, name.partition(".")
        if kind == "correction":
            stored = self.prefix + names.correction
            return (
                part(stored, (1, *shape), lambda array: array[0])
                if names.correction_row
                else part(stored, shape)
            )
        if group == "shared":
            return self._shared(config, rest, shape)
        number, _, matrix = rest.partition(".")
        if names.expert_stack:
            return self._stacked(config, int(number), matrix, kind)
        module = {"gate": names.expert_gate, "up": names.expert_up, "down": names.expert_down}[matrix]
        return part(f"{self.prefix}{names.experts.format(e=number)}{module}.{kind}", shape)

    def _shared(self, config: MixtureConfig, matrix: str, shape: Shape) -> Part:
        names, prefix, inner = self.names, self.prefix + self.names.shared, config.shared_intermediate_size
        if names.shared_gate_up is None:
            modules = {"gate": names.expert_gate, "up": names.expert_up, "down": names.expert_down}
            if names.expert_stack:
                modules = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
            return part(f"{prefix}{modules[matrix]}.weight", shape)
        if matrix == "down":
            return part(f"{prefix}{names.shared_down}.weight", shape)
        take = row_range(0, inner) if matrix == "gate" else row_range(inner, 2 * inner)
        return part(f"{prefix}{names.shared_gate_up}.weight", (2 * inner, *shape[1:]), take)

    def _stacked(self, config: MixtureConfig, e: int, matrix: str, kind: str) -> Part:
        """Find a matrix or bias of expert e in tensors that hold all experts."""
        names, d, inner = self.names, config.hidden_size, config.intermediate_size
        count, place = config.routing.num_experts, int(matrix == "up")
        if matrix == "down":
            name, out, width, of = names.expert_down, d, inner, 1
        elif names.expert_gate_apart:
            name, out, width, of = names.expert_up, inner, d, 1
            name, place = (names.expert_gate_apart if matrix == "gate" else name), 0
        else:
            name, out, width, of = names.expert_up, 2 * inner, d, 2
        whole = self.prefix + names.experts + name
        if kind == "bias":
            if matrix == "down":
                return part(f"{whole}_bias", (count, d), lambda array: array[e])
            whole = f"{self.prefix}{names.experts}{names.expert_up}_bias"
            first = int(matrix == "up")
            return part(whole, (count, 2 * inner), lambda array: array[e, first::2])
        taken = slice(place, None, of)
        if names.expert_halves:
            taken = slice(place * out // of, (place + 1) * out // of)
        if names.expert_stack == "columns":
            return part(whole, (count, width, out), lambda array: array[e].T[taken])
        return part(whole, (count, out, width), lambda array: array[e, taken])


def _linear(names: TensorNames, module: str, shape: Shape, take: Take | None = None) -> Part:
    """Take rows of a matrix stored as [out, width], or transposed."""
    stored, flip = ((shape[1], shape[0]), transposed) if names.transposed else (shape, None)
    return part(f"{module}.weight", stored, chain(flip, take))


def _fused(names: TensorNames, module: str, kind: str, stored: Shape, take: Take | None) -> Part:
    """Take rows of a matrix, or the same elements of its bias."""
    if kind == "weight":
        return _linear(names, module, stored, take)
    return part(f"{module}.{kind}", stored[:1], take)


def _norm(names: TensorNames, module: str, kind: str, shape: Shape, take: Take | None = None) -> Part:
    """Take the weight of a norm, to which a family may add a number, or its bias."""
    added: Callable[[Array], Array] | None = None
    if kind == "weight" and names.norm_offset:
        offset = np.float32(names.norm_offset)
        added = lambda array: np.asarray(array, np.float32) + offset  # noqa: E731
    return part(f"{module}.{kind}", shape, chain(take, added))
