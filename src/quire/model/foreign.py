"""Models of families that Quire lacks, in the form that the engine expects. Their own library runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.devices.protocol import Backend, Graph
from quire.devices.registry import open_foreign_model
from quire.errors import ConfigError
from quire.model.cost import Cost
from quire.model.info import ModelInfo
from quire.model.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class LoadedForeign:
    """`ServedModel` of a foreign model."""

    graph: Graph
    weight_bytes: int
    cost: Cost

    def stage(self, layers: range | None = None, taps: Sequence[int] = ()) -> Graph:
        """Return the whole model. ConfigError: a part of it is asked for."""
        if layers is not None or taps:
            raise ConfigError("a model that runs through transformers shows no layers: leave out the drafter")
        return self.graph

    def wait(self) -> None:
        """Return at once: loading has checked everything."""


class ForeignFiles:
    """`ModelFiles` of a foreign model. ModelError if it cannot be served this way."""

    ranks = 1

    def __init__(self, directory: Path, dtype: str) -> None:
        self._model = model = open_foreign_model(directory, dtype)
        self.info = ModelInfo(
            directory=directory,
            spec=model,
            dtype=model.dtype,
            num_parameters=model.num_parameters,
            weight_bytes=model.weight_bytes,
            eos_token_ids=model.eos_token_ids,
            generation=model.generation,
            foreign=True,
        )

    def outline(self, backend: Backend, shard: Shard = WHOLE) -> LoadedForeign:
        return self._served(shard, self._model.outline)

    def load(self, backend: Backend, shard: Shard = WHOLE, verify: bool = True) -> LoadedForeign:
        return self._served(shard, self._model.load)

    def _served(self, shard: Shard, make: Callable[[], Graph]) -> LoadedForeign:
        if not shard.alone:
            raise ConfigError(
                "--tensor-parallel-size and --pipeline-parallel-size are for Quire's own families; this model runs "
                "through transformers"
            )
        # The library's code decides what a step computes: count all parameters, and no attention.
        model = self._model
        cost = Cost(dense_bytes=model.weight_bytes, dense_parameters=model.num_parameters)
        return LoadedForeign(make(), model.weight_bytes, cost)
