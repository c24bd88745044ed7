"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): rounds columns one by one; the columns that follow make up for the
error of each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.errors import ModelError
from quire.quantize.grid import Grid, Rounded
from quire.weights.tensor import Array, Bytes, FloatArray

BLOCK = 128  # columns whose errors are passed on to the rest together
TRIES = 6


# RoundColumn gives the codes [O] of one column's values [O], and the values that they stand for.
RoundColumn = Callable[[int, FloatArray], tuple[Array, FloatArray]]


def gptq(weight_OK: FloatArray, hessian_KK: FloatArray, grid: Grid, damp: float) -> Rounded:
    """Round a weight; `hessian_KK` is the sum of outer products of its inputs.

    Groups are fixed beforehand, on the weight as it is, so the most important columns can be rounded first and no file
    has to store their order. `damp` is the part of the mean diagonal that is added to it.
    """
    importance = np.diag(hessian_KK).astype(np.float32)
    pairs = [
        grid.search(weight_OK[:, start : start + grid.group], importance[start : start + grid.group])
        for start in range(0, weight_OK.shape[1], grid.group)
    ]
    scales = np.stack([scale for scale, _ in pairs], axis=1)
    zeros = np.stack([zero for _, zero in pairs], axis=1)

    def round_column(column: int, values: FloatArray) -> tuple[Array, FloatArray]:
        scale, zero = scales[:, column // grid.group], zeros[:, column // grid.group]
        codes = grid.codes(values, scale, zero)
        return codes, (codes - zero) * scale

    codes = _compensated(weight_OK, hessian_KK, damp, round_column)
    return Rounded(codes, scales, zeros.astype(np.uint8))


def gptq_tables(
    weight_OK: FloatArray, hessian_KK: FloatArray, tables: FloatArray, damp: float, kept_OK: Array
) -> tuple[Bytes, FloatArray]:
    """Round to values of a table [O, 2^bits] for each row, in ascending order: codes [O, K].

    What is `kept_OK` is not rounded; the second array [O, K] has its values less those of its codes.
    """
    middles, rows = (tables[:, 1:] + tables[:, :-1]) / 2, np.arange(len(tables))
    rest = np.zeros(weight_OK.shape, np.float32)

    def round_column(column: int, values: FloatArray) -> tuple[Array, FloatArray]:
        codes = (values[:, None] > middles).sum(axis=1)
        found, kept = tables[rows, codes], kept_OK[:, column]
        rest[kept, column] = (values - found)[kept]
        return codes, np.where(kept, values, found)

    return _compensated(weight_OK, hessian_KK, damp, round_column), rest


def _compensated(
    weight_OK: FloatArray, hessian_KK: FloatArray, damp: float, round_column: RoundColumn
) -> Bytes:
    """Round columns one by one, the most important first: codes [O, K]."""
    hessian, weight = hessian_KK.astype(np.float64), weight_OK.astype(np.float32).copy()
    rows, columns = weight.shape
    dead = np.diag(hessian) == 0
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    order = np.argsort(-np.diag(hessian), kind="stable")
    upper = _inverse_factor(hessian[np.ix_(order, order)], damp)
    weight = np.ascontiguousarray(weight[:, order].T)  # [K, O]
    codes = np.empty((columns, rows), np.uint8)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = np.empty((stop - start, rows), np.float32)
        for k in range(start, stop):
            codes[k], values = round_column(int(order[k]), weight[k])
            error = (weight[k] - values) / upper[k, k]
            weight[k + 1 : stop] -= upper[k, k + 1 : stop, None] * error
            errors[k - start] = error
        weight[stop:] -= upper[start:stop, stop:].T @ errors
    plain = np.empty((rows, columns), np.uint8)
    plain[:, order] = codes.T
    return plain


def _inverse_factor(hessian: Array, damp: float) -> FloatArray:
    """Compute the upper Cholesky factor of the inverse; more is added to the diagonal until there is one."""
    mean = float(np.diag(hessian).mean())
    for attempt in range(TRIES):
        damped = hessian + np.eye(len(hessian)) * (mean * damp * 4**attempt)
        try:
            inverse = np.linalg.inv(damped)
            lower = np.linalg.cholesky((inverse + inverse.T) / 2)
        except np.linalg.LinAlgError:
            continue
        return lower.T.astype(np.float32)
    raise ModelError("the inputs of a weight are degenerate: calibrate with more or other text")
