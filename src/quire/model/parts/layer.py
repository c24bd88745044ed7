"""A layer of the residual stream: attention, then an MLP or a mixture, with norms around them."""

from __future__ import annotations

from functools import partial
from typing import Literal

import msgspec

from quire.devices.graph import Recorder
from quire.devices.ops import Add, Scale, Value
from quire.devices.protocol import Activation
from quire.errors import ModelError
from quire.model.parts.attention import Attention, AttentionConfig
from quire.model.parts.gemma3n import (
    AltUp,
    AltUpConfig,
    LAuReL,
    LayerInput,
    LayerInputsConfig,
    active_stream,
)
from quire.model.parts.latent import LatentAttention, LatentConfig
from quire.model.parts.linear import Output
from quire.model.parts.mixture import Mixture, MixtureConfig
from quire.model.parts.mlp import MLP, MLPConfig
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.recording import Recording
from quire.model.parts.source import Piece, WeightSource
from quire.model.shard import Shard

# The place of norms around attention and MLP (f), in order of appearance in layer.py.
#   pre       x += f(norm(x))
#   post      x += norm(f(x))
#   sandwich  x += norm(f(norm(x)))
#   sum       x = norm(x + f(x))
#   parallel  x += attention(norm(x)) + mlp(norm(x)); parallel_two: each has its own norm
Placement = Literal["pre", "post", "sandwich", "sum", "parallel", "parallel_two"]


class LayerConfig(msgspec.Struct, frozen=True):
    """The parts of a layer; one without attention or without an MLP and a mixture leaves these out.

    Residual branches are multiplied by `multiplier`. `bare`: no norm comes before attention. `scale`: the stream is
    multiplied by a number after the layer. `laurel`: the rank of a residual beside attention.
    """

    hidden_size: int
    norm: NormConfig
    attention: AttentionConfig | None = None
    latent: LatentConfig | None = None
    mlp: MLPConfig | None = None
    mixture: MixtureConfig | None = None
    placement: Placement = "pre"
    multiplier: float = 1.0
    bare: bool = False
    scale: bool = False
    laurel: int | None = None
    inputs: LayerInputsConfig | None = None
    inputs_activation: Activation = "silu"
    altup: AltUpConfig | None = None

    @property
    def attends(self) -> AttentionConfig | LatentConfig | None:
        """The attention of either kind."""
        return self.attention or self.latent

    @property
    def parallel(self) -> bool:
        return self.placement in ("parallel", "parallel_two")

    @property
    def carries(self) -> bool:
        """Whether a result of this layer joins the stream after the next one."""
        return self.mixture is not None and self.mixture.shortcut

    @property
    def gathers(self) -> bool:
        """Whether ranks must gather inputs of projections in place of adding outputs."""
        parts = self.attends, self.mlp
        return any(part is not None and part.gathers for part in parts)

    def check(self, index: int, where: str) -> None:
        """Raise ModelError, naming `where`, for parts that do not fit each other."""
        attention = self.attention
        if attention is not None:
            attention.check(index, where)
        rope = (
            self.latent.rope
            if attention is None and self.latent is not None
            else attention and attention.rope
        )
        if rope:
            rope.check(where)
        if self.altup is not None and self.altup.active >= self.altup.streams:
            raise ModelError(f"{where}: stream {self.altup.active} of {self.altup.streams} cannot be active")
        mixture = self.mixture
        if mixture is not None and mixture.zero_experts >= mixture.routing.num_experts:
            raise ModelError(f"{where}: all of {mixture.routing.num_experts} experts return their input")

    def messages(self, shard: Shard) -> list[int]:
        """The activations per token that a rank sends to each other one of its stage: one entry per message."""
        found: list[int] = []
        sums, d, attends = 0, self.hidden_size, self.attends
        if attends is not None and attends.separable:
            found += [len(attends.heads(shard)[0]) * attends.value_size] if shard.gathers else []
            sums += 1
        if self.mlp is not None:
            gathered = 1 if self.mlp.cutoff is None else 2  # a sparse gate, and what it multiplies
            columns = len(shard.columns(self.mlp.intermediate_size))
            found += [columns] * gathered if shard.gathers else []
            sums += 1
        if self.parallel and sums == 2 and not shard.gathers:
            sums = 1
        if self.mixture is not None and (division := self.mixture.division(shard)) != "copy":
            found.append(len(shard.columns(d)) if division == "rows" else d)
        return found + [len(shard.columns(d)) if shard.gathers else d] * sums


