"""ArchSpec: a decoder-only transformer as data. Knows no checkpoint, no backend and no family by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from quire.ops.protocol import Activation, FloatDtype, KVSpec, NormKind

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding, half-split pairs.

    Kinds: default; linear (positions divided by factor); llama3 (Llama 3.1's frequency bands); yarn
    (Peng et al. 2023, arXiv:2309.00071). Fields beyond theta and rotary_dim are for the kinds that need them.
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class ModelShape(Protocol):
    """What an engine must know of a model, whoever computes it."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def num_table_parameters(self) -> int: ...
    def kv_spec(self, dtype: FloatDtype) -> KVSpec: ...


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """Pre-norm decoder: x += attention(norm(x)); x += mlp(norm(x)); logits = head(norm(x)).

    `windows` has one entry a layer: the sliding window in tokens, or None for full attention.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm: NormKind
    norm_eps: float
    activation: Activation
    rope: RopeSpec
    attention_scale: float
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False

    @property
    def num_table_parameters(self) -> int:
        """Of the embedding and the head, which a prompt's tokens do not multiply with (but for the last one)."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)

    def kv_spec(self, dtype: FloatDtype) -> KVSpec:
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, dtype)
