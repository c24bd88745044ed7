"""Values in host memory, for backends that compute there and for code that reads results back.

Shape letters: L rows, V vocabulary, W = ceil(V / 32) words of a token mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.devices.protocol import FloatArray, IntArray
from quire.devices.sampling import NOT_DRAWN, Logits, TokenMask
from quire.errors import EngineError

Float64Array = NDArray[np.float64]


class HostLogits(msgspec.Struct):
    """`Logits` in host memory: float32 [L, V], often a view of the executable's buffer.

    `best` [L] has the lowest id among each row's largest logits, or -1 if it is not known; None: none is known.
    """

    values: FloatArray
    best: IntArray | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice | Sequence[int]) -> HostLogits:
        return HostLogits(self.values[rows], None if self.best is None else self.best[rows])

    def replaced(self, rows: Sequence[int], values: FloatArray) -> HostLogits:
        best = self.best
        if best is not None:
            best = best.copy()
            best[list(rows)] = NOT_DRAWN
        self.values[list(rows)] = values
        return HostLogits(self.values, best)

    def largest(self, width: int) -> IntArray:
        if self.best is not None and (self.best >= 0).all():
            return self.best
        ids: IntArray = self.values[:, :width].argmax(1)
        return ids

    def widened(self, columns: IntArray, ids: IntArray, width: int) -> HostLogits:
        wide = np.full((len(self.values), width), -np.inf, np.float32)
        wide[:, ids] = self.values[:, columns]
        return HostLogits(wide)

    def numpy(self) -> FloatArray:
        return self.values


def on_host(logits: Logits) -> HostLogits:
    """Check that logits are in host memory. EngineError if they are another backend's."""
    if not isinstance(logits, HostLogits):
        raise EngineError(f"a sampler on the host got logits of {type(logits).__name__}")
    return logits


def host_logits(logits: Logits, vocab_size: int) -> HostLogits:
    """Check `logits` for a sampler on the host. EngineError if another backend's, or of another shape."""
    logits = on_host(logits)
    values = logits.values
    if values.dtype != np.float32 or values.ndim != 2 or values.shape[1] != vocab_size:
        raise EngineError(
            f"logits must be float32 [rows, {vocab_size}], got {values.dtype} {list(values.shape)}"
        )
    if values.size and values.strides[1] != values.itemsize and vocab_size > 1:
        raise EngineError("the logits of a row must be contiguous")
    if logits.best is not None:
        _check_count("best", len(logits.best), len(values))
    return logits


def check_rows(
    rows: int,
    vocab_size: int,
    slots: list[int],
    positions: list[int],
    drafts: list[int] | None,
    masks_LW: TokenMask | None,
) -> list[int]:
    """Raise EngineError if the shapes disagree. Returns the drafts, or NOT_DRAWN for each row if there are none."""
    for name, values in (("slots", slots), ("positions", positions), ("drafts", drafts)):
        if values is not None:
            _check_count(name, len(values), rows)
    words = (vocab_size + 31) // 32
    if masks_LW is not None and masks_LW.shape != (rows, words):
        raise EngineError(f"token masks must be [{rows}, {words}], got {list(masks_LW.shape)}")
    starts = [slot for slot, _ in groupby(slots)]
    if len(set(starts)) != len(starts):
        raise EngineError("rows of one slot must be adjacent")
    if drafts is not None:
        return drafts
    if len(starts) != rows:
        raise EngineError("several rows of one slot need drafts")
    return [NOT_DRAWN] * rows


def _check_count(name: str, count: int, rows: int) -> None:
    if count != rows:
        raise EngineError(f"{name} must have one entry for each of {rows} rows, got {count}")


def check_targets(logits: HostLogits, targets_L: IntArray) -> None:
    """Raise EngineError unless there is one target per row, within the vocabulary."""
    rows, vocab_size = logits.values.shape
    if targets_L.shape != (rows,):
        raise EngineError(f"targets must have one entry for each of {rows} rows")
    if targets_L.size and not 0 <= int(targets_L.min()) <= int(targets_L.max()) < vocab_size:
        raise EngineError(f"targets must be token ids below {vocab_size}")
