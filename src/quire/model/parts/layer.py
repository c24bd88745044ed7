"""A layer of the residual stream: attention, then an MLP, or parts that take their place, with norms around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import msgspec

from quire.devices.graph import Recorder
from quire.devices.ops import Add, Scale, Value
from quire.devices.protocol import KVLayer
from quire.errors import ModelError
from quire.model.parts.linear import Output
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import FeedForward, LayerAdditions, Mixer, Streams
from quire.model.parts.source import Recording, WeightSource, read_vector
from quire.model.shard import Shard

if TYPE_CHECKING:
    from quire.model.parts.mixture import MixtureConfig

# The place of norms around attention and MLP (f), in order of appearance in layer.py.
#   pre       x += f(norm(x))
#   none      x += f(x)
#   post      x += norm(f(x))
#   sandwich  x += norm(f(norm(x)))
#   sum       x = norm(x + f(x))
#   parallel  x += attention(norm(x)) + mlp(norm(x)); parallel_two: each has its own norm
Placement = Literal["pre", "none", "post", "sandwich", "sum", "parallel", "parallel_two"]


class LayerConfig(msgspec.Struct, frozen=True):
    """The parts of a layer: what mixes tokens, of any kind, and what follows it; either may be absent.

    A `second` mixer may read the same input; the results of both are added. Residual branches are multiplied by
    `multiplier`. `bare`: no norm comes before attention. `keeps`: attention and the MLP join the normed stream, times
    these. `scale`: the stream is multiplied by a number after the layer.
    `streams` is how attention and MLP work on several residual streams.
    """

    hidden_size: int
    norm: NormConfig
    mixer: Mixer | None = None
    mlp: FeedForward | None = None
    second: Mixer | None = None
    placement: Placement = "pre"
    multiplier: float = 1.0
    bare: bool = False
    keeps: tuple[float, float] | None = None
    scale: bool = False
    additions: LayerAdditions | None = None
    streams: Streams | None = None

    @property
    def parallel(self) -> bool:
        return self.placement in ("parallel", "parallel_two")

    @property
    def carries(self) -> bool:
        """Whether a result of this layer joins the stream after the next one."""
        return self.mlp is not None and self.mlp.carries

    @property
    def gathers(self) -> bool:
        """Whether ranks must gather inputs of projections in place of adding outputs."""
        return any(part is not None and part.gathers for part in (self.mixer, self.second, self.mlp))

    @property
    def mixture(self) -> MixtureConfig | None:
        """The mixture of experts, if the layer has one."""
        mixes = self.mlp is not None and self.mlp.routing is not None
        return cast("MixtureConfig", self.mlp) if mixes else None

    def cache(self, shard: Shard, head_dim: int) -> KVLayer:
        """What a rank keeps; a layer without keys has the model's `head_dim`."""
        kept = [part.cache(shard) for part in (self.mixer, self.second) if part is not None]
        states = tuple(state for one in kept for state in one.states)
        states += () if self.additions is None else self.additions.states(self.hidden_size)
        own = kept[0] if kept else KVLayer(0, head_dim)
        size = own.head_dim if own.num_kv_heads else head_dim
        return msgspec.structs.replace(own, head_dim=size, states=states)

    def further(self, shard: Shard) -> tuple[KVLayer, ...]:
        """The cache layers that it keeps beside its own."""
        return () if self.mixer is None else self.mixer.further(shard)

    def check(self, index: int, where: str) -> None:
        """Raise ModelError, naming `where`, for parts that do not fit each other."""
        for part in (self.mixer, self.second, self.mlp, self.additions):
            if part is not None:
                part.check(index, where)
        attends = self.mixer is not None and self.mixer.scores is not None
        if self.second is not None and (self.second.scores is not None or not attends):
            raise ModelError(f"{where}: a second mixer must be a recurrence beside attention")
        if self.streams is not None:
            self.streams.check_layer(self, where)

    def make(self, source: WeightSource, path: str, place: tuple[int, int], shard: Shard) -> Layer:
        """Read the layer at `path`; `place` is its index and the number of layers."""
        kind = Layer if self.streams is None else self.streams.layer
        return kind(self, source, path, place, shard)

    def messages(self, shard: Shard) -> list[int]:
        """The activations per token that a rank sends to each other one of its stage: one entry per message."""
        mixed = [] if self.mixer is None else self.mixer.messages(shard)
        found = [] if self.mlp is None else self.mlp.messages(shard)
        return found if mixed and self.sums_once(shard) else mixed + found

    def sums_once(self, shard: Shard) -> bool:
        """Whether attention and MLP read the same input, so that ranks may add both parts of both in one sum."""
        plain = self.mlp is not None and self.mixture is None and self.multiplier == 1.0
        return plain and self.parallel and not shard.gathers


