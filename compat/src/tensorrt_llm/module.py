"""Modules: layers, and models made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from quire.errors import ConfigError
from tensorrt_llm.parameter import Parameter


class Module:
    """Module of a model: layers, and a `forward` that calls them. Its attributes hold its weights and modules."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"{type(self).__name__} has no forward: write what it computes")

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield the weights by the path of attributes that leads to them, such as `layers.0.mlp.fc.weight`."""
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


__all__ = ["Module", "ModuleList"]
