"""Takes tensors apart that a GGUF converter joined, and undoes its order of rows. Reads no values.

Joined tensors come apart under names of their own: `blk.0.ffn_up_exps.weight` holds `blk.0.exps.3.ffn_up.weight` and
its siblings, `blk.0.attn_qkv.weight` holds attn_q, attn_k and attn_v. attn_k_b and attn_v_b make one attn_kv_b.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from quire.errors import ModelError
from quire.weights.gguf.container import TensorEntry
from quire.weights.parts import Take, chain, row_range
from quire.weights.tensor import Array

BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_0-9]+)\.?(weight|bias|scale)?")
EXPERTS = re.compile(r"(ffn_(?:gate|up|down))_exps")
SHARED = re.compile(r"(ffn_(?:gate|up|down))_shexp")
# WHOLE: modules of one tensor, named without its suffix, in which files differ.
WHOLE = frozenset({"exp_probs_b", "attn_sinks", "layer_output_scale", "altup_correct_scale"})
# SQUEEZED: modules of recurrences that some files write with axes of length 1.
SQUEEZED = ("ssm_a", "ssm_d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")
STACKS = ("altup_proj", "altup_unembd_proj")
# RENAMED: modules within AltUp and LAuReL, to which the decoder gives other names.
RENAMED = {
    "altup_router": "altup_modality_router",
    "altup_predict_coef": "altup_prediction_coefs",
    "altup_correct_coef": "altup_correction_coefs",
    "altup_correct_scale": "altup_correct_output_scale",
    "laurel_l": "laurel_linear_left",
    "laurel_r": "laurel_linear_right",
    "laurel_post_norm": "laurel_post_laurel_norm",
}


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of heads and of key heads in each layer.

    In a `turned` file rotary pairs of queries and keys are neighbours (convert_hf_to_gguf.py, LlamaModel.permute).
    """

    counts: Sequence[tuple[int, int]]
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor: all of `tensor`, or its entry `index`, of which `take` picks the values.

    `shape` is the result's. `take` gets `second` as another tensor. A tensor that is not in the file has `values`.
    """

    tensor: str
    shape: tuple[int, ...]
    index: int | None = None
    take: Take | None = None
    second: str | None = None
    values: Array | None = None


def places(tensors: Mapping[str, TensorEntry], heads: Heads, where: str) -> dict[str, Place]:
    """Map names to places. ModelError if two tensors hold one name."""
    found: dict[str, Place] = {}
    for tensor in tensors:
        for name, place in _places_of(tensor, tensors, heads):
            if name in found:
                raise ModelError(f"{where}: tensors {found[name].tensor} and {tensor} both hold {name}")
            found[name] = place
    return found


def _places_of(tensor: str, tensors: Mapping[str, TensorEntry], heads: Heads) -> Iterator[tuple[str, Place]]:
    shape, block = tensors[tensor].shape, BLOCK.fullmatch(tensor)
    if block is None:
        module, _, kind = tensor.rpartition(".")
        stacked = module in STACKS and len(shape) > 1
        for e in range(shape[0] if stacked else 0):
            yield f"{module}.{e}.{kind}", Place(tensor, shape[1:], index=e)
        if not stacked:
            yield tensor, Place(tensor, shape)
        return
    i, module, kind = int(block[1]), block[2], block[3]
    layer = f"blk.{i}."
    counts = heads.counts[i] if i < len(heads.counts) else (0, 0)
    experts, shared = EXPERTS.fullmatch(module), SHARED.fullmatch(module)
    if experts and len(shape) > 1:
        for e in range(shape[0]):
            yield f"{layer}exps.{e}.{experts[1]}.{kind}", Place(tensor, shape[1:], index=e)
    elif module == "ffn_gate_up_exps" and len(shape) > 1 and shape[1] % 2 == 0:
        for e in range(shape[0]):
            for half, one in enumerate(("ffn_gate", "ffn_up")):
                yield f"{layer}exps.{e}.{one}.{kind}", _half(tensor, shape[1:], e, half)
    elif shared:
        yield f"{layer}shexp.{shared[1]}.{kind}", Place(tensor, shape)
    elif module == "exp_probs_b" and len(shape) == 2 and shape[0] == 1:
        yield f"{layer}{module}", Place(tensor, shape[1:], take=lambda array: array[0])
    elif module in WHOLE:
        yield f"{layer}{RENAMED.get(module, module)}", Place(tensor, shape)
    elif module in RENAMED:
        yield f"{layer}{RENAMED[module]}.{kind}", Place(tensor, shape)
    elif module == "attn_qkv" and shape and sum(counts) and shape[0] % (counts[0] + 2 * counts[1]) == 0:
        yield from _unfused(tensor, layer, kind, shape, counts, heads.turned)
    elif module in ("attn_k_b", "attn_v_b"):
        yield from _joined(tensor, tensors)
    elif module in ("attn_q", "attn_k") and heads.turned:
        yield tensor, Place(tensor, shape, take=_unturned(counts[module == "attn_k"]))
    elif module == "ssm_norm":
        yield tensor, Place(tensor, (prod(shape),), take=np.ravel)
    elif module in SQUEEZED and 1 in shape:
        yield tensor, Place(tensor, tuple(size for size in shape if size > 1), take=np.squeeze)
    elif module == "ffn_gate_inp_shexp" and len(shape) == 1:
        yield tensor, Place(tensor, (1, *shape), take=lambda array: array[None])
    else:
        yield tensor, Place(tensor, shape)


def _unfused(
    tensor: str, layer: str, kind: str, shape: tuple[int, ...], counts: tuple[int, int], turned: bool
) -> Iterator[tuple[str, Place]]:
    """Split a tensor into queries, keys and values."""
    heads, kv_heads = counts
    size = shape[0] // (heads + 2 * kv_heads)
    first = 0
    for module, count in (("attn_q", heads), ("attn_k", kv_heads), ("attn_v", kv_heads)):
        rows = row_range(first * size, (first + count) * size)
        first += count
        turn = _unturned(count) if turned and module != "attn_v" else None
        yield f"{layer}{module}.{kind}", Place(tensor, (count * size, *shape[1:]), take=chain(rows, turn))


def _half(tensor: str, shape: tuple[int, ...], e: int, half: int) -> Place:
    rows = shape[0] // 2
    return Place(tensor, (rows, *shape[1:]), e, row_range(half * rows, (half + 1) * rows))


def _unturned(heads: int) -> Take:
    """Return a take that puts rotary pairs from neighbours back to halves."""

    def take(array: Array) -> Array:
        if not heads or len(array) % (2 * heads):
            return array  # of a shape that the model refuses
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return take


def _joined(tensor: str, tensors: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Place]]:
    """Join keys [N, R, K] and values [N, V, R] of latent attention to a matrix [N (K + V), R]."""
    keys, values = tensor.replace("attn_v_b", "attn_k_b"), tensor.replace("attn_k_b", "attn_v_b")
    shapes = [tensors[name].shape for name in (keys, values) if name in tensors]
    if list(map(len, shapes)) != [3, 3] or shapes[0][:2] != shapes[1][::2]:
        yield tensor, Place(tensor, tensors[tensor].shape)
    elif tensor == keys:
        (heads, rank, size), value_size = shapes[0], shapes[1][1]
        shape = heads * (size + value_size), rank
        yield tensor.replace("attn_k_b", "attn_kv_b"), Place(tensor, shape, take=_by_head, second=values)


def _by_head(keys: Array, values: Array) -> Array:
    both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return both.reshape(-1, both.shape[-1])
