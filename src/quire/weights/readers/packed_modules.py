"""ModuleCheckpoint: modules that a quantization packed into several tensors look like one weight again."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from quire.errors import ModelError
from quire.weights.checkpoint.protocol import Checkpoint, Unquantized
from quire.weights.layouts import AnyLayout
from quire.weights.readers.fields import FLOATS, Fields
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


# Find reads a module in a format; None if its weight is not quantized.
Find = Callable[[Fields], Packed | None]


class ModuleCheckpoint(Unquantized):
    """A `Checkpoint` around one with packed modules. Raises ModelError for modules that are not whole.

    `find` is asked about every module that has a tensor whose last name is `used`. These tensors, and tensors whose
    last name is `ignored`, are not the model's. A packed module X becomes the tensor X.weight. With `floats_beside` a
    module may have a float weight beside scales, which are then not used.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        find: Find,
        used: Sequence[str],
        ignored: Sequence[str] = (),
        floats_beside: bool = False,
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
        beside: list[str] = []  # float weights with scales
        self._suffixes: dict[str, frozenset[str]] = {}
        for module, found in suffixes.items():
            packed = find(Fields(checkpoint, module, frozenset(found)))
            if packed is not None:
                self._packed[f"{module}.weight"] = packed
                self._suffixes[f"{module}.weight"] = frozenset(found)
            elif found == {"weight"}:
                plain.append(f"{module}.weight")
            elif floats_beside and "weight" in found and checkpoint.dtype(f"{module}.weight") in FLOATS:
                plain.append(f"{module}.weight")
                beside.append(module)
            else:
                raise ModelError(
                    f"{checkpoint.path(f'{module}.{min(found)}')}: module {module} has the tensors "
                    f"{', '.join(sorted(found))}, which are no quantized weight of a known kind"
                )
        self._names = [*plain, *self._packed]
        if beside:
            logger.warning(
                "%d modules have scales beside float weights, which are taken: %s", len(beside), beside[0]
            )
        if not self._packed:
            logger.warning("the config speaks of quantization, and the checkpoint holds no quantized weight")

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._packed[name].shape if name in self._packed else self._inner.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return bfloat16 for packed weights: it holds their values unless float32 is asked for."""
        return BFLOAT16 if name in self._packed else self._inner.dtype(name)

    def path(self, name: str) -> Path:
        if name not in self._packed:
            return self._inner.path(name)
        return self._inner.path(f"{name.removesuffix('.weight')}.{min(self._suffixes[name])}")

    def get(self, name: str) -> Array:
        return self._packed[name].decode() if name in self._packed else self._inner.get(name)

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is a weight made of packed tensors."""
        return name in self._packed

    def suffixes(self, name: str) -> frozenset[str]:
        """List the last names of the tensors that a packed weight is made of."""
        return self._suffixes[name]

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
    """Read a setting of a quantization section. Raises ModelError for a wrong type."""
    value = settings.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise ModelError(f"{where}: {name} must be of type {kind.__name__}, got {value!r:.80}")
    return value
