"""Work lists of attention: which program computes which queries over which keys. Host code over small arrays.

A list follows the step and the number of multiprocessors. Results do not: states are closed and merged at fixed
positions (kernels/attention.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.devices.cuda.tiles import SEGMENT, AttentionTile

IntArray = NDArray[np.int32]
FAR = 1 << 29  # positions to look ahead: no sequence is as long, and a position plus them fits int32


@dataclass(frozen=True, slots=True)
class WorkShape:
    """Everything that sets a work list, beside the step; layers of equal shapes share one.

    `window` and `chunk` are 0 if there is none. `listed`: each query has a list of at most as many positions. `every`:
    queries see entries of as many positions besides, and lists are of entries.
    """

    num_heads: int
    num_groups: int
    tile: AttentionTile
    window: int = 0
    chunk: int = 0
    ahead: int = 0
    listed: int = 0
    every: int = 0

    @property
    def heads_of_tile(self) -> int:
        """Heads of one group whose queries share a tile."""
        return min(self.num_heads // self.num_groups, self.tile.rows)

    @property
    def head_tiles(self) -> int:
        """Programs for all heads of the same tokens."""
        return self.num_groups * -(-(self.num_heads // self.num_groups) // self.heads_of_tile)

    @property
    def tokens_of_tile(self) -> int:
        return 1 if self.listed else self.tile.rows // self.heads_of_tile

    def state_bytes(self, width: int) -> int:
        """Return the room for a closed state of all heads, with values `width` wide."""
        return 4 * self.head_tiles * self.tile.rows * ((1 << (width - 1).bit_length()) + 2)


@dataclass(frozen=True, slots=True)
class Work:
    """Items of programs, int32 rows.

    whole [W, 8] and split [P, 8]: sequence, first token, first segment, segments, number of the first closed state;
    merges [R, 4]: token, its place in the tile, number of the first closed state, segments. `partials` counts states.
    """

    whole: IntArray
    split: IntArray
    merges: IntArray
    partials: int

    @property
    def lists(self) -> tuple[IntArray, ...]:
        return self.whole, self.split, self.merges

    @property
    def flat(self) -> IntArray:
        return np.concatenate([rows.reshape(-1) for rows in self.lists])

    def padded(self, shape: WorkShape, tokens: int, processors: int) -> Work:
        """Return the same items, and items of no work, up to the most that a list of that number of tokens has.

        A tile is split if it has more than an equal share of all segments: fewer are than processors serve its heads.
        """
        served = -(-processors // shape.head_tiles)
        split = 2 * served if served > 1 else 0
        most = tokens, split, min(tokens, (served - 1) * shape.tokens_of_tile)
        lists = (
            np.concatenate([rows, np.full((count - len(rows), rows.shape[1]), -1, np.int32)])
            for rows, count in zip(self.lists, most, strict=True)
        )
        whole, pieces, merges = lists
        return Work(whole, pieces, merges, self.partials)


def work_list(cu_q: IntArray, kv_len: IntArray, shape: WorkShape, processors: int) -> Work:
    """Cut a step into programs: whole tiles, split only as far as multiprocessors would have none."""
    counts = np.diff(cu_q).astype(np.int64)
    per_tile = shape.tokens_of_tile
    tiles = -(-counts // per_tile)
    sequence = np.repeat(np.arange(len(counts)), tiles)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    token = cu_q[sequence] + number * per_tile
    tokens = np.minimum(cu_q[sequence + 1] - token, per_tile)
    first = kv_len[sequence].astype(np.int64) - cu_q[sequence + 1] + token
    low = np.zeros_like(first)
    listed = 0 if shape.every else shape.listed
    if shape.window and not listed:
        low = np.maximum(low, first - shape.window + 1)
    if shape.chunk and not listed:
        low = np.maximum(low, first // shape.chunk * shape.chunk)
    high = np.minimum(first + tokens + shape.ahead, listed or kv_len[sequence])
    begin = low // SEGMENT
    segments = -(-high // SEGMENT) - begin
    if shape.every:
        segments += -(-np.minimum((first + tokens) // shape.every, shape.listed or FAR) // SEGMENT)
    most = max(1, int(-(-segments.sum() * shape.head_tiles // processors)))
    rows = np.zeros((len(sequence), 8), np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = sequence, token, begin, segments
    is_split = segments > most
    whole = rows[~is_split]
    return _with_splits(
        whole[np.argsort(-whole[:, 3], kind="stable")], rows[is_split], tokens[is_split], most
    )


def _with_splits(whole: IntArray, tiles: IntArray, tokens: IntArray, most: int) -> Work:
    """Cut tiles into items of at most `most` segments."""
    segments = tiles[:, 3].astype(np.int64)
    first_state = np.cumsum(segments) - segments
    parts = -(-segments // most)
    owner = np.repeat(np.arange(len(tiles)), parts)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)) * most
    split = tiles[owner]
    split[:, 2] += offset.astype(np.int32)
    split[:, 3] = np.minimum(segments[owner] - offset, most)
    split[:, 4] = first_state[owner] + offset
    of_token = np.repeat(np.arange(len(tiles)), tokens)
    within = np.arange(len(of_token)) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    columns = tiles[of_token, 1] + within, within, first_state[of_token], segments[of_token]
    merges = np.stack(columns, axis=1).astype(np.int32)
    return Work(whole, split, merges, int(segments.sum()))
