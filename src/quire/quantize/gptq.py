"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): columns are rounded one by one, and what rounding one column does to
the outputs is made up for by those that follow."""

from __future__ import annotations

import numpy as np

from quire.errors import ModelError
from quire.quantize.grid import Grid, Rounded
from quire.weights.tensor import Array, FloatArray

BLOCK = 128  # columns whose errors are passed on to the rest together
TRIES = 6


def gptq(weight_OK: FloatArray, hessian_KK: FloatArray, grid: Grid, damp: float) -> Rounded:
    """Round a weight whose inputs have this sum of outer products.

    Groups are fixed beforehand, on the weight as it is, so that the most important columns can be rounded first without
    a file that says in which order. `damp` is the part of the mean diagonal that is added to it.
    """
    weight = weight_OK.astype(np.float32).copy()
    rows, columns = weight.shape
    hessian = hessian_KK.astype(np.float64)
    dead = np.diag(hessian) == 0
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    importance = np.diag(hessian).astype(np.float32)
    pairs = [
        grid.search(weight[:, start : start + grid.group], importance[start : start + grid.group])
        for start in range(0, columns, grid.group)
    ]
    scales = np.stack([scale for scale, _ in pairs], axis=1)
    zeros = np.stack([zero for _, zero in pairs], axis=1)
    order = np.argsort(-np.diag(hessian), kind="stable")
    upper = _inverse_factor(hessian[np.ix_(order, order)], damp)
    weight = np.ascontiguousarray(weight[:, order].T)  # [K, O]
    codes = np.empty((columns, rows), np.uint8)
    groups = order // grid.group
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = np.empty((stop - start, rows), np.float32)
        for k in range(start, stop):
            scale, zero = scales[:, groups[k]], zeros[:, groups[k]]
            code = grid.codes(weight[k], scale, zero)
            codes[k] = code
            error = (weight[k] - (code - zero) * scale) / upper[k, k]
            weight[k + 1 : stop] -= upper[k, k + 1 : stop, None] * error
            errors[k - start] = error
        weight[stop:] -= upper[start:stop, stop:].T @ errors
    plain = np.empty((rows, columns), np.uint8)
    plain[:, order] = codes.T
    return Rounded(plain, scales, zeros.astype(np.uint8))


def _inverse_factor(hessian: Array, damp: float) -> FloatArray:
    """The upper Cholesky factor of the inverse; more is added to the diagonal until there is one."""
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
