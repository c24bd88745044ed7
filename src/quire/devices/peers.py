"""The connection between ranks that compute one model together. Knows arrays; knows no model."""

from __future__ import annotations

from typing import Protocol

from quire.weights.tensor import FloatArray


class Peers(Protocol):
    """This rank's connection to the others, which compute the same graph, each with its share of the weights."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: FloatArray) -> None:
        """Add the x [n] of all ranks, in place and in the order of ranks. RuntimeError: a rank does not answer."""

    def abort(self, rank: int) -> None:
        """End all waiting with a RuntimeError, because `rank` has gone."""
