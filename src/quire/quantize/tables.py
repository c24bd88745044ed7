"""SqueezeLLM (Kim et al. 2023, arXiv:2306.07629): a table for each row, by k-means weighted by importance."""

from __future__ import annotations

import numpy as np

from quire.weights.tensor import Array, Bytes, FloatArray

ROUNDS = 40


def fit_tables(weight: FloatArray, importance: FloatArray, bits: int) -> tuple[Bytes, FloatArray]:
    """Fit codes [O, K] and tables [O, 2^bits], rounded to float16. importance [O, K] or [K] is not negative."""
    rows, columns = weight.shape
    order = np.argsort(weight, axis=1)
    values = np.take_along_axis(weight, order, axis=1).astype(np.float64)
    shares = np.take_along_axis(np.broadcast_to(importance, weight.shape), order, axis=1).astype(np.float64)
    shares = np.where(shares.sum(axis=1, keepdims=True) > 0, shares, 1.0) + 1e-12
    sums = np.pad(np.cumsum(shares, axis=1), ((0, 0), (1, 0)))
    moments = np.pad(np.cumsum(shares * values, axis=1), ((0, 0), (1, 0)))
    count = 1 << bits
    tables = _start(values, shares, count)
    for _ in range(ROUNDS):
        ends = _ends(values, tables)
        weights = np.diff(np.take_along_axis(sums, ends, axis=1), axis=1)
        totals = np.diff(np.take_along_axis(moments, ends, axis=1), axis=1)
        filled = weights > 0
        moved = np.where(filled, totals / np.where(filled, weights, 1), tables)
        if np.array_equal(moved, tables):
            break
        tables = np.sort(moved, axis=1)
    tables = tables.astype(np.float16).astype(np.float64)
    ends = _ends(values, tables)
    sorted_codes = np.zeros((rows, columns + 1), np.int64)
    np.add.at(sorted_codes, (np.arange(rows)[:, None], ends[:, 1:-1]), 1)
    codes = np.empty((rows, columns), np.uint8)
    np.put_along_axis(codes, order, np.cumsum(sorted_codes, axis=1)[:, :columns].astype(np.uint8), axis=1)
    return codes, tables.astype(np.float32)


def outliers(weight: FloatArray, importance: FloatArray, bits: int, share: float) -> Array:
    """Choose the `share` of a weight [O, K] that tables hold worst: a mask [O, K].

    Half are the largest of their rows' spread, which stretch tables; half what a table of the others rounds worst.
    """
    spread = np.sqrt(np.mean(np.square(weight), axis=1, keepdims=True)) + 1e-30
    count = round(share * weight.size / 2)
    kept = _largest(np.abs(weight) / spread, count)
    codes, tables = fit_tables(weight, np.where(kept, 0, importance), bits)
    loss = np.square(weight - np.take_along_axis(tables, codes.astype(np.intp), axis=1)) * importance
    return kept | _largest(np.where(kept, 0, loss), count)


def _largest(values: FloatArray, count: int) -> Array:
    """Mark the `count` largest of all values."""
    mask = np.zeros(values.size, bool)
    if count:
        mask[np.argpartition(values.reshape(-1), -count)[-count:]] = True
    return mask.reshape(values.shape)


def _start(values: Array, shares: Array, count: int) -> Array:
    """Start between quantiles of the importance's cube root, the density of a good table, and an even spread."""
    dense = np.cumsum(np.cbrt(shares), axis=1)
    dense /= dense[:, -1:]
    rows = np.arange(len(values))[:, None]
    wanted = (np.arange(count) + 0.5) / count
    places = np.searchsorted((dense + rows).reshape(-1), (wanted + rows).reshape(-1)).reshape(-1, count)
    quantiles = values.reshape(-1)[np.minimum(places, values.size - 1)]
    low, high = values[:, :1], values[:, -1:]
    even = low + (high - low) * wanted
    return np.sort(0.6 * quantiles + 0.4 * even, axis=1)


def _ends(values: Array, tables: Array) -> Array:
    """Find where the sorted values of each entry of a table begin and end: [O, 2^bits + 1]."""
    rows, columns = values.shape
    middles = (tables[:, 1:] + tables[:, :-1]) / 2
    # One search over all rows: each row moved up so that it lies above the one before.
    low = min(float(values.min()), float(middles.min(initial=0)))
    step = max(float(values.max()), float(middles.max(initial=0))) - low + 1.0
    shift = np.arange(rows)[:, None] * step - low
    inner = np.searchsorted((values + shift).reshape(-1), (middles + shift).reshape(-1)).reshape(rows, -1)
    inner = np.clip(inner - np.arange(rows)[:, None] * columns, 0, columns)
    return np.concatenate([np.zeros((rows, 1), np.intp), inner, np.full((rows, 1), columns, np.intp)], axis=1)
