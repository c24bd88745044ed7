"""A block of attention and MLP that layers share, with low-rank additions of each (Zamba2, arXiv:2411.15242)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import numpy as np
from msgspec.structs import replace

from quire.devices import ops
from quire.devices.graph import Recorder
from quire.devices.ops import Add, Apply, HeadLinear, Multiply, Value
from quire.devices.protocol import GELU, Activation, KVLayer, Matrix
from quire.devices.stream_ops import Combine
from quire.model.parts.attention import Attention
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.linear import Linear
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import Mixer, ModelAdditions
from quire.model.parts.scores import ScoresConfig
from quire.model.parts.source import Recording, WeightSource, matrix_of
from quire.model.shard import WHOLE, Shard

FIRST, SECOND = (np.array(factors, np.float32) for factors in ([[1], [0]], [[0], [1]]))  # halves of a row


class SharedBlockConfig(Mixer, msgspec.Struct, frozen=True, tag="shared_block"):
    """The block lies in layer `first`. It reads the stream beside the embedding; what it makes joins the scan's input.

    Its use by number adds products of `rank` to the MLP, and with `adapts` to queries, keys and values. All ranks have
    all of it.
    """

    hidden_size: int
    intermediate_size: int
    attention: Mixer
    scan: Mixer
    norm: NormConfig
    first: int
    use: int
    rank: int
    adapts: bool = False
    bias: bool = False

    @property
    def made_of(self) -> tuple[Mixer, ...]:
        return self.attention, self.scan

    @property
    def scores(self) -> ScoresConfig | None:
        return self.attention.scores

    def check(self, index: int, where: str) -> None:
        for one in self.made_of:
            one.check(index, where)

    def heads(self, shard: Shard) -> tuple[range, range]:
        return self.attention.heads(WHOLE)

    def cache(self, shard: Shard) -> KVLayer:
        return replace(self.attention.cache(WHOLE), states=self.scan.cache(shard).states)

    def operations(self, shard: Shard) -> int:
        return self.attention.operations(WHOLE)

    def make(self, source: WeightSource, path: str, index: int, shard: Shard) -> SharedBlock:
        return SharedBlock(self, source, path, index, shard)


class SharedBlock:
    """scan(norm(x + join(mlp(norm(attention(norm(x | embedding)))))))."""

    divided = False

    def __init__(
        self, config: SharedBlockConfig, source: WeightSource, path: str, index: int, shard: Shard
    ) -> None:
        d, inner, home = config.hidden_size, config.intermediate_size, f"layers.{config.first}"

        def low(
            names: Sequence[str], parts: Sequence[str], out: int, width: int
        ) -> tuple[Linear, list[Matrix]]:
            paths = [f"{home}.low.{name}.{config.use}" for name in names]
            downs = [matrix_of(f"{one}.down", config.rank, width) for one in paths]
            ups = [matrix_of(f"{one}.{part}", out, config.rank) for one in paths for part in parts]
            return Linear(source, f"{paths[0]}.down", downs), [
                source.matrix(up.path.removesuffix(".weight"), [up]) for up in ups
            ]

        def linear(path: str, out: int, width: int, bias: bool = False) -> Linear:
            return Linear.plain(source, path, out, width, bias=bias)

        self._norm = Norm(config.norm, source, f"{home}.attention_norm", 2 * d)
        self._attention = cast(Attention, config.attention.make(source, home, index, WHOLE))
        if config.adapts:
            self._attention.qkv = _Adapted(self._attention.qkv, *low("qkv", ["up"], 2 * d, 2 * d))
        self._mlp_norm = Norm(config.norm, source, f"{home}.mlp_norm", d)
        self._base = [linear(f"{home}.mlp.{name}", inner, d, config.bias) for name in ("gate", "up")]
        self._low, self._ups = low(["gate_up"], ["gate", "up"], inner, d)
        self._down = linear(f"{home}.mlp.down", d, inner, config.bias)
        self._join = linear(f"{path}.join", d, d)
        self._scan_norm = Norm(config.norm, source, f"{path}.scan_norm", d)
        self._scan = config.scan.make(source, path, index, shard)
        self.out = self._scan.out

    def __call__(self, r: Recording, x: Value) -> Value:
        """What the scan's last projection reads."""
        g = r.g
        h = self._norm(g, g(Combine(x, FIRST, r.embedding)))
        h = self._mlp_norm(g, self._attention.out(g, self._attention(r, h)))
        low = self._low(g, h)
        gate, up = (
            base(g, h, residual=g(ops.Linear(low, added)))
            for base, added in zip(self._base, self._ups, strict=True)
        )
        t = self._join(g, self._down(g, g(Multiply(g(Apply(gate, GELU())), up))))
        return self._scan(r, self._scan_norm(g, g(Add(x, t))))


class _Adapted(Linear):
    """A product and, for each of its equal parts, one of a low rank."""

    def __init__(self, base: Linear, down: Linear, ups: Sequence[Matrix]) -> None:
        self._base, self._low, self._ups = base, down, ups

    def __call__(
        self, g: Recorder, x: Value, activation: Activation | None = None, residual: Value | None = None
    ) -> Value:
        return self._base(g, x, activation, g(HeadLinear(self._low(g, x), self._ups)))


class EmbeddedConfig(ModelAdditions, msgspec.Struct, frozen=True, tag="embedded"):
    """Blocks read the embedding of each token."""

    @property
    def reads_tokens(self) -> bool:
        return True

    def make(self, source: WeightSource, model: DecoderConfig, shard: Shard) -> Embedded:
        return Embedded()


class Embedded:
    """Keeps the embedding for the blocks, as the second half of what they read."""

    def begin(self, r: Recording, x: Value, embed: Callable[[Recorder], Value]) -> Value:
        r.embedding = r.g(Combine(embed(r.g) if r.first else x, SECOND))
        return x

    def active(self, g: Recorder, x: Value) -> Value:
        return x

    def end(self, g: Recorder, x: Value) -> Value:
        return x
