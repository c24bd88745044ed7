"""Methods of `quire quantize`: the statistics of inputs that each needs, and the tensors that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quire import __version__
from quire.errors import ConfigError
from quire.quantize import formats
from quire.quantize.awq import awq_factors, rounded_to_ranges, smooth_factors
from quire.quantize.gptq import gptq, gptq_tables
from quire.quantize.grid import Grid
from quire.quantize.stats import InputStats
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


Name = Literal["gptq", "awq", "smoothquant", "int8-static", "squeezellm", "fp8", "nvfp4", "mxfp4", "rtn"]
BITS: dict[str, tuple[int, ...]] = {
    "gptq": (2, 3, 4, 8), "rtn": (2, 3, 4, 8), "awq": (4,), "squeezellm": (3, 4), "smoothquant": (8,),
    "int8-static": (8,), "fp8": (8,), "nvfp4": (4,), "mxfp4": (4,),
}  # fmt: skip
GROUPS = (128, 64, 32, 16)  # that are suggested
CALIBRATED: tuple[Name, ...] = ("gptq", "awq", "smoothquant", "int8-static", "squeezellm")
# READERS are the methods that read an option of `quire quantize`, where not all do.
READERS: dict[str, tuple[Name, ...]] = {
    "group_size": ("gptq", "awq", "rtn"),
    "symmetric": ("gptq", "rtn"),
    "damp": ("gptq", "squeezellm"),
    **dict.fromkeys(("calibration", "samples", "sample_len"), CALIBRATED),
    "fisher": ("squeezellm",),
    "outliers": ("squeezellm",),
}


@dataclass(frozen=True, slots=True)
class Method:
    """A method with its settings. ConfigError for bits or groups that it does not have."""

    name: Name
    bits: int
    group: int
    symmetric: bool
    damp: float
    outliers: float = 0.0  # percent of the weights that stay floats beside SqueezeLLM's tables

    @classmethod
    def of(
        cls, name: Name, bits: int | None, group: int, symmetric: bool, damp: float, outliers: float = 0.0
    ) -> Method:
        known = BITS[name]
        chosen = (4 if 4 in known else known[0]) if bits is None else bits
        if chosen not in known:
            raise ConfigError(f"--bits {chosen}: {name} makes {' or '.join(map(str, known))} bits")
        return cls(name, chosen, group, symmetric and name != "awq", damp, outliers)

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.group, self.symmetric)

    @property
    def calibrated(self) -> bool:
        """Whether it needs a text."""
        return self.name in CALIBRATED

    @property
    def folds(self) -> bool:
        """Whether it moves factors of inputs into the weights that produce them."""
        return self.name in ("awq", "smoothquant")

    @property
    def sequential(self) -> bool:
        """Whether a weight is rounded for the inputs that it gets once the weights before it are rounded."""
        return self.name in ("gptq", "squeezellm", "int8-static")

    @property
    def outer(self) -> bool:
        """Whether it needs the sums of outer products of inputs."""
        return self.name in ("gptq", "awq", "squeezellm")

    def unfit(self, rows: int, columns: int) -> str:
        """Say why the format cannot hold a weight [rows, columns]; empty if it can."""
        fields = 32 // self.bits if self.bits != 3 else 32
        grouped = self.name in READERS["group_size"]
        if grouped and columns % self.group:
            fit = [str(size) for size in GROUPS if columns % size == 0]
            hint = f"--group-size {' or '.join(fit)} divides them" if fit else "no --group-size divides them"
            return f"its {columns} columns are not whole groups of {self.group}; {hint}"
        if grouped and rows % fields:
            return f"its {rows} rows are not a multiple of {fields}"
        columns_of = {"gptq": fields, "rtn": fields, "squeezellm": 32, "nvfp4": 16, "mxfp4": 32}.get(
            self.name, 1
        )
        return f"its {columns} columns are not a multiple of {columns_of}" if columns % columns_of else ""

    def factors(self, weights: Sequence[FloatArray], stats: InputStats) -> FloatArray:
        if self.name == "awq":
            return awq_factors(weights, stats, self.grid)
        return smooth_factors(weights, stats)

    def encode(
        self, weight: FloatArray, stats: InputStats | None, importance: FloatArray | None, most: float
    ) -> formats.Encoded:
        """Encode a weight. `importance` of each element is for SqueezeLLM; `most` bounds all weights of this input."""
        if self.name == "rtn":
            return formats.gptq_tensors(self.grid.round(weight), self.bits, self.group)
        if self.name == "fp8":
            return formats.fp8_tensors(weight)
        if self.name == "mxfp4":
            return formats.mxfp4_tensors(weight)
        if self.name == "nvfp4":
            return formats.nvfp4_tensors(weight, most)
        assert stats is not None
        if self.name == "awq":
            return formats.awq_tensors(rounded_to_ranges(weight, stats, self.grid))
        if self.name in ("smoothquant", "int8-static"):
            tensors, values = formats.int8_tensors(weight)
            if self.name == "int8-static":
                largest = max(float(stats.most.max()), 1e-12)
                tensors["input_scale"] = np.array([largest / 127.5], np.float32)
            return tensors, values
        assert stats.hessian is not None
        if self.name == "gptq":
            rounded = gptq(weight, stats.hessian, self.grid, self.damp)
            return formats.gptq_tensors(rounded, self.bits, self.group)
        weights = np.diag(stats.hessian) if importance is None else importance
        kept = outliers(weight, weights, self.bits, self.outliers / 100)
        _, tables = fit_tables(weight, np.where(kept, 0, weights), self.bits)
        codes, rest = gptq_tables(weight, stats.hessian, tables, self.damp, kept)
        return formats.squeezellm_tensors(codes, tables, self.bits, rest)

    def section(self, kept: Sequence[str]) -> dict[str, Any]:
        """Make the section of config.json; `kept` are modules of layers that stay float."""
        if self.name in ("gptq", "rtn"):
            return formats.gptq_section(self.bits, self.group, self.symmetric, self.damp, __version__, kept)
        if self.name == "awq":
            return formats.awq_section(self.group, kept)
        if self.name == "squeezellm":
            return {
                "quant_method": "squeezellm",
                "wbits": self.bits,
                "modules_to_not_convert": list(kept) or None,
            }
        return formats.compressed_section(self.name, kept)

    def beside(self, section: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Make the file that readers of the format look for beside config.json."""
        if self.name in ("gptq", "rtn"):
            return "quantize_config.json", section
        return ("quant_config.json", {"wbits": self.bits}) if self.name == "squeezellm" else None
