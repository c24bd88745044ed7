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
from quire.weights.parts import Take, transposed
from quire.weights.tensor import Array

BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_0-9]+)\.?(weight|bias)?")
# What the config was made of, and buffers that are computed.
CONSUMED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: all of `tensor`, or its entry `index`; `take` then restores the original's order.

    `shape` is that of the result. `exact` says that `take` moves values and computes none.
    """

    tensor: str
    shape: tuple[int, ...]
    index: int | None = None
    take: Take | None = None
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Naming:
    """How one architecture's tensors are called. Keys are GGUF's module names, values the original's.

    `experts` and `heads` are modules that the file stacks: one original for each entry. `turned` were reordered for
    rotary pairs that are neighbours (convert_hf_to_gguf.py, LlamaModel.permute); `grouped` had the rows of each head
    together (query, key, value); `transposed` were stored [K, O]; `rows` were matrices of one row. `norm_offset` was
    added to norms.
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
    experts: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)
    turned: bool = False
    grouped: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    norm_offset: float = 0.0


ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
LLAMA = {
    **ATTENTION,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = {
    **LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
QWEN_EXPERTS = {f"ffn_{kind}_exps": f"mlp.experts.{{e}}.{kind}_proj" for kind in ("gate", "up", "down")}
QWEN_MOE = {
    **LLAMA,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{kind}_shexp": f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")},
}
PLAIN = Naming(modules=LLAMA)
TURNED = Naming(modules=LLAMA, turned=True)
MIXTRAL = Naming(
    modules={**ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    },
    turned=True,
)
QWEN_MIXTURE = Naming(modules=QWEN_MOE, experts=QWEN_EXPERTS, rows=("ffn_gate_inp_shexp",))
GEMMA = Naming(modules=LLAMA, norm_offset=1.0)
GEMMA_SANDWICH = Naming(modules=SANDWICH, norm_offset=1.0)
OLMO2 = Naming(
    modules={
        **LLAMA,
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
PHI3 = Naming(modules={**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
PHI2 = Naming(
    outside={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.final_layernorm",
        "output": "lm_head",
    },
    modules={**ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
)
STARCODER2 = Naming(modules={**ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
STABLELM = Naming(
    modules={key: name for key, name in LLAMA.items() if key not in ("attn_q_norm", "attn_k_norm")},
    heads={
        "attn_q_norm": "self_attn.q_layernorm.norms.{e}",
        "attn_k_norm": "self_attn.k_layernorm.norms.{e}",
    },
)
GPT2 = Naming(
    layer="transformer.h.{i}.",
    outside={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    modules={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)
GPT_NEOX = Naming(
    layer="gpt_neox.layers.{i}.",
    outside={
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    modules={
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    grouped=("attn_qkv",),
)


def places(tensors: Mapping[str, TensorEntry], naming: Naming, config: Mapping[str, Any]) -> dict[str, Place]:
    """{name in the original: place}. A tensor that the architecture has no name for keeps its own."""
    found: dict[str, Place] = {}
    for tensor, entry in tensors.items():
        if tensor not in CONSUMED:
            found.update(_places_of(tensor, entry.shape, naming, config))
    return found


def _places_of(
    tensor: str, shape: tuple[int, ...], naming: Naming, config: Mapping[str, Any]
) -> Iterator[tuple[str, Place]]:
    block = BLOCK.fullmatch(tensor)
    if block is None:
        module, _, kind = tensor.rpartition(".")
        name = naming.outside.get(module)
        offset = naming.norm_offset if module == "output_norm" else 0.0
        take = _minus(offset) if offset else None
        yield (
            (tensor if name is None else f"{name}.{kind}"),
            Place(tensor, shape, take=take, exact=not offset),
        )
        return
    layer, module, kind = naming.layer.format(i=int(block[1])), block[2], block[3]
    stacked = naming.experts.get(module) or naming.heads.get(module)
    if stacked is not None and len(shape) > 1:
        for e in range(shape[0]):
            yield f"{layer}{stacked.format(e=e)}.{kind}", Place(tensor, shape[1:], index=e)
    elif module in naming.modules and kind is not None:
        yield f"{layer}{naming.modules[module]}.{kind}", _restored(tensor, module, shape, naming, config)
    else:
        yield tensor, Place(tensor, shape)


def _restored(
    tensor: str, module: str, shape: tuple[int, ...], naming: Naming, config: Mapping[str, Any]
) -> Place:
    """The place of a module's tensor, with what the converter did to it undone."""
    heads, kv_heads = config.get("num_attention_heads", 1), config.get("num_key_value_heads", 1)
    if naming.turned and module in ("attn_q", "attn_k"):
        return Place(tensor, shape, take=_unturned(heads if module == "attn_q" else kv_heads))
    if module in naming.grouped:
        return Place(tensor, shape, take=_grouped(heads))
    if module in naming.transposed and len(shape) == 2:
        return Place(tensor, (shape[1], shape[0]), take=transposed)
    if module in naming.rows and len(shape) == 1:
        return Place(tensor, (1, *shape), take=lambda array: array[None])
    if naming.norm_offset and module.endswith("norm"):
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


def _grouped(heads: int) -> Take:
    """Queries, keys and values of all heads back to each head's three."""

    def take(array: Array) -> Array:
        if len(array) % (3 * heads):
            return array
        stacked = array.reshape(3, heads, -1, *array.shape[1:])
        return stacked.swapaxes(0, 1).reshape(array.shape)

    return take


def _minus(offset: float) -> Take:
    return lambda array: array.astype(np.float32) - np.float32(offset)
