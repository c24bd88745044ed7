"""What attention adds to its scores: biases of distances, and sinks."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.devices.protocol import Attention
from quire.model.parts.distances import alibi_slopes, position_buckets
from quire.model.parts.source import WeightSource, read_vector


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
