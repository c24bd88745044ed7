"""Multi-head attention with grouped keys and values (Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023,
arXiv:2305.13245), and all that families add to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import msgspec

from quire.devices.ops import Apply, Attend, Multiply, PrepareQueries, Scale, StoreKV, Value
from quire.devices.protocol import Activation, Clamp, KVLayer, Temperature
from quire.errors import ModelError
from quire.model.parts.bounds import MAX_HEADS_DIM, MAX_REACH
from quire.model.parts.linear import Linear, Output, output_messages
from quire.model.parts.norm import HeadNormConfig, Norm, NormConfig, head_norm, plain_norm
from quire.model.parts.part import DistanceScores, Index, Mixer, Part
from quire.model.parts.rope import RopeSpec
from quire.model.parts.scores import ScoresConfig, make_scores
from quire.model.parts.source import Recording, WeightSource, matrix_of
from quire.model.shard import Shard

if TYPE_CHECKING:
    from quire.model.parts.indexer import IndexerConfig


class AttentionConfig(Mixer, msgspec.Struct, frozen=True, tag="attention"):
    """N query heads and G key/value heads of `head_dim` elements.

    `value_dim`: values are shorter than keys; they are padded in the cache. `value_scale` multiplies what heads gather;
    `value_norm` norms values without weights. `keys_as_values`: values are the keys before norm and rope. `clip` bounds
    queries, keys and values. What heads gather is multiplied by the `gate_activation` of a product with the layer's
    input, by element or by head (`gate`), and normed by `out_norm` before the last projection. `back`: the layer reads
    the keys and values of the layer that many before it, and keeps none. `positions` is the model's longest sequence.
    Queries see the keys that the `indexer` chooses, for all heads or for each key/value head.
    `input_size`, if not 0, is that of what it reads.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scores: ScoresConfig
    positions: int
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: HeadNormConfig | None = None
    value_norm: NormConfig | None = None
    value_dim: int | None = None
    value_scale: float = 1.0
    keys_as_values: bool = False
    clip: float | None = None
    temperature: Temperature | None = None
    gate: Literal["elements", "heads"] | None = None
    gate_activation: Activation = "sigmoid"
    gate_bias: bool = False
    out_norm: NormConfig | None = None
    back: int = 0
    relative: DistanceScores | None = None
    indexer: Part | None = None
    input_size: int = 0

    @property
    def choice(self) -> IndexerConfig | None:
        return cast("IndexerConfig | None", self.indexer)

    @property
    def index(self) -> Index | None:
        return None if self.choice is None else self.choice.index

    @property
    def separable(self) -> bool:
        together = self.qk_norm is not None and self.qk_norm.over == "all_heads"
        return not together and self.scores.position_buckets is None and self.relative is None

    @property
    def gathers(self) -> bool:
        return self.out_norm is not None  # it reads all heads

    @property
    def scaled_heads(self) -> int:
        return self.num_kv_heads

    @property
    def heads_apart(self) -> bool:
        return self.num_heads == self.num_kv_heads and self.value_dim is None

    def check(self, index: int, where: str) -> None:
        if self.num_heads % self.num_kv_heads or self.scores.num_heads != self.num_heads:
            raise ModelError(
                f"{where}: {self.num_heads} heads are not a multiple of {self.num_kv_heads} key/value heads"
            )
        if self.num_heads * self.head_dim > MAX_HEADS_DIM:
            raise ModelError(f"{where}: num_heads x head_dim must be at most {MAX_HEADS_DIM}")
        if self.value_dim is not None and self.value_dim > self.head_dim:
            raise ModelError(f"{where}: values of {self.value_dim} elements beside keys of {self.head_dim}")
        if self.back > index:
            raise ModelError(f"{where} cannot read the keys of a layer {self.back} before it")
        if self.relative is not None and self.positions > MAX_REACH:
            raise ModelError(f"{where}: distances of {self.positions} positions; at most {MAX_REACH}")
        if self.relative is not None:
            self.relative.check(index, where)
        if self.rope is not None:
            self.rope.check(where)
        if self.choice is not None:
            self.choice.check(index, where)
            turned = 0 if self.rope is None else self.rope.rotary_dim
            if self.choice.groups not in (1, self.num_kv_heads) or self.choice.keys.head_dim < turned:
                raise ModelError(
                    f"{where}: an indexer has keys of at least {turned} elements, and a choice for all "
                    f"{self.num_kv_heads} key/value heads or for each"
                )

    def heads(self, shard: Shard) -> tuple[range, range]:
        return shard.heads(self.num_heads, self.num_kv_heads, self.separable)

    def cache(self, shard: Shard) -> KVLayer:
        kept = 0 if self.back else len(self.heads(shard)[1])
        return KVLayer(kept, self.head_dim, self.scores.reach)

    def further(self, shard: Shard) -> tuple[KVLayer, ...]:
        return () if self.choice is None else self.choice.keys.cache()

    def operations(self, shard: Shard) -> int:
        return 4 * len(self.heads(shard)[0]) * self.head_dim

    def messages(self, shard: Shard) -> list[int]:
        heads = len(self.heads(shard)[0]) * self.head_dim
        return output_messages(shard, self.hidden_size, [heads]) if self.separable else []

    def make(self, source: WeightSource, path: str, index: int, shard: Shard) -> Attention:
        return Attention(self, source, f"{path}.attention", index, shard)


