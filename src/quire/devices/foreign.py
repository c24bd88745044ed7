"""What a backend knows of a model that another library computes."""

from __future__ import annotations

from typing import Any, Protocol

from quire.devices.protocol import FloatDtype, Graph


class ForeignModel(Protocol):
    """A model of a family that Quire lacks, run by another library's code as a graph of one backend."""

    @property
    def dtype(self) -> FloatDtype: ...
    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def generation(self) -> dict[str, Any]:
        """generation_config.json, or empty."""

    def outline(self) -> Graph:
        """A graph to plan with. It cannot run."""

    def load(self) -> Graph:
        """Read the weights. ModelError if the model cannot run over a paged cache."""
