"""A model whose weights are packed for a backend. Knows no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.devices.protocol import Graph
from quire.model.cost import Cost, cost_of, matrices
from quire.model.decoder import Decoder
from quire.model.families.names import TensorNames
from quire.model.info import ModelInfo
from quire.model.shard import WHOLE, Shard
from quire.model.spec import ArchSpec
from quire.model.weights import DecoderWeights
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
    def stage(self, layers: range | None = None, taps: Sequence[int] = ()) -> Graph:
        """The run of `layers` that a pipeline rank computes, or all of its share, with `taps` tapped (see Graph)."""

    def wait(self) -> None:
        """Wait until its files are read and verified. ModelError if they are damaged."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of Quire's own families: packed weights, and the graph that uses them.

    `names` are those of its tensors, if they are known; `open` opens the checkpoint again.
    """

    info: ModelInfo
    spec: ArchSpec
    weights: DecoderWeights
    check: Callable[[], None] | None = None
    shard: Shard = WHOLE
    names: TensorNames | None = None
    open: Callable[[], Checkpoint] | None = None

    @property
    def dtype(self) -> FloatDtype:
        return self.info.dtype

    @property
    def decoder(self) -> Decoder:
        return Decoder(self.spec, self.weights, self.shard)

    @property
    def graph(self) -> Graph:
        return self.decoder.graph()

    def stage(self, layers: range | None = None, taps: Sequence[int] = ()) -> Graph:
        return self.decoder.graph(layers, taps)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices, counting a tied head once."""
        return sum(matrix.nbytes for matrix in matrices(self.weights).values())

    @property
    def cost(self) -> Cost:
        return cost_of(self.spec, self.weights, self.shard)

    def wait(self) -> None:
        if self.check is not None:
            self.check()
