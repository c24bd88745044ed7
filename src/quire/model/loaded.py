"""A model whose weights are packed for a backend. Knows no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.devices.protocol import Graph
from quire.model.cost import Cost, cost_of, weight_bytes
from quire.model.families.names import TensorNames
from quire.model.info import ModelInfo
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.shard import WHOLE, Shard
from quire.weights.checkpoint import Checkpoint
from quire.weights.tensor import FloatDtype


class ServedModel(Protocol):
    """A model ready to compile on its backend."""

    @property
    def graph(self) -> Graph: ...
    @property
    def weight_bytes(self) -> int:
        """Memory that its weights take."""

    @property
    def cost(self) -> Cost: ...
    @property
    def shard(self) -> Shard: ...
    def own(self, feature: str) -> LoadedModel:
        """The model, if it is of Quire's own families. ConfigError if not: `feature` is for those alone."""

    def stage(self, layers: range | None = None, taps: Sequence[int] = ()) -> Graph:
        """The run of `layers` that a pipeline rank computes, or all of its share, with `taps` tapped (see Graph)."""

    def wait(self) -> None:
        """Wait until its files are read and verified. ModelError if they are damaged."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of Quire's own families: packed weights, and the graph that uses them.

    `names` names its tensors, if known; `open` opens the checkpoint again. `family` gives the names by which adapters
    know the tensors, if these differ.
    """

    info: ModelInfo
    decoder: Decoder
    check: Callable[[], None] | None = None
    shard: Shard = WHOLE
    names: TensorNames | None = None
    open: Callable[[], Checkpoint] | None = None
    family: Callable[[], TensorNames] | None = None

    def own(self, feature: str) -> LoadedModel:
        return self

    @property
    def dtype(self) -> FloatDtype:
        return self.info.dtype

    @property
    def spec(self) -> DecoderConfig:
        return self.decoder.config

    @property
    def graph(self) -> Graph:
        return self.decoder.graph()

    def stage(self, layers: range | None = None, taps: Sequence[int] = ()) -> Graph:
        return self.decoder.graph(layers, taps)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices, counting a tied head once."""
        return weight_bytes(self.decoder.weights)

    @property
    def cost(self) -> Cost:
        return cost_of(self.decoder)

    def wait(self) -> None:
        if self.check is not None:
            self.check()
