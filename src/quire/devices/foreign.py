"""Models that another library computes: what a backend knows of them, and what opens and runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.devices.protocol import Backend, FloatDtype, Graph
from quire.lazy import Lazy, missing, need

if TYPE_CHECKING:
    import quire.devices.torch.foreign as transformers
else:
    transformers = Lazy("quire.devices.torch.foreign")


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


def runs_foreign_models() -> bool:
    """Tell whether the libraries are installed that run models of families that Quire does not have."""
    return not missing("torch", "transformers")


def open_foreign_model(directory: Path, dtype: str) -> ForeignModel:
    """Return a model of a family that Quire does not have, run by its library's code.

    ModelError if that cannot be done, ConfigError if the library is not installed.
    """
    need("a model that runs through transformers", "torch", "transformers")
    return transformers.open_model(directory, dtype)


def make_foreign_backend(threads: int | None = None) -> Backend:
    """Return the backend that runs the graphs of foreign models, and nothing else."""
    return transformers.TransformersBackend(threads)
