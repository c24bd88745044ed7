"""The types of a GGUF file's tensors: code, name, size of a block. Knows no file and decodes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from quire.weights.layouts.blocks import KINDS as BLOCKS


@dataclass(frozen=True, slots=True)
class Kind:
    """`block` elements of a row take `nbytes` bytes."""

    code: int
    name: str
    block: int
    nbytes: int


# The types that are plain floats.
PLAIN: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


def _kind(code: int, name: str) -> Kind:
    if name in PLAIN:
        return Kind(code, name, 1, PLAIN[name].itemsize)
    block = BLOCKS[name.lower()]
    return Kind(code, name, block.columns, block.nbytes)


KINDS = {code: _kind(code, name) for code, name in _CODES.items()}
