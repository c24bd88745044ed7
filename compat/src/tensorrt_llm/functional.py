"""Values of a network, and the enumerations of its layers."""

from enum import Enum

from quire.network import Tensor


class PositionEmbeddingType(str, Enum):
    """How attention knows positions."""

    rope_gpt_neox = "rope_gpt_neox"
    rope_gptj = "rope_gptj"
    alibi = "alibi"
    none = "none"


class AttentionMaskType(Enum):
    """Which positions attention sees: those before."""

    causal = "causal"


__all__ = ["AttentionMaskType", "PositionEmbeddingType", "Tensor"]
