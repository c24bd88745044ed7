"""Tables of hashed n-grams: what the last tokens say by themselves joins the residual streams before a layer."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from quire.devices.graph import Recorder
from quire.devices.ops import Add, Normalize, Value
from quire.devices.protocol import Norm as NormOperand
from quire.devices.protocol import StateSpec
from quire.devices.recurrent_ops import EmbedNgrams, convolution_state
from quire.devices.stream_ops import CompareParts, Mix
from quire.errors import ModelError
from quire.model.parts.convolution import Convolution
from quire.model.parts.linear import Linear
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import LayerAdditions
from quire.model.parts.source import Piece, Recording, WeightSource, matrix_of

FLOOR = 1e-6  # the least magnitude of which a root is taken
LIMBS, LIMB_BITS = 3, 21  # of a multiplier, whose parts are floats


class NgramsConfig(LayerAdditions, msgspec.Struct, frozen=True, tag="ngrams"):
    """Tables of `rows` rows of `width` elements, as many for each number of tokens from 2 to `longest`.

    The tables' rows make a key for each of the `streams` and one value. A stream takes as much of the value as it
    agrees with its key, and what a convolution makes of that, whose `taps` are `longest` tokens apart. Ids of tokens
    are below `vocab_size`; an `end` hides those before it.
    """

    streams: int
    norm: NormConfig
    rows: tuple[int, ...]
    width: int
    longest: int
    taps: int
    end: int
    vocab_size: int

    @property
    def reads_tokens(self) -> bool:
        return True

    def check(self, index: int, where: str) -> None:
        if not self.rows or len(self.rows) % (self.longest - 1):
            raise ModelError(
                f"{where}: {len(self.rows)} tables for numbers of tokens from 2 to {self.longest}"
            )

    def states(self, size: int) -> tuple[StateSpec, ...]:
        tail = convolution_state(size * self.streams, self.taps, self.longest)
        return convolution_state(1, self.longest), tail

    def make(self, source: WeightSource, path: str, place: tuple[int, int], size: int, states: int) -> Ngrams:
        return Ngrams(self, source, f"{path}.ngrams", place[0], size, states)


class Ngrams:
    """x + y + convolution(norm(y)), where y is value(tables) times gates of key(tables) and x, by stream."""

    def __init__(
        self, config: NgramsConfig, source: WeightSource, path: str, index: int, d: int, states: int
    ) -> None:
        self._config, self._index, self._size, self._states = config, index, d, states
        whole, inputs = d * config.streams, config.width * len(config.rows)
        self._tables = [
            source.matrix(f"{path}.table.{i}", [matrix_of(f"{path}.table.{i}", rows, config.width)], "table")
            for i, rows in enumerate(config.rows)
        ]
        limbs = Piece(f"{path}.multipliers", (LIMBS * config.longest,), integers=True)
        rows = np.nan_to_num(source.vector(limbs.path, [limbs])).reshape(-1, LIMBS)  # adapters know no values
        self._multipliers = [sum(int(one) << (LIMB_BITS * i) for i, one in enumerate(row)) for row in rows]
        self._key = Linear.plain(source, f"{path}.key", whole, inputs)
        self._value = Linear.plain(source, f"{path}.value", d, inputs)
        self._key_norm, self._query_norm, self._taps_norm = (
            Norm(config.norm, source, f"{path}.{name}_norm", whole).operand
            for name in ("key", "query", "taps")
        )
        taps = {f"{path}.taps": (whole, range(whole))}
        self._convolution = Convolution(
            source, f"{path}.taps", taps, config.taps, activation="silu", dilation=config.longest
        )

    def around(self, r: Recording, x: Value, compute: Callable[[Recording, Value], Value]) -> Value:
        g, config, n = r.g, self._config, self._config.streams
        place = self._index - r.first, self._states
        found = g(EmbedNgrams(self._tables, self._multipliers, config.end, *place))

        def normed(y: Value, norm: NormOperand) -> Value:
            return g(Normalize(y, norm, groups=n))

        keys, queries = normed(self._key(g, found), self._key_norm), normed(x, self._query_norm)
        gates = g(CompareParts(keys, queries, n, self._size**-0.5, FLOOR))
        gated = g(Mix(self._value(g, found), gates, 1))
        convolved = self._convolution(g, normed(gated, self._taps_norm), place[0], self._states + 1)
        return compute(r, g(Add(x, g(Add(gated, convolved)))))

    def beside(self, g: Recorder, after: Value, normed: Value) -> Value:
        return after
