"""One recording of a decoder's graph: what its layers share while they append their operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.devices.graph import Recorder
from quire.devices.ops import RopeAngles, Value
from quire.model.parts.rope import RopeSpec, make_rope

Choice = tuple[Value, int, int]
"""Numbers of pools that queries see, the positions of a pool, and the groups of heads that chose (ops.Attend)."""


@dataclass(slots=True)
class Recording:
    """The recorder `g`, and values that several layers read.

    Layer i keeps its keys and values in layer i - `first` of the cache. `embedding` [T, D] and rows of the `table`
    [T, layers P] make the inputs by layer. `carried` holds what joins the residual stream after the next layer.
    `further` are the numbers of the cache layers that a layer keeps beside (Mixer.further); `chosen` is the last choice
    of positions, which later layers may share.
    """

    g: Recorder
    first: int = 0
    embedding: Value | None = None
    table: Value | None = None
    further: Mapping[int, range] = field(default_factory=dict)
    chosen: Choice | None = None
    carried: list[Value] = field(default_factory=list)
    _angles: dict[RopeSpec, Value] = field(default_factory=dict)

    def angles(self, rope: RopeSpec | None) -> Value | None:
        """cos and sin of the step's positions, computed once for all layers; None without a rope."""
        if rope is None:
            return None
        if rope not in self._angles:
            self._angles[rope] = self.g(RopeAngles(make_rope(rope)))
        return self._angles[rope]
