"""PlainLayout: the defaults that most layouts share."""

from __future__ import annotations

import msgspec


class PlainLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A layout with one code of one byte per element, whose products round activations by rows.

    `inputs`: columns have an order of their own, or inputs are multiplied with factors first.
    """

    inputs: bool = False

    @property
    def label(self) -> str:
        """The type's name in logs and tables."""
        return str(self.__struct_config__.tag)

    @property
    def rounds(self) -> int:
        """The number of activation columns that share a scale in int8; 0: the whole row."""
        return 0

    @property
    def floats(self) -> bool:
        """Whether codes stand for floats, so that activations in int8 cannot multiply them."""
        return False

    def columns(self, width: int) -> int:
        """Count the columns of a row whose codes take `width` bytes."""
        return width
