"""Tiles of kernels by family of architectures and size: data, held by tests/devices/cuda/test_compiled.py.

What sets the order of a sum (columns of K in a tile, keys in a tile) is the same for all sizes of a kind; rows, tokens,
warps and stages may follow the size.
"""

from __future__ import annotations

import msgspec

from quire.devices.cuda.target import Family


class Shape(msgspec.Struct, frozen=True):
    """The warps that run a program, and the tiles of its loop that are loaded ahead."""

    warps: int = 4
    stages: int = 3


class ProductTile(msgspec.Struct, frozen=True):
    """A tile of a product for steps of at most `most` tokens (0: any): rows of the weight times tokens."""

    most: int
    rows: int
    tokens: int
    shape: Shape


class ProductTiles(msgspec.Struct, frozen=True):
    """The tiles of a kind of product, by ascending `most`. All sum K in tiles of `columns`."""

    columns: int
    sizes: tuple[ProductTile, ...]

    def of(self, tokens: int) -> ProductTile:
        return next(tile for tile in self.sizes if tokens <= tile.most or tile.most == 0)


class AttentionTile(msgspec.Struct, frozen=True):
    """Rows (queries times heads of a group) and keys of a tile."""

    rows: int
    keys: int
    shape: Shape


SEGMENT = 256  # keys after which the state of a softmax is closed

SIZES = (
    ProductTile(16, 64, 16, Shape(4, 5)),
    ProductTile(64, 64, 64, Shape(4, 4)),
    ProductTile(0, 128, 128, Shape(8, 3)),
)
FOUR_BITS = ProductTiles(128, (ProductTile(32, 64, 16, Shape(4, 4)), ProductTile(0, 128, 64, Shape(8, 3))))
SINGLE_SIZES = ProductTile(32, 32, 16, Shape(4, 3)), ProductTile(0, 64, 64, Shape(8, 3))
ONE_SIZE = ProductTiles(128, (ProductTile(0, 128, 128, Shape()),))
WIDE: dict[Family, ProductTiles] = {
    "hopper": ProductTiles(128, SIZES), "ampere": ProductTiles(64, SIZES), "interpreter": ONE_SIZE
}  # fmt: skip
"""Products of 16-bit numbers, and of ones with weights of 8 bits."""

SINGLE: dict[Family, ProductTiles] = {
    "hopper": ProductTiles(32, SINGLE_SIZES), "ampere": ProductTiles(32, SINGLE_SIZES), "interpreter": ONE_SIZE
}  # fmt: skip
"""Products of float32, without tensor cores."""

TABLED = ProductTiles(64, FOUR_BITS.sizes)
LISTED: dict[Family, ProductTiles] = {"hopper": TABLED, "ampere": TABLED, "interpreter": ONE_SIZE}
"""Products with weights of 4 bits that are places in tables."""

NIBBLES: dict[Family, ProductTiles] = {"hopper": FOUR_BITS, "ampere": FOUR_BITS, "interpreter": ONE_SIZE}
"""Products with weights of 4 bits."""


class AttentionTiles(msgspec.Struct, frozen=True):
    """The tiles for sequences with few and with many queries. Their keys are equal."""

    few: AttentionTile
    many: AttentionTile


ATTENTION: dict[Family, dict[int, AttentionTiles]] = {
    "hopper": {
        128: AttentionTiles(AttentionTile(64, 32, Shape(4, 3)), AttentionTile(128, 32, Shape(8, 3))),
        256: AttentionTiles(AttentionTile(64, 32, Shape(8, 2)), AttentionTile(64, 32, Shape(8, 2))),
        512: AttentionTiles(AttentionTile(16, 32, Shape(8, 2)), AttentionTile(16, 32, Shape(8, 2))),
    },
    "ampere": {
        128: AttentionTiles(AttentionTile(16, 32, Shape(4, 4)), AttentionTile(64, 32, Shape(8, 3))),
        256: AttentionTiles(AttentionTile(16, 32, Shape(4, 2)), AttentionTile(32, 32, Shape(8, 2))),
        512: AttentionTiles(AttentionTile(16, 16, Shape(8, 2)), AttentionTile(16, 16, Shape(8, 2))),
    },
    "interpreter": {512: AttentionTiles(AttentionTile(32, 64, Shape()), AttentionTile(128, 64, Shape()))},
}
"""Attention over a paged cache, by the largest width of a head."""

# int8 takes more registers: its values have a scale for each token.
BY_TOKEN: dict[Family, AttentionTiles] = {
    "hopper": AttentionTiles(AttentionTile(64, 32, Shape(8, 3)), AttentionTile(64, 32, Shape(8, 3))),
    "ampere": ATTENTION["ampere"][128],
    "interpreter": ATTENTION["interpreter"][512],
}
LATENT: dict[Family, AttentionTiles] = {
    "hopper": AttentionTiles(AttentionTile(16, 64, Shape(8, 2)), AttentionTile(16, 64, Shape(8, 2))),
    "ampere": AttentionTiles(AttentionTile(16, 32, Shape(8, 2)), AttentionTile(16, 32, Shape(8, 2))),
    "interpreter": AttentionTiles(AttentionTile(32, 64, Shape()), AttentionTile(128, 64, Shape())),
}


def attention_tiles(
    family: Family, width: int, by_token: bool = False, latent: bool = False
) -> AttentionTiles:
    """The tiles for heads whose values are `width` wide, over a cache with scales by token or without."""
    if latent:
        return LATENT[family]
    if by_token and width <= 128:
        return BY_TOKEN[family]
    return next(tiles for most, tiles in ATTENTION[family].items() if width <= most)
