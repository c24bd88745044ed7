"""AWQ (Lin et al. 2023, arXiv:2306.00978) and SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): inputs are divided by a
factor for each column, which the weights take over, so that what rounding harms least is rounded most."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.quantize.grid import Grid
from quire.quantize.stats import InputStats
from quire.weights.layouts import Int8
from quire.weights.tensor import FloatArray

STEPS = 20
MOST_ROWS = 1024  # of a weight that a search looks at
CLIPS = 10
ALPHAS = np.arange(2, 19) / 20

Round = Callable[[FloatArray], FloatArray]


def awq_factors(weights: Sequence[FloatArray], stats: InputStats, grid: Grid) -> FloatArray:
    """Factors [K] for weights [O, K] of one input: those after which the outputs err least; 1 if none is better."""
    assert stats.hessian is not None
    some = [weight[:: max(1, len(weight) // MOST_ROWS)] for weight in weights]
    x = np.maximum(stats.mean / max(stats.count, 1), 1e-8)
    w = np.concatenate([_relative(weight, grid.group) for weight in some]).mean(axis=0)
    best = np.ones(len(x), np.float32)
    least = sum(_error(weight, grid.round(weight).values(), stats.hessian) for weight in some)
    for step in range(1, STEPS):
        ratio = step / STEPS
        factors = _balanced(x**ratio / (w ** (1 - ratio) + 1e-4))
        error = sum(
            _error(weight, grid.round(weight * factors).values() / factors, stats.hessian) for weight in some
        )
        if error < least:
            least, best = error, factors
    return best


def _relative(weight: FloatArray, group: int) -> FloatArray:
    """Magnitudes relative to the largest of their group."""
    groups = np.abs(weight).reshape(len(weight), -1, group)
    relative: FloatArray = groups / np.maximum(groups.max(axis=2, keepdims=True), 1e-8)
    return relative.reshape(weight.shape)


def _balanced(factors: FloatArray) -> FloatArray:
    """With a geometric mean of least and largest of 1."""
    factors = np.maximum(factors, np.float32(1e-4))
    factors = factors / np.sqrt(factors.max() * factors.min())
    return np.where(np.isfinite(factors), factors, 1).astype(np.float32)


def _error(weight: FloatArray, rounded: FloatArray, hessian: FloatArray) -> float:
    wrong = rounded - weight
    return float(np.einsum("ok,ok->", wrong @ hessian, wrong))


def clipped(weight: FloatArray, stats: InputStats, grid: Grid) -> FloatArray:
    """The weight [O, K] with each group cut to the range that errs least in its share of the outputs."""
    assert stats.hessian is not None
    out = weight.copy()
    for start in range(0, weight.shape[1], grid.group):
        columns = slice(start, start + grid.group)
        values, hessian = weight[:, columns], stats.hessian[columns, columns]
        own = Grid(grid.bits, values.shape[1], grid.symmetric)
        most = np.abs(values).max(axis=1, keepdims=True)
        best, least = values, np.full(len(values), np.inf, np.float32)
        for step in range(CLIPS):
            bound = most * np.float32(1 - step / (2 * CLIPS))
            cut = np.clip(values, -bound, bound)
            wrong = own.round(cut).values() - values
            error = np.einsum("ok,ok->o", wrong @ hessian, wrong)
            best = np.where((error < least)[:, None], cut, best)
            least = np.minimum(error, least)
        out[:, columns] = best
    return out


def smooth_factors(weights: Sequence[FloatArray], stats: InputStats) -> FloatArray:
    """Factors [K] after which int8 activations times int8 weights err least on the rows kept; 1 if none is better."""
    x = np.concatenate(stats.rows)
    some = [weight[:: max(1, len(weight) // MOST_ROWS)] for weight in weights]
    wanted = [x @ weight.T for weight in some]
    most_x = np.maximum(stats.most, 1e-5)
    most_w = np.maximum(np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0), 1e-5)

    def error(factors: FloatArray) -> float:
        seen = _int8_rows(x / factors)
        return sum(
            float(np.square(seen @ _int8_rows(weight * factors).T - right).sum())
            for weight, right in zip(some, wanted, strict=True)
        )

    best = np.ones(len(most_x), np.float32)
    least = error(best)
    for alpha in ALPHAS:
        factors = _balanced(most_x**alpha / most_w ** (1 - alpha))
        found = error(factors)
        if found < least:
            least, best = found, factors
    return best


def _int8_rows(values: FloatArray) -> FloatArray:
    return Int8().quantize(np.ascontiguousarray(values, np.float32)).dequantize()
