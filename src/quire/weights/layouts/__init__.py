"""Layouts of quantized weights, one record per file. Every device serves a layout that is added here.

Layouts have the same names as their traits in csrc/linear/layouts; the formulas here are the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.weights.layouts.blocks import Blocks
from quire.weights.layouts.integers import Int4, Int8
from quire.weights.tensor import QuantTensor

PANEL = 16  # rows that a device packs together, which must be of one kind

AnyLayout = Int8 | Int4 | Blocks  # distinguished by their tags in an engine's manifest


def stackable(tensors: Sequence[QuantTensor]) -> bool:
    """Whether tensors can be stacked on rows to one weight: of one layout, or blocks whose kinds fill whole panels.

    Their columns have the same inputs.
    """
    given = [tensor.inputs for tensor in tensors if tensor.inputs is not None]
    if given and (len(given) < len(tensors) or not all(given[0].equals(inputs) for inputs in given[1:])):
        return False
    if len({tensor.layout for tensor in tensors}) == 1:
        return True
    whole = all(tensor.shape[0] % PANEL == 0 for tensor in tensors)
    return whole and len(tensors) <= 4 and all(isinstance(tensor.layout, Blocks) for tensor in tensors)


__all__ = ["AnyLayout", "Blocks", "Int4", "Int8", "stackable"]