class Attention:
    """Keys and values of x go into the cache; each head's weighted values are projected back."""

    def __init__(
        self, config: AttentionConfig, source: WeightSource, path: str, index: int, shard: Shard
    ) -> None:
        self.config, self.index, self._shard = config, index, shard
        h, d, heads = config.head_dim, config.hidden_size, config.num_heads
        self._heads, kv = config.heads(shard)
        self._choice = None
        if config.choice is not None:
            self._choice = config.choice.make(source, f"{path}.indexer", kv)
        self.divided = not shard.whole and config.separable
        rows = {"q": (heads, self._heads), "k": (config.num_kv_heads, kv), "v": (config.num_kv_heads, kv)}
        pieces = [
            matrix_of(f"{path}.{name}", count * h, config.input_size or d, self._own(own, h))
            for name, (count, own) in rows.items()
        ]
        self.qkv = Linear(source, f"{path}.qkv", pieces[: 1 if config.back else 3], config.qkv_bias)
        norm = config.qk_norm
        self.q_norm = self.k_norm = self.v_norm = None
        if norm is not None:
            self.q_norm = head_norm(norm, source, f"{path}.q_norm", heads, self._heads, h)
        if norm is not None and not config.back:
            self.k_norm = head_norm(norm, source, f"{path}.k_norm", config.num_kv_heads, kv, h)
        if config.value_norm is not None and not config.back:
            self.v_norm = plain_norm(config.value_norm, h)
        self.scores = make_scores(config.scores, source, path, self._heads)
        self.relative = None
        if config.relative is not None:
            about = (heads, h), config.positions, config.scores.scale
            self.relative = config.relative.make(source, f"{path}.relative", *about)
        self.gate = None
        if config.gate is not None:
            each = h if config.gate == "elements" else 1
            gate = matrix_of(f"{path}.gate", heads * each, d, self._own(self._heads, each))
            self.gate = Linear(source, f"{path}.gate", [gate], config.gate_bias)
        width = heads * (config.value_dim or h)
        self.out_norm = (
            None if config.out_norm is None else Norm(config.out_norm, source, f"{path}.out_norm", width)
        )
        columns = range(self._heads.start * h, self._heads.stop * h)
        self.out = Output(
            source, f"{path}.out", (d, heads * h), columns, config.out_bias, shard, self.divided
        )

    def _own(self, heads: range, size: int) -> range | None:
        return range(heads.start * size, heads.stop * size) if self.divided else None

    def store(self, r: Recording, x: Value) -> tuple[Value, Value]:
        """Put keys and values of x into the cache; return q, k and v, and the queries normed and rotated."""
        g, config, count = r.g, self.config, len(self._heads)
        qkv = self.qkv(g, x)
        if config.clip is not None:
            qkv = g(Apply(qkv, Clamp(config.clip)))
        turn = r.angles(config.rope)
        if config.back:
            return qkv, g(PrepareQueries(qkv, count, turn, self.q_norm))
        norms = self.q_norm, self.k_norm, self.v_norm
        return qkv, g(StoreKV(qkv, self.index - r.first, count, turn, *norms))

    def __call__(self, r: Recording, x: Value) -> Value:
        """What `out` projects: each head's weighted values [T, N H]."""
        g, config, count = r.g, self.config, len(self._heads)
        qkv, q = self.store(r, x)
        if config.temperature is not None:
            q = g(Apply(q, config.temperature))
        added = None if self.relative is None else self.relative(g, q, qkv)
        about = self.index - config.back - r.first, count, self.scores, added
        if self._choice is None:
            y = g(Attend(q, *about))
        else:
            y = g(Attend(q, *about, *self._choice(r, x, x, self.index, config.rope)))
        if config.value_scale != 1.0:
            y = g(Scale(y, config.value_scale))
        if self.gate is not None:
            y = g(Multiply(y, self.gate(g, x, config.gate_activation)))
        if self.divided:
            y = self._shard.gather_heads(g, y, config.num_heads, config.num_kv_heads, config.head_dim)
        return y if self.out_norm is None else self.out_norm(g, y)
