"""Models of families that Quire lacks, in the form that the engine expects. Their own library runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.devices.foreign import open_foreign_model
from quire.devices.protocol import Backend, Graph, KVDtype, KVSpec
from quire.errors import ConfigError
from quire.model.cost import Cost
from quire.model.info import ModelInfo
from quire.model.loaded import LoadedModel
from quire.model.shard import WHOLE, Shard
from quire.progress import Told, untold


class ForeignShape(msgspec.Struct, frozen=True):
    """`ModelShape` of a foreign model. It runs whole: no rank sends another one anything."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    bidirectional: bool = False
    segments: int = 0
    has_head: bool = True
    windows: tuple[int, ...] = ()

    @property
    def stream_width(self) -> int:
        return self.hidden_size

    def kv_spec(self, dtype: KVDtype, shard: Shard = WHOLE) -> KVSpec:
        """ConfigError if its cache cannot have that type."""
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(
                f"--kv-cache-dtype {dtype} is for Quire's own families; this model runs through transformers"
            )
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, dtype)

    def division(self, shard: Shard) -> Shard:
        return shard

    def stage(self, shard: Shard) -> range:
        return range(self.num_layers)

    def messages(self, shard: Shard) -> list[int]:
        return []

    def sent_bytes(self, shard: Shard) -> int:
        return 0

    def passed_bytes(self, shard: Shard) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class LoadedForeign:
    """`ServedModel` of a foreign model."""

    graph: Graph
    weight_bytes: int
    cost: Cost
    shard: Shard = WHOLE

    def own(self, feature: str) -> LoadedModel:
        """ConfigError: it is of none of Quire's own families."""
        raise ConfigError(f"{feature} is for Quire's own families; this model runs through transformers")

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
            spec=msgspec.convert(model, ForeignShape, from_attributes=True),
            dtype=model.dtype,
            num_parameters=model.num_parameters,
            weight_bytes=model.weight_bytes,
            eos_token_ids=model.eos_token_ids,
            generation=model.generation,
            foreign=True,
        )

    def outline(self, backend: Backend, shard: Shard = WHOLE) -> LoadedForeign:
        return self._served(shard, self._model.outline)

    def load(self, backend: Backend, shard: Shard = WHOLE, told: Told = untold) -> LoadedForeign:
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