class Layer:
    """Layer `index` of the model, whose weights lie below `path`. The plain case:

    x -> norm -> attention -> + x
    x -> norm -> mlp -> + x
    """

    def __init__(
        self, config: LayerConfig, source: WeightSource, path: str, place: tuple[int, int], shard: Shard
    ) -> None:
        """`place` is the index and the number of layers."""
        self.config, self._shard, d, index = config, shard, config.hidden_size, place[0]
        before = config.placement not in ("none", "post", "sum")
        after = config.placement in ("post", "sum", "sandwich")
        attends, mixes = config.mixer is not None, config.mlp is not None

        def norm(name: str, wanted: bool) -> Norm | None:
            return Norm(config.norm, source, f"{path}.{name}", d) if wanted else None

        self.attention_norm = norm("attention_norm", before and attends and not config.bare)
        mixers = config.mixer, config.second
        made = [None if one is None else one.make(source, path, index, shard) for one in mixers]
        self.mixer, self._second = made
        self._attention_post_norm = norm("attention_post_norm", after and attends)
        self._mlp_norm = norm("mlp_norm", before and mixes and config.placement != "parallel")
        self._mlp = None if config.mlp is None else config.mlp.make(source, path, shard)
        self._mlp_post_norm = norm("mlp_post_norm", after and mixes)
        self._scale = self._additions = None
        if config.scale:
            self._scale = float(read_vector(source, f"{path}.scale", 1)[0])
        if config.additions is not None:
            states = sum(len(one.cache(shard).states) for one in mixers if one is not None)
            self._additions = config.additions.make(source, path, place, d, states)
        self._one_sum = self.mixer is not None and self.mixer.divided and config.sums_once(shard)

    def __call__(self, r: Recording, x: Value) -> Value:
        """The stream after the layer: [T, D], or all streams of it."""
        added = self._additions
        x = self._compute(r, x) if added is None else added.around(r, x, self._compute)
        return x if self._scale is None else r.g(Scale(x, self._scale))

    def _compute(self, r: Recording, x: Value) -> Value:
        """Attention, then the MLP."""
        g, after, keeps = r.g, x, self.config.keeps
        normed = x if self.attention_norm is None else self.attention_norm(g, x)
        if keeps is not None:
            x = after = g(Scale(normed, keeps[0]))
        if self.mixer is not None:
            heads = self.mixer(r, normed)
            if self._one_sum:
                after = self.mixer.out.part(g, heads, x if self._shard.first else None)
            else:
                after = self._join(g, x, heads, self.mixer.out, self._attention_post_norm)
        if self._second is not None:
            after = self._join(g, after, self._second(r, normed), self._second.out, None)
        if self._additions is not None:
            after = self._additions.beside(g, after, normed)
        source = x if self.config.parallel else after
        if self._mlp_norm is not None:
            normed = self._mlp_norm(g, source)
            after = after if keeps is None else g(Scale(normed, keeps[1]))
        elif not self.config.parallel:
            normed = source
        return self._mix(r, normed, source, after)

    def _mix(self, r: Recording, normed: Value, source: Value, after: Value) -> Value:
        """`after` and the MLP of `normed`, and what the layer before carried over."""
        g, joined = r.g, after
        carried = r.carried.pop() if r.carried else None
        if self._mlp is not None:
            inner, out = self._mlp.compute(r, normed, source)
            if self._one_sum and out is not None:
                return self._shard.sum(g, out.part(g, inner, after))
            joined = self._join(g, after, inner, out, self._mlp_post_norm)
        return joined if carried is None else g(Add(joined, carried))

    def _join(self, g: Recorder, x: Value, inner: Value, out: Output | None, norm: Norm | None) -> Value:
        """x + norm(out(inner)), or norm(x + out(inner)), with the multiplier. Without `out`: inner."""
        multiplier, of_sum = self.config.multiplier, self.config.placement == "sum"
        if out is not None and multiplier == 1.0 and (norm is None or of_sum):
            y = out(g, inner, x)
        else:
            y = inner if out is None else out(g, inner)
            if norm is not None and not of_sum:
                y = norm(g, y)
            y = g(Add(x, y, multiplier))
        return norm(g, y) if norm is not None and of_sum else y
