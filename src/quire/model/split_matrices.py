"""Splits a checkpoint so that each matrix of a layer is a tensor [O, K] of its own, as quantized formats have it.

Stacked experts and a fused shared expert are split, and matrices with outputs as columns are transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.model.families.names import TensorNames
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.mixture import MixtureConfig
from quire.weights.activations import KeptActivations, Rounding
from quire.weights.checkpoint import Checkpoint
from quire.weights.layouts import AnyLayout
from quire.weights.parts import Take
from quire.weights.tensor import Array, QuantTensor, Rows

LINEAR = (
    *(f"attention.{name}" for name in ("q", "k", "v", "qkv", "out")),
    *(f"mlp.{name}" for name in ("gate", "up", "gate_up", "down")),
)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor that is a part of another one."""

    source: str
    take: Take
    shape: tuple[int, ...]


class ApartCheckpoint:
    """A `Checkpoint` around another one. `pieces` take the place of the tensors that they are parts of."""

    def __init__(self, inner: Checkpoint, pieces: dict[str, TensorPart]) -> None:
        self._inner, self._pieces = inner, pieces
        used = {piece.source for piece in pieces.values()}
        self._names = [*(name for name in inner.names() if name not in used), *pieces]

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._pieces[name].shape if name in self._pieces else self._inner.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._inner.dtype(self._source(name))

    def path(self, name: str) -> Path:
        return self._inner.path(self._source(name))

    def get(self, name: str) -> Array:
        return self.piece(name, self._inner.get)

    def piece(self, name: str, read: Callable[[str], Array]) -> Array:
        """Read one tensor out of the stacked tensor that holds it; `read` reads that one."""
        if name not in self._pieces:
            return read(name)
        return np.ascontiguousarray(self._pieces[name].take(read(self._pieces[name].source)))

    @property
    def activations(self) -> KeptActivations:
        return self._inner.activations

    def layout(self, name: str) -> AnyLayout | None:
        return None if name in self._pieces else self._inner.layout(name)

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        return self._inner.quantized(name, rows)

    def rounding(self, name: str) -> Rounding | None:
        return None if name in self._pieces else self._inner.rounding(name)

    def _source(self, name: str) -> str:
        return self._pieces[name].source if name in self._pieces else name


def taken_apart(
    spec: DecoderConfig,
    names: TensorNames,
    checkpoint: Checkpoint,
    turns: Callable[[str], bool] = lambda name: True,
) -> tuple[ApartCheckpoint, TensorNames]:
    """Split the checkpoint, and adapt its names. `turns` tells which matrices of a transposed family are transposed."""
    pieces: dict[str, TensorPart] = {}
    present = set(checkpoint.names())
    for i, config in enumerate(spec.layers):
        own = names.of_sublayer(i % names.sublayers)
        layer = own.layer.format(i=i // names.sublayers)
        if config.mixture is not None and own.expert_stack:
            pieces |= _experts(config.mixture, own, layer)
        if names.transposed:
            modules = {f"{layer}{module}.weight" for path in LINEAR if (module := own[path])}
            for name in sorted(modules & present):
                if turns(name):
                    pieces[name] = TensorPart(name, lambda array: array.T, checkpoint.shape(name)[::-1])
    apart = ApartCheckpoint(checkpoint, pieces)
    plain = names.changed({"transposed": False})
    return apart, plain.fitted(apart.names())


def _experts(mixture: MixtureConfig, names: TensorNames, layer: str) -> dict[str, TensorPart]:
    """Find each expert's gate, up and down projection with biases, and the shared expert's if it is fused."""
    pieces: dict[str, TensorPart] = {}
    count = mixture.routing.num_experts - mixture.zero_experts
    inner, d = mixture.intermediate_size, mixture.hidden_size
    whole = layer + names["mixture.experts"]
    for e in range(count):
        prefix = f"{whole}{e}."
        for module, name, rows, out, width in _matrices(names, inner, d):
            pieces[f"{prefix}{module}.weight"] = TensorPart(
                whole + name, _of_expert(names.expert_stack == "columns", e, rows), (out, width)
            )
        if mixture.bias:
            for module, name, rows, out in (
                ("gate_proj", names["mixture.expert.up"], slice(0, None, 2), inner),
                ("up_proj", names["mixture.expert.up"], slice(1, None, 2), inner),
                ("down_proj", names["mixture.expert.down"], slice(None), d),
            ):
                pieces[f"{prefix}{module}.bias"] = TensorPart(
                    f"{whole}{name}_bias", _of_expert(False, e, rows), (out,)
                )
    if mixture.routing.shared and names["mixture.shared.gate_up"]:
        size, prefix = mixture.shared_intermediate_size, layer + names["mixture.shared"]
        fused = f"{prefix}{names['mixture.shared.gate_up']}.weight"
        for module, rows in (("gate_proj", slice(0, size)), ("up_proj", slice(size, 2 * size))):
            pieces[f"{prefix}{module}.weight"] = TensorPart(fused, _rows(rows), (size, d))
        down = f"{prefix}{names['mixture.shared.down']}.weight"
        pieces[f"{prefix}down_proj.weight"] = TensorPart(down, _rows(slice(None)), (d, size))
    return pieces


def _matrices(names: TensorNames, inner: int, d: int) -> Iterator[tuple[str, str, slice, int, int]]:
    """Yield (module, tensor of all experts, rows of it, rows and columns of the module)."""
    apart, up = names["mixture.expert.gate_apart"], names["mixture.expert.up"]
    if apart:
        first, second = slice(None), slice(None)
    elif names.expert_halves:
        first, second = slice(0, inner), slice(inner, 2 * inner)
    else:
        first, second = slice(0, None, 2), slice(1, None, 2)
    yield "gate_proj", apart or up, first, inner, d
    yield "up_proj", up, second, inner, d
    yield "down_proj", names["mixture.expert.down"], slice(None), d, inner


def _rows(rows: slice) -> Take:
    return lambda array: array[rows]


def _of_expert(columns: bool, expert: int, rows: slice) -> Take:
    """Take rows of an expert's matrix, whose outputs may be columns of the stack."""
    return lambda array: (array[expert].T if columns else array[expert])[rows]
