"""Names of tensors in a GGUF file -> names in the checkpoint that it was made of, and what undoes the conversion.

Knows no family's maths and reads no values: a `Place` says which tensor, which part of it, and what to do to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.weights.gguf.container import TensorEntry
from quire.weights.parts import Take, chain, row_range, transposed
from quire.weights.tensor import Array

BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_0-9]+)\.?(weight|bias|scale)?")
# What the config was made of, and buffers that are computed.
CONSUMED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: all of `tensor`, or its entry `index`; `take` then restores the original's order.

    `shape` is that of the result. `exact` says that `take` moves values and computes none. `second` is a tensor that
    `take` gets beside the first: the original was one. `values` are those of a tensor that is not in the file.
    """

    tensor: str
    shape: tuple[int, ...]
    index: int | None = None
    take: Take | None = None
    exact: bool = True
    second: str | None = None
    values: Array | None = None


@dataclass(frozen=True, slots=True)
class Naming:
    """How one architecture's tensors are called. Keys are GGUF's module names, values the original's.

    `whole` are modules of one tensor, whose original has no suffix (or a module with the suffix ".scale"). `experts`,
    `heads` and, outside of layers, `stacks` are modules that the file stacks: one original for each entry. `turned`
    were reordered for rotary pairs that are neighbours (convert_hf_to_gguf.py, LlamaModel.permute); `grouped` had the
    rows of each head of keys together (its queries, its key, its value); `transposed` were stored [K, O]; `rows` were
    matrices of one row. `norm_offset` was added to the weights of norms. `latent_up` is the module whose keys and
    values the file splits (attn_k_b, attn_v_b).

    A file may also fuse what the original keeps apart: attn_qkv, and the experts' ffn_gate_up_exps.
    """

    layer: str = "model.layers.{i}."
    outside: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
        }
    )
    modules: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    turned: bool = False
    grouped: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    norm_offset: float = 0.0
    latent_up: str = ""


def places(
    tensors: Mapping[str, TensorEntry],
    naming: Naming,
    config: Mapping[str, Any],
    unused: tuple[str, ...] = (),
) -> dict[str, Place]:
    """{name in the original: place}. A tensor that the architecture has no name for keeps its own.

    Tensors whose names begin with one of `unused` are left out.
    """
    found: dict[str, Place] = {}
    for tensor, entry in tensors.items():
        if tensor not in CONSUMED and not tensor.startswith(unused):
            values = tensors.get(tensor.replace("attn_k_b", "attn_v_b"))
            second = None if values is None else values.shape
            found.update(_places_of(tensor, entry.shape, naming, config, second))
    return found


def made_places(made: Mapping[str, Array]) -> dict[str, Place]:
    """Places of tensors that are made of keys."""
    return {name: Place("", values.shape, values=values) for name, values in made.items()}


def _places_of(
    tensor: str,
    shape: tuple[int, ...],
    naming: Naming,
    config: Mapping[str, Any],
    second: tuple[int, ...] | None,
) -> Iterator[tuple[str, Place]]:
    block = BLOCK.fullmatch(tensor)
    if block is None:
        yield from _outside(tensor, shape, naming)
        return
    layer, module, kind = naming.layer.format(i=int(block[1])), block[2], block[3]
    stacked = naming.experts.get(module) or naming.heads.get(module)
    if kind == "scale":
        name = naming.whole.get(f"{module}.scale")
        yield (tensor if name is None else layer + name), Place(tensor, shape)
    elif stacked is not None and len(shape) > 1:
        for e in range(shape[0]):
            yield f"{layer}{stacked.format(e=e)}.{kind}", Place(tensor, shape[1:], index=e)
    elif module == "ffn_gate_up_exps" and naming.experts and len(shape) > 1:
        for e in range(shape[0]):
            for half, one in enumerate(("ffn_gate_exps", "ffn_up_exps")):
                yield f"{layer}{naming.experts[one].format(e=e)}.{kind}", _half(tensor, shape[1:], e, half)
    elif module in naming.whole:
        yield layer + naming.whole[module], _row(tensor, module, shape, naming)
    elif module == "attn_qkv" and module not in naming.modules:
        yield from _unfused(tensor, layer, kind, shape, naming, _heads(config, int(block[1])))
    elif naming.latent_up and module == "attn_k_b" and second is not None and len(shape) == len(second) == 3:
        heads, rank, keys = shape
        joined = Place(
            tensor, (heads * (keys + second[1]), rank), take=_joined, second=tensor.replace("k_b", "v_b")
        )
        yield f"{layer}{naming.latent_up}.{kind}", joined
    elif naming.latent_up and module == "attn_v_b":
        return  # beside its keys
    elif module in naming.modules and kind is not None:
        yield (
            f"{layer}{naming.modules[module]}.{kind}",
            _restored(tensor, module, kind, shape, naming, _heads(config, int(block[1]))),
        )
    else:
        yield tensor, Place(tensor, shape)


