"""Pools the hidden states of a text into one vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.model.pooling_head import PoolingHead
from quire.runtime.inputs import StepLayout
from quire.runtime.rows import StepRows
from quire.runtime.slots.protocol import Collect
from quire.types import NewSeq, Pooling, StepOutput


@dataclass(slots=True)
class Pool:
    """Sum of the hidden states [D] so far, added row by row in float64, so that chunks do not change it.

    Of kind "all": the vectors of the tokens so far, one after another.
    """

    kind: Pooling
    activate: bool = True
    head: PoolingHead | None = None
    count: int = 0
    total_D: NDArray[np.float64] | float = 0.0
    vectors: list[float] = field(default_factory=list)

    def add(self, row_D: NDArray[np.float64]) -> None:
        self.total_D = self.total_D + row_D
        self.count += 1

    def mean(self) -> NDArray[np.float64]:
        return np.asarray(self.total_D) / self.count


def unit_vector(x_D: NDArray[np.float64]) -> list[float]:
    """Scale x to length 1."""
    vector: list[float] = (x_D / max(float(np.sqrt((x_D * x_D).sum())), 1e-12)).tolist()
    return vector


@dataclass(slots=True, frozen=True)
class PooledRows:
    """A slot's rows in a step: their number, and whether the prompt ends with them."""

    slot: int
    count: int
    ends: bool


class PoolingPart:
    """Makes one vector of each request with `pooling`: the mean, last or first hidden state, then the model's head;
    or one of each token.

    Without a head the vector is scaled to length 1. `of_adapters` has the heads of adapters that bring one, by digest.
    """

    def __init__(self, head: PoolingHead | None, of_adapters: Mapping[str, PoolingHead]) -> None:
        self._head, self._of_adapters = head, of_adapters
        self._pools: dict[int, Pool] = {}
        self._parts: list[PooledRows] = []

    def set(self, new: NewSeq) -> None:
        request = new.request
        if request.pooling is not None:
            head = (
                self._head if request.adapter is None else self._of_adapters.get(request.adapter, self._head)
            )
            self._pools[new.slot] = Pool(request.pooling, request.activate, head)

    def clear(self, slot: int) -> None:
        self._pools.pop(slot, None)

    @property
    def active(self) -> bool:
        return bool(self._pools)

    @property
    def greedy(self) -> bool:
        return True  # it reads no logits

    def rows(self, step: StepLayout) -> list[int]:
        self._parts = []
        rows: list[int] = []
        for i, seq in enumerate(step.seqs):
            pool = self._pools.get(seq.slot)
            if pool is None:
                continue
            begin, stop = step.cu_q[i], step.cu_q[i + 1]
            if pool.kind == "cls":
                stop = begin + int(seq.start == 0)
            elif pool.kind == "last":
                begin = stop - int(seq.wants_logits)
            rows += range(begin, stop)
            self._parts.append(PooledRows(seq.slot, stop - begin, seq.wants_logits))
        return rows

    def launch(self, rows: StepRows, first: int) -> Collect | None:
        found: dict[int, list[float]] = {}
        for part in self._parts:
            pool = self._pools[part.slot]
            for row_D in rows.hidden(first, first + part.count).astype(np.float64):
                self._add(pool, row_D)
            first += part.count
            if part.ends:
                every = pool.kind == "all"
                found[part.slot] = pool.vectors if every else self._vector(pool, pool.mean())
        return partial(_add, found) if found else None

    def _add(self, pool: Pool, row_D: NDArray[np.float64]) -> None:
        own = row_D if pool.head is None else pool.head.each(row_D)
        if pool.kind == "all":
            pool.vectors += self._vector(pool, own)
        else:
            pool.add(own)

    def _vector(self, pool: Pool, x_D: NDArray[np.float64]) -> list[float]:
        if pool.head is not None:
            return pool.head(x_D, pool.activate)
        if pool.activate:
            return unit_vector(x_D)
        vector: list[float] = x_D.tolist()
        return vector


def _add(found: dict[int, list[float]], output: StepOutput) -> None:
    output.embeddings |= found
