"""Finds the pieces of attention: projections of their own or fused ones, and norms of heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from quire.lazy import Lazy
from quire.model.parts.attention import AttentionConfig
from quire.model.parts.scores import position_buckets
from quire.model.tensors.stored import Shape, fused, linear, norm
from quire.weights.parts import Part, Take, chain, halves, padded_rows, part, row_range, rows_of_groups

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors, relative
else:
    relative = Lazy("quire.model.tensors.relative")


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below attention."""
    config, names = layer.mixer(AttentionConfig), layer.names
    name, _, number = name.partition(".")
    if name == "out":
        return _out(layer, config, shape)
    if name == "gate" and names["attention.gate"] != names["attention.q"]:
        return linear(names, layer.prefix + names["attention.gate"], shape)
    if name in ("q", "k", "v", "gate"):
        return _qkv(layer, config, name, kind)
    if name in ("q_norm", "k_norm"):
        return _head_norm(layer, config, name, kind, number, shape)
    if name == "relative":
        return relative.find(layer, config, number, shape)
    assert kind == "position_bias"
    assert config.scores.position_buckets is not None
    buckets = config.scores.position_buckets
    places = position_buckets(buckets)
    return part(
        f"{names['position_bias']}.weight",
        (buckets, config.num_heads),
        lambda table: table[places].T.reshape(-1),
    )


def _out(layer: LayerTensors, config: AttentionConfig, shape: Shape) -> Part:
    """Find the output projection [D, N V]; the columns of short values are padded as the values are."""
    names = layer.names
    if config.value_dim is None:
        return linear(names, layer.prefix + names["attention.out"], shape)
    stored = linear(
        names, layer.prefix + names["attention.out"], (shape[0], config.num_heads * config.value_dim)
    )
    pad = padded_rows(config.value_dim, config.head_dim)
    return Part(stored.tensors, chain(stored.take, lambda array: pad(array.T).T), shape)


def _turn(layer: LayerTensors, config: AttentionConfig) -> Take | None:
    rope = config.rope or layer.rope
    if not layer.names.interleaved or rope is None:
        return None
    return halves(config.head_dim, rope.rotary_dim)


def _qkv(layer: LayerTensors, config: AttentionConfig, name: str, kind: str) -> Part:
    names, d = layer.names, config.input_size or config.hidden_size
    module, size, take = _place(layer, config, name)
    if kind == "bias":
        if not names["attention.q.bias"]:
            return part(f"{module}.bias", (size,), take)
        own = config.num_heads * config.head_dim  # vectors of their own; keys have none
        if name == "k":
            return Part((), lambda: np.zeros(own, np.float32), (own,))
        return part(layer.prefix + names[f"attention.{name}.bias"], (own,))
    found = fused(names, module, kind, (size, d), take)
    if name == "v" and config.value_dim is not None:
        return replace(found, shape=(config.num_kv_heads * config.head_dim, d))
    return found


def _place(layer: LayerTensors, config: AttentionConfig, name: str) -> tuple[str, int, Take | None]:
    """Find the module of queries, keys or values, its stored rows, and the part to take."""
    names, h = layer.names, config.head_dim
    n, g = config.num_heads, config.num_kv_heads
    turn = None if name == "v" else _turn(layer, config)
    if not names["attention.qkv"]:
        field = names[f"attention.{name}"]
        if config.gate is not None and field == names["attention.gate"]:  # beside the queries of each head
            first, turn = (0, turn) if name == "q" else (h, None)
            return layer.prefix + field, 2 * n * h, chain(rows_of_groups(n, first, first + h), turn)
        if name == "v" and config.keys_as_values:
            field = names["attention.k"]
        if name == "v" and config.value_dim is not None:
            return layer.prefix + field, g * config.value_dim, padded_rows(config.value_dim, h)
        return layer.prefix + field, (n if name == "q" else g) * h, turn
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
    return layer.prefix + names["attention.qkv"], size, chain(rows, turn)


def _head_norm(
    layer: LayerTensors, config: AttentionConfig, name: str, kind: str, number: str, shape: Shape
) -> Part:
    """Find the norm of all heads, or of head `number`."""
    names, turn = layer.names, _turn(layer, config)
    module = layer.prefix + names[f"attention.{name}"]
    if number and names.norm_by_head:
        return norm(names, f"{module}.{number}", kind, shape, turn)
    if number:
        heads, own = config.num_heads if name == "q_norm" else config.num_kv_heads, int(number)
        stored, take = (heads, *shape), chain(lambda array: array[own], turn)
        return norm(names, module, kind, stored, take)
    return norm(names, module, kind, shape, turn)
