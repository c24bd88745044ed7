"""Values of a network, and the enumerations of its layers."""

from enum import Enum

from quire.errors import ConfigError
from tensorrt_llm.network import Tensor


class PositionEmbeddingType(str, Enum):
    """Positions that attention knows."""

    rope_gpt_neox = "rope_gpt_neox"
    rope_gptj = "rope_gptj"
    alibi = "alibi"
    none = "none"

    @classmethod
    def read(cls, name: str) -> "PositionEmbeddingType":
        """Find a kind of positions by its name. ConfigError if there is none."""
        try:
            return cls(name)
        except ValueError:
            kinds = ", ".join(kind.value for kind in cls)
            raise ConfigError(f"position_embedding_type must be one of {kinds}, got {name!r}") from None


class AttentionMaskType(Enum):
    """Positions that attention sees: the earlier ones."""

    causal = "causal"


__all__ = ["AttentionMaskType", "PositionEmbeddingType", "Tensor"]
