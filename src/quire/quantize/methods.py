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
from quire.quantize.tables import fit_tables, outliers
from quire.weights.tensor import FloatArray

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
