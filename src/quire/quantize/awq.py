"""AWQ (Lin et al. 2023, arXiv:2306.00978) and SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): divide inputs by a
factor for each column, which the weights take over, so that important columns lose least by rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.quantize.grid import Grid, Rounded
from quire.quantize.stats import InputStats
from quire.weights.layouts import Int8
from quire.weights.tensor import Array, FloatArray

STEPS = 20
MOST_ROWS = 1024  # of a weight that a search looks at
CUTS = np.arange(1, 20, dtype=np.float32) * np.float32(0.025)  # of the ends of a range
ALPHAS = np.arange(2, 19) / 20

Round = Callable[[FloatArray], FloatArray]


def awq_factors(weights: Sequence[FloatArray], stats: InputStats, grid: Grid) -> FloatArray:
    """Search the factors [K], for weights [O, K] of one input, after which outputs err least; 1 if none is better."""
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
    """Divide magnitudes by the largest of their group."""
    groups = np.abs(weight).reshape(len(weight), -1, group)
    relative: FloatArray = groups / np.maximum(groups.max(axis=2, keepdims=True), 1e-8)
    return relative.reshape(weight.shape)


def _balanced(factors: FloatArray) -> FloatArray:
    """Scale factors so that the geometric mean of least and largest is 1."""
    factors = np.maximum(factors, np.float32(1e-4))
    factors = factors / np.sqrt(factors.max() * factors.min())
    return np.where(np.isfinite(factors), factors, 1).astype(np.float32)


def _error(weight: FloatArray, rounded: FloatArray, hessian: FloatArray) -> float:
    wrong = rounded - weight
    return float(np.einsum("ok,ok->", wrong @ hessian, wrong))


def rounded_to_ranges(weight: FloatArray, stats: InputStats, grid: Grid) -> Rounded:
    """Round a weight [O, K], each group in the range that errs least in the group's share of the outputs.

    AWQ cuts ranges; here both ends are cut together first, then each by itself.
    """
    assert stats.hessian is not None
    codes, scales, zeros = [], [], []
    for start in range(0, weight.shape[1], grid.group):
        columns = slice(start, start + grid.group)
        found = _group_range(weight[:, columns], stats.hessian[columns, columns], grid)
        codes.append(found.codes)
        scales.append(found.scales)
        zeros.append(found.zeros)
    return Rounded(*(np.concatenate(parts, axis=1) for parts in (codes, scales, zeros)))


def _group_range(values: FloatArray, hessian: FloatArray, grid: Grid) -> Rounded:
    """Round one group of columns [O, g], each row in the range that errs least."""
    ends = np.stack([values.min(axis=1), values.max(axis=1)])
    kept = np.ones_like(ends)  # the parts of both ends that stay
    best = _rounded(values, ends, grid)
    least = _row_errors(best.values() - values, hessian)
    for moved in (slice(0, 2), slice(0, 1), slice(1, 2)):
        before = kept.copy()
        for cut in CUTS:
            tried = before.copy()
            tried[moved] = np.float32(1) - cut
            found = _rounded(values, ends * tried, grid)
            errors = _row_errors(found.values() - values, hessian)
            better = errors < least
            best = Rounded(
                *(np.where(better[:, None], new, old) for new, old in zip(_of(found), _of(best), strict=True))
            )
            kept = np.where(better, tried, kept)
            least = np.minimum(errors, least)
    return best


def _of(rounded: Rounded) -> tuple[Array, Array, Array]:
    return rounded.codes, rounded.scales, rounded.zeros


def _rounded(values: FloatArray, ends: FloatArray, grid: Grid) -> Rounded:
    scales, zeros = grid.fit(ends[0], ends[1])
    codes = grid.codes(values, scales[:, None], zeros[:, None]).astype(np.uint8)
    return Rounded(codes, scales[:, None], zeros[:, None].astype(np.uint8))


def _row_errors(wrong: FloatArray, hessian: FloatArray) -> FloatArray:
    errors: FloatArray = np.einsum("ok,ok->o", wrong @ hessian, wrong)
    return errors


def smooth_factors(weights: Sequence[FloatArray], stats: InputStats) -> FloatArray:
    """Search the factors [K] after which products in int8 err least on the rows kept; 1 if none is better."""
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
