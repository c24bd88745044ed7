"""What a backend knows of a model that another library computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.devices.protocol import FloatDtype, Graph


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A model of a family that Quire lacks, before its weights are read. Another library's code computes it.

    `generation` is generation_config.json, or empty.
    """

    dtype: FloatDtype
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    weight_bytes: int
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]

    def outline(self) -> Graph:
        """Make a graph to plan with. It cannot run."""
        raise NotImplementedError

    def load(self) -> Graph:
        """Read the weights. ModelError if the model cannot run over a paged cache."""
        raise NotImplementedError
