"""The layers that networks are written with. Quire divides weights by itself, so arguments about ranks do nothing."""

from typing import Any

import quire.network
from quire.network import MLP as _MLP
from quire.network import Attention as _Attention
from quire.network import GatedMLP as _GatedMLP
from tensorrt_llm.functional import AttentionMaskType, PositionEmbeddingType


class Embedding(quire.network.Embedding):
    """Token ids -> rows of a table. The build's precision is its type."""

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
        super().__init__(num_embeddings, embedding_dim)


class Linear(quire.network.Linear):
    """A product with a weight [out_features, in_features]."""

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
        super().__init__(in_features, out_features, bias)


ColumnLinear = RowLinear = Linear


class RmsNorm(quire.network.RmsNorm):
    """A norm without a mean."""

    def __init__(self, normalized_shape: int, eps: float = 1e-6, dtype: Any = None) -> None:
        super().__init__(normalized_shape, eps)


class LayerNorm(quire.network.LayerNorm):
    """A norm with a mean and a bias."""

    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, bias: bool = True, dtype: Any = None
    ) -> None:
        super().__init__(normalized_shape, eps, bias)


class Attention(_Attention):
    """Causal attention."""

    def __init__(
        self,
        *,
        local_layer_idx: int = 0,
        attention_mask_type: AttentionMaskType = AttentionMaskType.causal,
        dtype: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        num_layers: int = 1,
        **shape: Any,
    ) -> None:
        super().__init__(**shape)


class MLP(_MLP):
    """Two products with an activation between them."""

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


class GatedMLP(_GatedMLP):
    """An MLP whose activation gates another product."""

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
