"""What attention adds to its scores: biases of distances, and sinks."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.devices.protocol import Attention
from quire.model.parts.source import WeightSource, read_vector


def sinusoids(positions: int, width: int, steps: int) -> NDArray[np.float32]:
    """Sines, then cosines, of positions by frequencies that fall to 1 / 10000 over `steps`: [positions, width].

    Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """
    frequencies = (10000.0 ** (-np.arange(width // 2) / steps)).astype(np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


BUCKETED_DISTANCE = 128


def position_buckets(buckets: int) -> NDArray[np.int64]:
    """The bucket of each distance from -128 to 128 from a query to a key (Raffel et al. 2020, arXiv:1910.10683).

    Half of the buckets are for keys after the query. In each half, half are for one distance each, the others for
    ranges that grow exponentially; the last also takes all farther distances.
    """
    distances = np.arange(-BUCKETED_DISTANCE, BUCKETED_DISTANCE + 1)
    half = buckets // 2
    exact = half // 2
    away = np.abs(distances)
    grown = np.log(np.maximum(away, 1).astype(np.float32) / exact) / math.log(BUCKETED_DISTANCE / exact)
    far = np.minimum(exact + (grown * (half - exact)).astype(np.int64), half - 1)
    return np.where(distances > 0, half, 0) + np.where(away < exact, away, far)


def relative_places(positions: int, span: int, buckets: int, reach: int) -> NDArray[np.int32]:
    """DeBERTa's row for each distance j - i from a query at i to a key at j, from 1 - positions to positions - 1.

    Of 2 span rows, those before the middle are for later keys. With `buckets` (He et al. 2021, arXiv:2111.09543) half
    as many near distances have rows of their own, and ranges that grow exponentially up to `reach` have the others.
    """
    before = np.arange(positions - 1, -positions, -1)  # i - j
    if buckets:
        middle, away = buckets // 2, np.abs(before)
        far = np.where(away < middle, middle - 1, away).astype(np.float32) / np.float32(middle)
        most = np.log(np.float32((reach - 1) / middle))
        grown = np.ceil(np.log(far) / most * np.float32(middle - 1)) + middle
        before = np.where(away <= middle, before, grown.astype(np.int64) * np.sign(before))
    return np.clip(before + span, 0, 2 * span - 1).astype(np.int32)


def alibi_slopes(num_heads: int) -> NDArray[np.float32]:
    """A geometric sequence by head; heads beyond a power of two take every other slope of twice as many.

    Press et al. 2022, arXiv:2108.12409, and the paper's released code.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return np.array(slopes, np.float32)


class ScoresConfig(msgspec.Struct, frozen=True):
    """The positions that a query sees, and the changes to its scores before the softmax (see devices' Attention).

    `alibi` multiplies the slopes of `num_heads` heads. `position_buckets`: heads add a value of their own by the bucket
    of the distance (distances.position_buckets).
    """

    num_heads: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    ahead: int = 0
    cap: float | None = None
    alibi: float | None = None
    sinks: bool = False
    position_buckets: int | None = None

    @property
    def reach(self) -> int:
        """The last positions that a query sees, its own included; 0: all of them."""
        spans = [span for span in (self.window, self.chunk) if span is not None]
        return 0 if self.ahead else min(spans, default=0)


def make_scores(config: ScoresConfig, source: WeightSource, path: str, heads: range) -> Attention:
    """The operand of the `heads` of a rank. Its sinks and its bias are vectors below the path of the attention."""
    slopes = sinks = bias = None
    count = config.num_heads
    if config.alibi is not None:
        slopes = np.asarray(alibi_slopes(count) * config.alibi, np.float32)[heads.start : heads.stop]
    if config.sinks:
        sinks = read_vector(source, f"{path}.sinks", count, heads)
    if config.position_buckets is not None:
        width = len(position_buckets(config.position_buckets))
        bias = read_vector(source, f"{path}.position_bias", count * width).reshape(count, width)
    return Attention(config.scale, config.window, config.chunk, config.ahead, config.cap, slopes, sinks, bias)