class Layer:
    """Layer `index` of the model, whose weights lie below `path`. The plain case:

    x -> norm -> attention -> + x
    x -> norm -> mlp -> + x
    """

    def __init__(
        self,
        config: LayerConfig,
        source: WeightSource,
        path: str,
        place: tuple[int, int],
        shard: Shard,
    ) -> None:
        """`place` is the index and the number of layers."""
        self.config, self._shard, d, index = config, shard, config.hidden_size, place[0]
        before = config.placement not in ("post", "sum")
        after = config.placement in ("post", "sum", "sandwich")
        attends, mixes = config.attends is not None, config.mlp is not None or config.mixture is not None

        def norm(name: str, wanted: bool) -> Norm | None:
            return Norm(config.norm, source, f"{path}.{name}", d) if wanted else None

        self.attention_norm = norm("attention_norm", before and attends and not config.bare)
        self.attention: Attention | LatentAttention | None = None
        if config.attention is not None:
            self.attention = Attention(config.attention, source, f"{path}.attention", index, shard)
        elif config.latent is not None:
            self.attention = LatentAttention(config.latent, source, f"{path}.attention", index, shard)
        self._attention_post_norm = norm("attention_post_norm", after and attends)
        self._mlp_norm = norm("mlp_norm", before and mixes and config.placement != "parallel")
        self._mlp = None if config.mlp is None else MLP(config.mlp, source, f"{path}.mlp", shard)
        self._mixture = None
        if config.mixture is not None:
            self._mixture = Mixture(config.mixture, source, f"{path}.mixture", shard)
        self._mlp_post_norm = norm("mlp_post_norm", after and mixes)
        self._input = self._laurel = self._altup = self._scale = None
        if config.inputs is not None:
            about = config.inputs, config.norm, config.inputs_activation
            self._input = LayerInput(*about, source, f"{path}.input", place, d)
        if config.scale:
            self._scale = float(source.vector(f"{path}.scale", [Piece(f"{path}.scale", (1,))])[0])
        if config.laurel is not None:
            self._laurel = LAuReL(config.laurel, config.norm, source, f"{path}.laurel", d)
        if config.altup is not None:
            self._altup = AltUp(config.altup, config.norm, source, f"{path}.altup", d)
        self._one_sum = self._sums_once(shard)

    def __call__(self, r: Recording, x: Value) -> Value:
        """The stream after the layer: [T, D], or all streams of it."""
        g, own = r.g, None if self._input is None else partial(self._input, r)
        if self._altup is not None and self.config.altup is not None:
            x = self._altup.predict(g, x)
            y = self._compute(r, active_stream(self.config.altup, g, x))
            x = self._altup.correct(g, x, y, own)
        else:
            x = self._compute(r, x)
            x = x if own is None else g(Add(x, own(x)))
        return x if self._scale is None else g(Scale(x, self._scale))

    def _compute(self, r: Recording, x: Value) -> Value:
        """Attention, then the MLP or the mixture."""
        g, after = r.g, x
        normed = x if self.attention_norm is None else self.attention_norm(g, x)
        if self.attention is not None:
            heads = self.attention(r, normed)
            if self._one_sum:
                after = self.attention.out.part(g, heads, x if self._shard.first else None)
            else:
                after = self._join(g, x, heads, self.attention.out, self._attention_post_norm)
        if self._laurel is not None:
            after = g(Scale(g(Add(after, self._laurel(g, normed))), 2**-0.5))
        source = x if self.config.parallel else after
        if self._mlp_norm is not None:
            normed = self._mlp_norm(g, source)
        elif not self.config.parallel:
            normed = source
        return self._mix(r, normed, source, after)

    def _mix(self, r: Recording, normed: Value, source: Value, after: Value) -> Value:
        """`after` and the MLP or the mixture of `normed`, and what the layer before carried over."""
        g, mlp, mixture, out = r.g, self._mlp, self._mixture, None
        joins = r.carried.pop() if r.carried else None
        if mixture is not None and (mlp is None or not (mixture.config.shortcut or mixture.config.beside)):
            inner = mixture(g, normed)
        elif mixture is not None and mlp is not None and not mixture.config.shortcut:
            inner = mixture.added(g, mlp.out(g, mlp(g, normed)), source)
        elif mlp is not None:
            if mixture is not None:
                r.carried.append(mixture(g, normed))
            inner, out = mlp(g, normed), mlp.out
            if self._one_sum:
                return self._shard.sum(g, out.part(g, inner, after))
        else:
            return after
        joined = self._join(g, after, inner, out, self._mlp_post_norm)
        return joined if joins is None else g(Add(joined, joins))

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

    def _sums_once(self, shard: Shard) -> bool:
        """Whether attention and MLP read the same input, so that ranks may add both parts of both in one sum."""
        attention, config = self.attention, self.config
        if attention is None or not attention.divided or shard.gathers:
            return False
        plain = config.mlp is not None and config.mixture is None and config.multiplier == 1.0
        return plain and config.parallel