def _outside(tensor: str, shape: tuple[int, ...], naming: Naming) -> Iterator[tuple[str, Place]]:
    """A tensor that belongs to no layer."""
    module, _, kind = tensor.rpartition(".")
    stacked = naming.stacks.get(module)
    if stacked is not None and len(shape) > 1:
        for e in range(shape[0]):
            yield f"{stacked.format(e=e)}.{kind}", Place(tensor, shape[1:], index=e)
        return
    name = naming.outside.get(module)
    offset = naming.norm_offset if (module, kind) == ("output_norm", "weight") else 0.0
    place = Place(tensor, shape, take=_minus(offset) if offset else None, exact=not offset)
    yield (tensor if name is None else f"{name}.{kind}"), place


def _unfused(
    tensor: str, layer: str, kind: str, shape: tuple[int, ...], naming: Naming, counts: tuple[int, int]
) -> Iterator[tuple[str, Place]]:
    """Queries, keys and values that the file holds in one tensor."""
    heads, kv_heads = counts
    size = shape[0] // (heads + 2 * kv_heads)
    first = 0
    for module, count in (("attn_q", heads), ("attn_k", kv_heads), ("attn_v", kv_heads)):
        rows = row_range(first * size, (first + count) * size)
        first += count
        turn = _unturned(count) if naming.turned and module != "attn_v" else None
        place = Place(tensor, (count * size, *shape[1:]), take=chain(rows, turn))
        yield f"{layer}{naming.modules.get(module, module)}.{kind}", place


def _half(tensor: str, shape: tuple[int, ...], e: int, half: int) -> Place:
    rows = shape[0] // 2
    return Place(tensor, (rows, *shape[1:]), e, row_range(half * rows, (half + 1) * rows))


def _row(tensor: str, module: str, shape: tuple[int, ...], naming: Naming) -> Place:
    """A tensor as it is, or as a matrix of one row if the original was one."""
    if module in naming.rows and len(shape) == 1:
        return Place(tensor, (1, *shape), take=lambda array: array[None])
    return Place(tensor, shape)


def _heads(config: Mapping[str, Any], layer: int) -> tuple[int, int]:
    """The number of heads, and of those of keys and values."""
    heads = config.get("num_attention_heads", 1)
    if "block_configs" in config:
        return heads, heads // config["block_configs"][layer]["attention"].get("n_heads_in_group", heads)
    return heads, config.get("num_key_value_heads") or config.get("num_kv_heads") or heads


def _restored(
    tensor: str, module: str, kind: str, shape: tuple[int, ...], naming: Naming, counts: tuple[int, int]
) -> Place:
    """The place of a module's tensor, with what the converter did to it undone."""
    heads, kv_heads = counts
    if naming.turned and module in ("attn_q", "attn_k"):
        return Place(tensor, shape, take=_unturned(heads if module == "attn_q" else kv_heads))
    if module in naming.grouped:
        return Place(tensor, shape, take=_grouped(heads, kv_heads))
    if module in naming.transposed and len(shape) == 2:
        return Place(tensor, (shape[1], shape[0]), take=transposed)
    if module in naming.rows:
        return _row(tensor, module, shape, naming)
    if naming.norm_offset and kind == "weight" and module.endswith("norm"):
        return Place(tensor, shape, take=_minus(naming.norm_offset), exact=False)
    return Place(tensor, shape)


def _unturned(heads: int) -> Take:
    """Rows of pairs that are neighbours back to halves."""

    def take(array: Array) -> Array:
        if len(array) % (2 * heads):
            return array  # of a shape that the model refuses
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return take


def _grouped(heads: int, kv_heads: int) -> Take:
    """Queries, keys and values of all heads back to groups: the queries of a head of keys, its key and its value."""

    def take(array: Array) -> Array:
        if heads % kv_heads or len(array) % (heads + 2 * kv_heads):
            return array  # of a shape that the model refuses
        size, rest = len(array) // (heads + 2 * kv_heads), array.shape[1:]
        ends = heads * size, (heads + kv_heads) * size
        parts = array[: ends[0]], array[ends[0] : ends[1]], array[ends[1] :]
        grouped = [part.reshape(kv_heads, -1, *rest) for part in parts]
        return np.concatenate(grouped, axis=1).reshape(array.shape)

    return take


def _joined(keys: Array, values: Array) -> Array:
    """Keys [N, R, K] and values [N, V, R] of latent attention back to one matrix [N (K + V), R]."""
    both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return both.reshape(-1, both.shape[-1])


def _minus(offset: float) -> Take:
    return lambda array: array.astype(np.float32) - np.float32(offset)
