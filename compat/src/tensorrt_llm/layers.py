"""Layers of networks hold weights and record their calls.

Quire divides weights by itself and stores them in the build's precision, so arguments about types and ranks do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.devices.protocol import Activation
from quire.errors import ConfigError
from quire.model.families.family import ACTIVATIONS
from tensorrt_llm.functional import AttentionMaskType, PositionEmbeddingType
from tensorrt_llm.module import Module
from tensorrt_llm.network import Tensor
from tensorrt_llm.parameter import Parameter


class Layer(Module):
    """Modules that the device computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.network.record(self, x)


class Embedding(Layer):
    """Token ids -> rows of `weight` [num_embeddings, embedding_dim]."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: Any = None,
        tp_size: int = 1,
        tp_group: Any = None,
        sharding_dim: int = 0,
        tp_rank: int | None = None,
    ) -> None:
        self.weight = Parameter(num_embeddings, embedding_dim)


class Linear(Layer):
    """x -> x `weight`^T + `bias`, with weight [out_features, in_features]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        gather_output: bool = True,
    ) -> None:
        self.weight = Parameter(out_features, in_features)
        self.bias = Parameter(out_features) if bias else None


ColumnLinear = RowLinear = Linear


class RmsNorm(Layer):
    """x -> x / rms(x) * `weight` (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, normalized_shape: int, eps: float = 1e-6, dtype: Any = None) -> None:
        self.weight = Parameter(normalized_shape)
        self.bias: Parameter | None = None
        self.eps = eps


class LayerNorm(Layer):
    """x -> (x - mean) / deviation * `weight` + `bias` (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, bias: bool = True, dtype: Any = None
    ) -> None:
        self.weight = Parameter(normalized_shape)
        self.bias = Parameter(normalized_shape) if bias else None
        self.eps = eps


class Attention(Layer):
    """Causal attention with a paged cache. N heads of H elements, G of keys and values.

    `qkv` [(N + 2 G) H, hidden_size] stacks the projections of queries, keys and values; `dense` [hidden_size, N H]
    ends the layer. Positions are rotary with halves as pairs (rope_gpt_neox) or neighbours (rope_gptj), ALiBi, or
    none. `rotary_embedding_scaling` is the `rope_scaling` of a Hugging Face config. Scores are divided by
    sqrt(H) * q_scaling. A token sees the last `sliding_window` tokens, itself included; None sees all.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_attention_heads: int,
        num_kv_heads: int | None = None,
        attention_head_size: int | None = None,
        max_position_embeddings: int = 1024,
        bias: bool = True,
        dense_bias: bool | None = None,
        position_embedding_type: PositionEmbeddingType | str = PositionEmbeddingType.rope_gpt_neox,
        rotary_embedding_base: float = 10000.0,
        rotary_embedding_scaling: Mapping[str, Any] | None = None,
        rotary_embedding_percentage: float = 1.0,
        q_scaling: float = 1.0,
        qk_layernorm: bool = False,
        eps: float = 1e-6,
        sliding_window: int | None = None,
        local_layer_idx: int = 0,
        num_layers: int = 1,
        attention_mask_type: AttentionMaskType = AttentionMaskType.causal,
        dtype: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        tp_rank: int = 0,
    ) -> None:
        self.num_heads = num_attention_heads
        self.num_kv_heads = num_kv_heads or num_attention_heads
        self.head_size = attention_head_size or hidden_size // num_attention_heads
        self.max_positions = max_position_embeddings
        self.positions, self.window = PositionEmbeddingType.read(position_embedding_type), sliding_window
        self.theta, self.rope_scaling = rotary_embedding_base, dict(rotary_embedding_scaling or {})
        self.rotated, self.q_scaling = rotary_embedding_percentage, q_scaling
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        self.qkv = Linear(hidden_size, rows, bias)
        self.dense = Linear(
            self.num_heads * self.head_size, hidden_size, bias if dense_bias is None else dense_bias
        )
        self.q_layernorm = RmsNorm(self.head_size, eps) if qk_layernorm else None
        self.k_layernorm = RmsNorm(self.head_size, eps) if qk_layernorm else None


class MLP(Layer):
    """x -> proj(activation(fc(x)))."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        hidden_act: str,
        bias: bool = True,
        dtype: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
    ) -> None:
        self.activation = activation(hidden_act)
        self.fc = Linear(hidden_size, ffn_hidden_size, bias)
        self.proj = Linear(ffn_hidden_size, hidden_size, bias)


class GatedMLP(MLP):
    """x -> proj(activation(fc(x)) * gate(x)): `fc` is gate_proj of Hugging Face, and `gate` is up_proj."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        hidden_act: str,
        bias: bool = True,
        dtype: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
    ) -> None:
        super().__init__(hidden_size, ffn_hidden_size, hidden_act, bias)
        self.gate = Linear(hidden_size, ffn_hidden_size, bias)


Norm = RmsNorm | LayerNorm


def activation(name: str) -> Activation:
    """Find an activation by the name in a Hugging Face config. ConfigError if it has none."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


__all__ = [
    "MLP",
    "Attention",
    "AttentionMaskType",
    "ColumnLinear",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "PositionEmbeddingType",
    "RmsNorm",
    "RowLinear",
]
