"""The layers of networks written in Python, under TensorRT-LLM's names. They hold weights and record their calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from quire.devices.protocol import Activation
from quire.errors import ConfigError
from quire.model.families.family import ACTIVATIONS
from quire.network.recording import Module, Parameter, Tensor

Positions = Literal["rope_gpt_neox", "rope_gptj", "alibi", "none"]


class Layer(Module):
    """A module that the device computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.network.record(self, x)


class Embedding(Layer):
    """Token ids -> rows of `weight` [num_embeddings, embedding_dim]."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        self.weight = Parameter(num_embeddings, embedding_dim)


class Linear(Layer):
    """x -> x `weight`^T + `bias`, with weight [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        self.weight = Parameter(out_features, in_features)
        self.bias = Parameter(out_features) if bias else None


class RmsNorm(Layer):
    """x -> x / rms(x) * `weight` (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, normalized_shape: int, eps: float = 1e-6) -> None:
        self.weight = Parameter(normalized_shape)
        self.bias: Parameter | None = None
        self.eps = eps


class LayerNorm(Layer):
    """x -> (x - mean) / deviation * `weight` + `bias` (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5, bias: bool = True) -> None:
        self.weight = Parameter(normalized_shape)
        self.bias = Parameter(normalized_shape) if bias else None
        self.eps = eps


class Attention(Layer):
    """Causal attention with a paged cache. N heads of H elements, G of keys and values.

    `qkv` [(N + 2 G) H, hidden_size] is the projections of queries, keys and values, one after the other; `dense`
    [hidden_size, N H] ends the layer. Positions are rotary with halves as pairs (rope_gpt_neox) or neighbours
    (rope_gptj), ALiBi, or none. `rotary_embedding_scaling` is the `rope_scaling` of a Hugging Face config. Scores are
    divided by sqrt(H) * q_scaling. With `sliding_window` a token sees that many tokens, itself included.
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
        position_embedding_type: Positions = "rope_gpt_neox",
        rotary_embedding_base: float = 10000.0,
        rotary_embedding_scaling: Mapping[str, Any] | None = None,
        rotary_embedding_percentage: float = 1.0,
        q_scaling: float = 1.0,
        qk_layernorm: bool = False,
        eps: float = 1e-6,
        sliding_window: int | None = None,
    ) -> None:
        self.num_heads = num_attention_heads
        self.num_kv_heads = num_kv_heads or num_attention_heads
        self.head_size = attention_head_size or hidden_size // num_attention_heads
        self.max_positions = max_position_embeddings
        self.positions, self.window = position_embedding_type, sliding_window
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

    def __init__(self, hidden_size: int, ffn_hidden_size: int, hidden_act: str, bias: bool = True) -> None:
        self.activation = activation(hidden_act)
        self.fc = Linear(hidden_size, ffn_hidden_size, bias)
        self.proj = Linear(ffn_hidden_size, hidden_size, bias)


class GatedMLP(MLP):
    """x -> proj(activation(fc(x)) * gate(x)), so `fc` is what Hugging Face names gate_proj, and `gate` up_proj."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, hidden_act: str, bias: bool = True) -> None:
        super().__init__(hidden_size, ffn_hidden_size, hidden_act, bias)
        self.gate = Linear(hidden_size, ffn_hidden_size, bias)


Norm = RmsNorm | LayerNorm


def activation(name: str) -> Activation:
    """An activation by the name that a Hugging Face config has for it."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
