"""Networks written in Python: what layers compute, recorded as it is called. Knows no layer and no weight format.

with net_guard(network):
    network.mark_output(model(network.add_input()))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.weights.tensor import Array

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class Parameter:
    """A weight of a layer. Set `value` to an array of its shape in float32, float16 or bfloat16 before the build."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self._value: Array | None = None

    @property
    def value(self) -> Array | None:
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        array = np.asarray(value)
        if array.dtype not in FLOATS:
            raise ConfigError(
                f"a weight must be float32, float16 or bfloat16 (ml_dtypes.bfloat16), got {array.dtype}"
            )
        if array.shape != self.shape:
            raise ConfigError(f"a weight of shape {list(self.shape)} cannot hold {list(array.shape)}")
        self._value = array


class Module:
    """A part of a model: layers, and a `forward` that calls them. Its attributes hold its weights and modules."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"{type(self).__name__} has no forward: write what it computes")

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """The weights by the path of attributes that leads to them, such as `layers.0.mlp.fc.weight`."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value
            elif isinstance(value, Module):
                yield from value.named_parameters(f"{prefix}{name}.")


class ModuleList(Module):
    """Modules in order, whose paths are their numbers."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self.modules = list(modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    def __getitem__(self, index: int) -> Module:
        return self.modules[index]

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        for index, module in enumerate(self.modules):
            yield from module.named_parameters(f"{prefix}{index}.")


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A value inside a network: the token ids, the result of a layer, or a sum of two values."""

    network: Network
    made_by: Module | None = None
    inputs: tuple[Tensor, ...] = ()

    def __add__(self, other: Tensor) -> Tensor:
        return self.network.record(None, self, other)

    def mark_output(self, name: str = "logits", dtype: Any = None) -> None:
        """Make this the network's result."""
        self.network.mark_output(self)


class Network:
    """A model as layers record it, or in their place a checkpoint (`model`).

    `eos_token_ids` are the tokens that end its texts. `architecture` is a name for logs.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.output: Tensor | None = None
        self.model: EngineConfig | None = None
        self.eos_token_ids: tuple[int, ...] = ()
        self.architecture = "Network"
        self._recording = False

    def add_input(self, name: str = "input_ids", dtype: Any = None, shape: Any = None) -> Tensor:
        """The token ids."""
        return self.record(None)

    def record(self, made_by: Module | None, *inputs: Tensor) -> Tensor:
        """The result of a layer, or of a sum, for these inputs. ConfigError outside `net_guard`."""
        if not self._recording:
            raise ConfigError("layers are recorded inside `with net_guard(network):` alone; call them there")
        if other := [value for value in inputs if not isinstance(value, Tensor) or value.network is not self]:
            raise ConfigError(f"a layer takes values of its own network, got {type(other[0]).__name__}")
        tensor = Tensor(self, made_by, inputs)
        self.tensors.append(tensor)
        return tensor

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
