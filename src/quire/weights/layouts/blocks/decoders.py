"""Decoders of blocks by kind: of blocks that stand alone, and of blocks whose row begins with numbers of its own."""

from __future__ import annotations

from quire.weights.layouts.blocks.decode_grids import DECODERS as GRIDDED
from quire.weights.layouts.blocks.decode_plain import DECODERS as PLAIN
from quire.weights.layouts.blocks.scaled import DECODERS as SCALED
from quire.weights.layouts.blocks.scaled import floats_of

__all__ = ["ALONE", "SCALED", "floats_of"]

ALONE = {**PLAIN, **GRIDDED}
