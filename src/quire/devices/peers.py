"""The connection between ranks that compute one model together. Knows arrays; knows no model."""

from __future__ import annotations

import socket
from collections.abc import Mapping
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


class Exchange(Protocol):
    """A way in which ranks pass arrays to each other. `Peers` made of it add and gather, in the order of ranks."""

    def connect(self, links: Mapping[int, socket.socket], seconds: float) -> None:
        """Use these connections to the other ranks from now on, or agree over them on others."""

    def exchange(self, parts: FloatArray) -> None:
        """`parts` [size, n]: send this rank's row to all others, and fill in theirs.

        RuntimeError: a rank is gone or does not answer.
        """

    def close(self) -> None:
        """Close the connections."""

    def abort(self, rank: int) -> None:
        """End all waiting with a RuntimeError, because `rank` has gone."""
