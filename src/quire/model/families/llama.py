"""Llama, and what its descendants share: Mistral, Qwen2 and Qwen3 differ from it in a few fields."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.rope import context_length, read_rope
from quire.model.spec import ArchSpec
from quire.ops.protocol import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_llama(config: ConfigReader) -> ArchSpec:
    """Llama 2 and 3.x, TinyLlama, SmolLM2, Yi."""
    bias = config.boolean("attention_bias", False)
    return llama_like(
        config,
        "LlamaForCausalLM",
        default_max_position=2048,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
    )


def llama_like(
    config: ConfigReader,
    architecture: str,
    *,
    default_max_position: int,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    **fields: Any,
) -> ArchSpec:
    """The common shape; `fields` are ArchSpec's own, where the family sets them. Defaults are transformers'.

    `default_kv_heads` is for an absent key; null means as many as query heads.
    """
    layers, heads = config.integer("num_hidden_layers", high=4096), config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    absent = default_kv_heads if not config.has("num_key_value_heads") else None
    kv_heads = config.integer("num_key_value_heads", absent or heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    head_dim = config.integer("head_dim", default_head_dim or max(1, hidden // heads))
    if head_dim % 2:
        raise config.wrong("head_dim", head_dim, "even, for rotary embedding")
    activation = config.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise config.wrong("hidden_act", activation, f"one of {', '.join(ACTIVATIONS)}")
    max_position = config.integer("max_position_embeddings", default_max_position)
    rope = read_rope(config, head_dim, max_position, 10000.0)
    return ArchSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        max_position=context_length(rope, max_position),
        norm="rms",
        norm_eps=config.number("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[activation],
        rope=rope,
        attention_scale=head_dim**-0.5,
        windows=fields.pop("windows", (None,) * layers),
        tie_embeddings=config.boolean("tie_word_embeddings", False),
        **fields,
    )
