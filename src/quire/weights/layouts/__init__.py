"""The layouts of quantized weights, one record per file. Every device serves a layout that is added here.

Its name is that of its traits in csrc/linear/layouts, which devices/cpu packs; the formulas here are the oracle.
"""

from __future__ import annotations

from quire.weights.layouts.int4 import Int4
from quire.weights.layouts.int8 import Int8
from quire.weights.layouts.mxfp4 import MXFP4

AnyLayout = Int8 | Int4 | MXFP4  # distinguished by their tags in an engine's manifest

__all__ = ["MXFP4", "AnyLayout", "Int4", "Int8"]
