"""A checkpoint of modules that a quantization packed into several tensors: each looks like its weight again."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from quire.errors import ModelError
from quire.weights.checkpoint.protocol import Checkpoint
from quire.weights.layouts import AnyLayout
from quire.weights.readers.fields import Fields
from quire.weights.tensor import Array, FloatArray, QuantTensor, Rows

logger = logging.getLogger(__name__)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [O, K] made of several tensors.

    `decode` gives its values. `codes` gives it as a quantized tensor of `layout`; both are None if no layout holds it.
    """

    shape: tuple[int, int]
    decode: Callable[[], FloatArray]
    layout: AnyLayout | None = None
    codes: Callable[[], QuantTensor] | None = None


# What a format finds in a module; None if its weight is not quantized.
Find = Callable[[Fields], Packed | None]


class ModuleCheckpoint:
    """A `Checkpoint` around one with packed modules. Raises ModelError for modules that are not whole.

    `find` is asked about every module that has a tensor whose last name is `used`. These tensors, and those whose last
    name is `ignored`, are not the model's. A packed module X becomes the tensor X.weight.
    """

    def __init__(
        self, checkpoint: Checkpoint, find: Find, used: Sequence[str], ignored: Sequence[str] = ()
    ) -> None:
        self._inner = checkpoint
        suffixes: dict[str, set[str]] = defaultdict(set)
        plain = []
        for name in checkpoint.names():
            suffix = next((s for s in used if name.endswith(f".{s}")), None)
            if suffix is not None:
                suffixes[name.removesuffix(f".{suffix}")].add(suffix)
            elif not any(name.endswith(f".{s}") for s in ignored):
                plain.append(name)
        self._packed: dict[str, Packed] = {}
        self._first: dict[str, str] = {}
        for module, found in suffixes.items():
            packed = find(Fields(checkpoint, module, frozenset(found)))
            if packed is not None:
                self._packed[f"{module}.weight"] = packed
                self._first[f"{module}.weight"] = f"{module}.{min(found)}"
            elif found == {"weight"}:
                plain.append(f"{module}.weight")
            else:
                raise ModelError(
                    f"{checkpoint.path(f'{module}.{min(found)}')}: module {module} has the tensors "
                    f"{', '.join(sorted(found))}, which are no quantized weight of a known kind"
                )
        self._names = [*plain, *self._packed]
        if not self._packed:
            logger.warning("the config speaks of quantization, and the checkpoint holds no quantized weight")

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._packed[name].shape if name in self._packed else self._inner.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """bfloat16 of packed weights: it is the type to hold their values in unless float32 is asked for."""
        return BFLOAT16 if name in self._packed else self._inner.dtype(name)

    def path(self, name: str) -> Path:
        return self._inner.path(self._first.get(name, name))

    def get(self, name: str) -> Array:
        return self._packed[name].decode() if name in self._packed else self._inner.get(name)

    @property
    def activations(self) -> Literal["float", "int8"]:
        return "float"

    def layout(self, name: str) -> AnyLayout | None:
        return self._packed[name].layout if name in self._packed else None

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        codes = self._packed[name].codes
        if codes is None:
            raise KeyError(name)
        tensor = codes()
        whole = len(rows) == tensor.shape[0] and bool((rows == np.arange(len(rows))).all())
        return tensor if whole else tensor.rows(rows)


def setting(settings: Mapping[str, Any], where: str, name: str, kind: type, default: Any = None) -> Any:
    """A setting of a quantization section. Raises ModelError where its type is another."""
    value = settings.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise ModelError(f"{where}: {name} must be of type {kind.__name__}, got {value!r:.80}")
    return value
