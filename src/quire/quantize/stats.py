"""InputStats: statistics of a weight's inputs over the calibration."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.weights.tensor import FloatArray

SAMPLED = 512  # rows kept, and at most this many of each sample divided by the samples


@dataclass(slots=True)
class InputStats:
    """Sums over all calibration rows [K]: of outer products [K, K] and magnitudes [K], and the largest magnitudes [K].

    Some rows are kept as they are. `hessian` is None if it was not asked for.
    """

    hessian: FloatArray | None
    mean: FloatArray
    most: FloatArray
    count: int = 0
    rows: list[FloatArray] = field(default_factory=list)

    @classmethod
    def of(cls, columns: int, outer: bool) -> InputStats:
        square = np.zeros((columns, columns), np.float32) if outer else None
        return cls(square, np.zeros(columns, np.float32), np.zeros(columns, np.float32))

    def add(self, x: FloatArray, keep: int) -> None:
        """Add rows x [S, K]; `keep` of them are kept."""
        if self.hessian is not None:
            self.hessian += x.T @ x
        magnitudes = np.abs(x)
        self.mean += magnitudes.sum(axis=0)
        self.most = np.maximum(self.most, magnitudes.max(axis=0))
        self.count += len(x)
        if keep:
            self.rows.append(x[:: max(1, len(x) // keep)][:keep].copy())

    def scaled(self, factors: FloatArray) -> InputStats:
        """Convert to inputs divided by factors [K]."""
        square = None if self.hessian is None else self.hessian / factors[:, None] / factors
        rows = [row / factors for row in self.rows]
        return InputStats(square, self.mean / factors, self.most / factors, self.count, rows)
