"""Models of families that Quire lacks, in the form that the engine expects. Their own library runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.devices.protocol import ForeignModel, Graph
from quire.devices.registry import open_foreign_model
from quire.model.cost import Cost
from quire.model.load import ModelInfo


@dataclass(frozen=True, slots=True)
class LoadedForeign:
    """`ServedModel` of a foreign model."""

    graph: Graph
    weight_bytes: int
    cost: Cost

    def wait(self) -> None:
        """Returns at once: loading has checked everything."""


def inspect_foreign(directory: Path, dtype: str) -> tuple[ModelInfo, ForeignModel]:
    """Config and shapes, without the weights. ModelError if the model cannot be served this way."""
    model = open_foreign_model(directory, dtype)
    info = ModelInfo(
        directory=directory,
        spec=model,
        dtype=model.dtype,
        num_parameters=model.num_parameters,
        weight_bytes=model.weight_bytes,
        eos_token_ids=model.eos_token_ids,
        generation=model.generation,
        foreign=True,
    )
    return info, model


def load_foreign(model: ForeignModel, outline: bool = False) -> LoadedForeign:
    """With `outline`, without weights, for planning."""
    # The library's code decides what a step computes: count all parameters, and no attention.
    cost = Cost(dense_bytes=model.weight_bytes, dense_parameters=model.num_parameters)
    return LoadedForeign(model.outline() if outline else model.load(), model.weight_bytes, cost)
