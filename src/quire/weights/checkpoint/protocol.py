"""What every checkpoint format offers: names, shapes and mapped arrays. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Checkpoint(Protocol):
    """Named tensors on disk. Opening reads headers only; every method but `get` costs nothing."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype[Any]: ...

    def path(self, name: str) -> Path:
        """The file that holds the tensor."""

    def groups(self, name: str, outline: bool) -> Array | None:
        """A matrix [O, K] that is kept in groups of int4, as they are: [O, K / 32] of GROUPS_OF_INT4. Else None.

        With `outline` the values are zero and take no memory.
        """

    def get(self, name: str) -> Array:
        """The tensor, C-contiguous and aligned: a read-only view of the file where it is so on disk."""
