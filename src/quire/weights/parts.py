"""Parts of checkpoint tensors: which tensor, its shape there, and what of it a weight takes. Knows no family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from quire.devices.protocol import Array
from quire.weights.checkpoint import Checkpoint

Take = Callable[..., Array]

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
BYTES = (np.dtype(np.uint8),)


@dataclass(frozen=True, slots=True)
class Part:
    """A weight as the backend wants it, out of one tensor or several that make it together.

    `tensors` are (name, shape in the checkpoint); `take` gets the arrays and returns [O, K] or [O]. `per_element` is
    how many parameters an element of each tensor stands for; `shape` is that of the result where taking it computes.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    take: Take | None = None
    dtypes: tuple[np.dtype[Any], ...] = FLOATS
    per_element: tuple[int, ...] = (1,)
    shape: tuple[int, ...] | None = None

    def read(self, checkpoint: Checkpoint) -> Array:
        return self._taken([checkpoint.get(name) for name, _ in self.tensors])

    def groups(self, checkpoint: Checkpoint, outline: bool) -> Array | None:
        """The part in groups of int4 where the checkpoint keeps it so and taking it leaves the groups whole."""
        if len(self.tensors) != 1 or self.shape is not None or self.per_element != (1,):
            return None
        name, _ = self.tensors[0]
        found = checkpoint.groups(name, outline)
        if found is None:
            return None
        found = self._taken([found])
        rows, columns = self.outline().shape
        return found if found.shape == (rows, columns // 32) else None

    def outline(self) -> Array:
        """An array of the result's shape that takes no memory."""
        if self.shape is not None:
            return np.broadcast_to(np.float32(0), self.shape)
        return self._taken([np.broadcast_to(np.float32(0), shape) for _, shape in self.tensors])

    def _taken(self, arrays: list[Array]) -> Array:
        return arrays[0] if self.take is None else self.take(*arrays)


def part(name: str, shape: tuple[int, ...], take: Take | None = None) -> Part:
    return Part(((name, shape),), take)


def chain(*takes: Take | None) -> Take | None:
    """One after the other, from left to right."""
    given = [take for take in takes if take is not None]
    if len(given) < 2:
        return given[0] if given else None

    def all_of(array: Array) -> Array:
        for take in given:
            array = take(array)
        return array

    return all_of


def transposed(array: Array) -> Array:
    return array.T


def rows(start: int, stop: int) -> Take:
    return lambda array: array[start:stop]


def rows_of_groups(groups: int, start: int, stop: int) -> Take:
    """Of `groups` equal groups of rows, rows start..stop-1 of each."""

    def take(array: Array) -> Array:
        grouped = array.reshape(groups, -1, *array.shape[1:])[:, start:stop]
        return grouped.reshape(-1, *array.shape[1:])

    return take


def halves(head_dim: int, rotary_dim: int) -> Take:
    """Rows of heads whose rotary pairs are neighbours (2 i, 2 i + 1), reordered to pairs (i, i + rotary_dim / 2).

    Scores do not change where queries and keys are reordered alike.
    """

    def take(array: Array) -> Array:
        rest = array.shape[1:]
        heads = array.reshape(-1, head_dim, *rest)
        pairs = heads[:, :rotary_dim].reshape(-1, rotary_dim // 2, 2, *rest).swapaxes(1, 2)
        turned = pairs.reshape(-1, rotary_dim, *rest)
        if rotary_dim < head_dim:
            turned = np.concatenate([turned, heads[:, rotary_dim:]], axis=1)
        return turned.reshape(-1, *rest)

    return take


FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@cache
def _pairs_by_scale() -> Array:
    """What a byte of MXFP4 means under a scale, at scale * 256 + byte: two bfloat16 in a uint32."""
    values = FP4_VALUES[np.arange(256)[:, None] >> np.array([0, 4]) & 15]
    with np.errstate(over="ignore"):  # the greatest scales make infinities
        scaled = np.ldexp(values, np.arange(256)[:, None, None] - 127).astype(ml_dtypes.bfloat16)
    return np.asarray(scaled.view(np.uint32).reshape(-1))


def read_mxfp4(blocks: Array, scales: Array) -> Array:
    """Blocks [O, K / 32, 16] of two FP4 a byte (low half first), scales [O, K / 32] -> bfloat16 [O, K], exact.

    OCP Microscaling Formats 1.0: E2M1 elements, one E8M0 scale (2^(s - 127)) for 32 of them.
    """
    pairs = _pairs_by_scale()[scales[..., None].astype(np.uint16) << 8 | blocks]
    return np.asarray(pairs.view(ml_dtypes.bfloat16).reshape(len(blocks), -1))
