"""Networks record what layers compute as it is called.

with net_guard(network):
    network.mark_output(model(network.add_input()))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.config import EngineConfig
from quire.errors import ConfigError
from tensorrt_llm.module import Module
from tensorrt_llm.plugin import PluginConfig


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """Values inside a network: the token ids, the result of a layer, or a sum of two values."""

    network: Network
    made_by: Module | None = None
    inputs: tuple[Tensor, ...] = ()

    def __add__(self, other: Tensor) -> Tensor:
        return self.network.record(None, self, other)

    def mark_output(self, name: str = "logits", dtype: Any = None) -> None:
        """Make this the network's result."""
        self.network.mark_output(self)


class Network:
    """Models as layers record them, or in their place a checkpoint (`model`).

    `eos_token_ids` are the tokens that end its texts. `architecture` is a name for logs.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.output: Tensor | None = None
        self.model: EngineConfig | None = None
        self.eos_token_ids: tuple[int, ...] = ()
        self.architecture = "Network"
        self.plugin_config = PluginConfig()
        self._recording = False

    def add_input(self, name: str = "input_ids", dtype: Any = None, shape: Any = None) -> Tensor:
        """Record the token ids."""
        return self.record(None)

    def record(self, made_by: Module | None, *inputs: Tensor) -> Tensor:
        """Record the result of a layer, or of a sum, for these inputs. ConfigError outside `net_guard`."""
        if not self._recording:
            raise ConfigError("layers are recorded inside `with net_guard(network):` alone; call them there")
        if other := [value for value in inputs if not isinstance(value, Tensor) or value.network is not self]:
            raise ConfigError(f"a layer takes values of its own network, got {type(other[0]).__name__}")
        tensor = Tensor(self, made_by, inputs)
        self.tensors.append(tensor)
        return tensor

    def set_named_parameters(self, named_parameters: Iterable[tuple[str, Any]]) -> None:
        """Do nothing: layers bring their weights."""

    def mark_output(self, tensor: Tensor) -> None:
        """Make a value the network's result: the logits."""
        if self.output is not None and self.output is not tensor:
            raise ConfigError("a network has one result, the logits: mark one value")
        self.output = tensor

    @property
    def empty(self) -> bool:
        return not self.tensors and self.model is None


@contextmanager
def net_guard(network: Network) -> Iterator[Network]:
    """Record what layers compute in the network, until the end of the `with` block."""
    if network._recording:
        raise ConfigError("the network is being recorded already: leave out the inner net_guard")
    network._recording = True
    try:
        yield network
    finally:
        network._recording = False


__all__ = ["Network", "Tensor", "net_guard"]
