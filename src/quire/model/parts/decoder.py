"""The decoder: an embedding, layers around a residual stream, a final norm and a head."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, cast

import msgspec

from quire.devices.graph import Graph, Recorder, record
from quire.devices.ops import Receive, Scale, SelectRows, Tap, Value
from quire.devices.protocol import KVDtype, KVSpec, Matrix, Routing
from quire.errors import ConfigError, ModelError
from quire.model.parts.bounds import MAX_EXPERTS, MAX_LAYERS, MAX_STATES, MAX_TABLE, MAX_WIDTHS, check_bounds
from quire.model.parts.embedding import Embedding, EmbeddingConfig, Head, HeadConfig
from quire.model.parts.layer import LayerConfig
from quire.model.parts.linear import Linear
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import Mixer, ModelAdditions
from quire.model.parts.source import Kept, Recording, Weights, WeightSource
from quire.model.shard import MOST_RANKS, WHOLE, Shard, even

if TYPE_CHECKING:
    from quire.model.parts.mixture import MixtureConfig


class DecoderConfig(msgspec.Struct, frozen=True):
    """A decoder-only transformer as data: a tree of the configs of its parts.

    `max_position` is the longest sequence. `bidirectional` attention sees the whole sequence; such a model runs on
    whole sequences only. Without a head, the logits are the final hidden states.
    """

    architecture: str
    max_position: int
    embedding: EmbeddingConfig
    layers: tuple[LayerConfig, ...]
    norm: NormConfig | None
    head: HeadConfig | None
    bidirectional: bool = False
    additions: ModelAdditions | None = None

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.embedding.hidden_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """The most query heads of a layer."""
        return max((len(mixer.heads(WHOLE)[0]) for mixer in self._mixers), default=0)

    @property
    def num_kv_heads(self) -> int:
        """The most key/value heads of a layer."""
        return max((len(mixer.heads(WHOLE)[1]) for mixer in self._mixers), default=0)

    @property
    def head_dim(self) -> int:
        """The longest key."""
        return max((mixer.cache(WHOLE).head_dim for mixer in self._mixers), default=1)

    @property
    def windows(self) -> list[int]:
        """The windows of the layers that have one."""
        scores = [mixer.scores for mixer in self._mixers]
        return [one.window for one in scores if one is not None and one.window is not None]

    @property
    def routings(self) -> list[Routing]:
        """The choices of experts of the layers that have any."""
        return [mixture.routing for mixture in self._mixtures]

    @property
    def segments(self) -> int:
        return self.embedding.segments

    @property
    def has_head(self) -> bool:
        return self.head is not None

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head is not None and self.head.tied

    @property
    def stream_width(self) -> int:
        """Elements of a token between two layers."""
        return self.hidden_size * (1 if self.additions is None else self.additions.streams)

    def for_length(self, length: int) -> DecoderConfig:
        """The model for sequences of at most `length` tokens, to which some ropes turn at other frequencies."""
        layers = []
        for layer in self.layers:
            mixer, rope = layer.mixer, None if layer.mixer is None else layer.mixer.rope
            if rope is not None and rope.for_length(length) != rope:
                changed: Any = msgspec.structs.replace(cast(Any, mixer), rope=rope.for_length(length))
                layer = msgspec.structs.replace(layer, mixer=changed)
            layers.append(layer)
        return msgspec.structs.replace(self, layers=tuple(layers))

    def with_spare_tokens(self, count: int) -> DecoderConfig:
        """The model with room for `count` tokens that adapters add. ConfigError if its tables cannot grow."""
        for missing, what in (
            (not self.has_head or self.bidirectional, "makes no text"),
            (self._reads_tokens or self._looks_up, "has a table of tokens for some layers"),
            (self.head is not None and self.head.cap is not None, "caps its logits"),
        ):
            if missing:
                raise ConfigError(
                    f"--lora-extra-vocab-size: {self.architecture} {what}: leave the option out"
                )
        size = self.vocab_size + count
        embedding = msgspec.structs.replace(self.embedding, vocab_size=size, spare_tokens=count)
        return msgspec.structs.replace(self, embedding=embedding)

    def check(self, where: str) -> None:
        """Raise ModelError, naming `where` and the field, for a model that no machine could hold or compute."""
        if not 1 <= self.num_layers <= MAX_LAYERS:
            raise ModelError(f"{where}: there must be from 1 to {MAX_LAYERS} layers, got {self.num_layers}")
        positions = self.embedding.positions
        if positions is not None and positions.rows > MAX_TABLE:
            raise ModelError(f"{where}: a table of {positions.rows} positions; at most {MAX_TABLE} are read")
        check_bounds(msgspec.structs.replace(self, layers=tuple(dict.fromkeys(self.layers))), where)
        experts = sum(routing.num_experts for routing in self.routings)
        if experts > MAX_EXPERTS:
            raise ModelError(f"{where}: {experts} experts in all layers; at most {MAX_EXPERTS} are read")
        for i, layer in enumerate(self.layers):
            layer.check(i, f"{where}: layer {i}")
            if layer.hidden_size != self.hidden_size:
                raise ModelError(f"{where}: layer {i} has another hidden_size than the embedding")
        if not self.parts_before(0):
            raise ModelError(
                f"{where}: a layer takes the choice of keys of an earlier one, and there is none"
            )
        kept = [state.shape for layer in self.layers for state in layer.cache(WHOLE, 1).states]
        if (elements := sum(map(prod, kept))) > MAX_STATES:
            raise ModelError(
                f"{where}: states of {elements} elements in all layers; at most {MAX_STATES} are read"
            )
        for before, after in pairwise((*self.layers, None)):
            if before is not None and before.carries and (after is None or after.mixture is not None):
                raise ModelError(f"{where}: a mixture that joins later needs a layer after it without one")
        columns = [n for layer in self.layers if layer.mlp is not None for n in layer.mlp.columns(False)]
        width = max([self.hidden_size, *columns])
        if width * self.num_layers > MAX_WIDTHS:
            raise ModelError(
                f"{where}: {self.num_layers} layers x their width, {width}, is more than {MAX_WIDTHS}"
            )

    def division(self, shard: Shard) -> Shard:
        """The share as the parts see it: ranks also gather if a part needs all inputs."""
        needed = any(layer.gathers for layer in self.layers)
        return msgspec.structs.replace(shard, exact=shard.exact or needed)

    def parts_before(self, layer: int) -> bool:
        """Whether a pipeline stage may begin with `layer`: nothing but the residual stream reaches across."""
        if layer and self.layers[layer - 1].carries:
            return False
        mixers = [(i, one.mixer) for i, one in enumerate(self.layers[layer:]) if one.mixer is not None]
        shares = next((one.shares for _, one in mixers if one.shares or one.index is not None), False)
        return not shares and all(one.back <= i for i, one in mixers)

    def stage(self, shard: Shard) -> range:
        """The layers of a stage. ConfigError: the model has too few layers, or none where it could be parted."""
        if shard.stages == 1:
            return range(self.num_layers)
        places = [i for i in range(1, self.num_layers) if self.parts_before(i)]
        if len(places) < shard.stages - 1:
            raise ConfigError(
                f"--pipeline-parallel-size {shard.stages}: {self.architecture} with {self.num_layers} layers can be "
                f"parted into at most {len(places) + 1} stages"
            )
        bounds = [0]
        for stage, wanted in enumerate(even(self.num_layers, shard.stages)[1:], 1):
            later = shard.stages - 1 - stage  # bounds that must still find a place
            free = [place for place in places if place > bounds[-1]]
            bounds.append(
                min(free[: len(free) - later], key=lambda place: (abs(place - wanted.start), place))
            )
        bounds.append(self.num_layers)
        return range(bounds[shard.stage], bounds[shard.stage + 1])

    def embeds(self, shard: Shard) -> bool:
        """Whether a stage looks tokens up in the embedding."""
        return shard.begins or self._reads_tokens

    def kv_spec(self, dtype: KVDtype, shard: Shard = WHOLE, stage: range | None = None) -> KVSpec:
        """The KV cache of a rank, or of the layers `stage`."""
        division, stage = self.division(shard), self.stage(shard) if stage is None else stage
        own, size = [self.layers[i].mixer for i in stage], self.head_dim
        layers = [self.layers[i].cache(division, size) for i in stage]
        for i, part in enumerate(own):
            if part is not None and part.back and part.scores is not None:  # its source keeps what it sees
                source = layers[i - part.back]
                reach = max(source.reach, part.scores.reach) if part.scores.reach else 0
                layers[i - part.back] = msgspec.structs.replace(source, reach=source.reach and reach)
        layers += [kept for i in stage for kept in self.layers[i].further(division)]
        alike = len(set(layers)) == 1 and not layers[0].reach and not layers[0].states
        return KVSpec(
            num_layers=len(layers),
            num_kv_heads=max(layer.num_kv_heads for layer in layers),
            head_dim=max(layer.head_dim for layer in layers),
            dtype=dtype,
            value_dim=layers[0].value_dim if alike else None,
            layers=None if alike else tuple(layers),
        )

    def further(self, layers: range) -> dict[int, range]:
        """The numbers of the cache layers that some of a stage's layers keep beside their own: they come last."""
        found, last = dict[int, range](), len(layers)
        for i in layers:
            if count := len(self.layers[i].further(WHOLE)):
                found[i] = range(last, last + count)
                last += count
        return found

    def messages(self, shard: Shard) -> list[int]:
        """The activations per token that a rank sends to each other one of its stage: one entry per message."""
        if shard.whole:
            return []
        division = self.division(shard)
        return [size for i in self.stage(shard) for size in self.layers[i].messages(division)]

    def sent_bytes(self, shard: Shard) -> int:
        """Bytes of activations that a rank sends to each other rank of its stage for one token, without logits."""
        return 4 * sum(self.messages(shard))

    def passed_bytes(self, shard: Shard) -> int:
        """Bytes of activations that a stage sends to the next one for one token."""
        return 0 if shard.ends else 4 * self.stream_width

    def check_share(self, shard: Shard) -> None:
        """Raise ConfigError, naming the sizes that fit, if the model cannot be divided so."""
        self.stage(shard)
        if shard.whole:
            return
        most = max((routing.num_experts for routing in self.routings), default=0)
        if shard.whole_experts and most < shard.size:
            raise ConfigError(
                f"--enable-expert-parallel: {self.architecture} has fewer than {shard.size} experts: leave it out"
            )
        if not self._fits(shard.size, shard.whole_experts):
            sizes = [str(n) for n in range(1, MOST_RANKS + 1) if self._fits(n, shard.whole_experts)]
            raise ConfigError(
                f"--tensor-parallel-size {shard.size}: {self.num_heads} heads with {self.num_kv_heads} key/value heads "
                f"can be divided among {', '.join(sizes)} ranks"
            )

    def _fits(self, size: int, whole_experts: bool) -> bool:
        heads = [map(len, mixer.heads(WHOLE)) for mixer in self._mixers if mixer.separable]
        columns = [self.vocab_size]
        for layer in self.layers:
            columns += [] if layer.mlp is None else layer.mlp.columns(whole_experts)
            columns += [] if layer.mixer is None else layer.mixer.columns()
        fits = all(n // g >= -(-size // g) for n, g in heads if g < size)
        return fits and all(count >= size for count in columns)

    @property
    def _mixers(self) -> list[Mixer]:
        return [layer.mixer for layer in self.layers if layer.mixer is not None]

    @property
    def _mixtures(self) -> list[MixtureConfig]:
        return [layer.mixture for layer in self.layers if layer.mixture is not None]

    @property
    def _reads_tokens(self) -> bool:
        return self.additions is not None and self.additions.reads_tokens

    @property
    def _looks_up(self) -> bool:
        added = (layer.additions for layer in self.layers)
        own = any(one is not None and one.reads_tokens for one in added)
        return own or any(m.hashed for m in self._mixtures)


class Decoder:
    """The parts of a model that a rank of a stage has, and their `weights` by path."""

    def __init__(self, config: DecoderConfig, source: WeightSource, shard: Shard = WHOLE) -> None:
        self.config, self.shard = config, shard
        division, kept, d = config.division(shard), Kept(source), config.hidden_size
        embeds, ends = config.embeds(shard), shard.ends
        tied = config.tied and shard.alone
        self.embedding = Embedding(config.embedding, kept, tied) if embeds else None
        stage, count = config.stage(shard), config.num_layers
        self.layers = {i: config.layers[i].make(kept, f"layers.{i}", (i, count), division) for i in stage}
        self.norm = None if config.norm is None or not ends else Norm(config.norm, kept, "norm", d)
        self._project = None
        if config.embedding.projected and ends:
            self._project = Linear.plain(kept, "project_out", config.embedding.width, d)
        self.head: Head | None = None
        if config.head is not None and ends:
            table = self.table if tied else None
            self.head = Head(config.head, config.embedding, kept, shard, table)
            kept.weights["head"] = self.head.weight
        self._additions = None if config.additions is None else config.additions.make(kept, config, shard)
        self.weights: Weights = kept.weights

    @property
    def table(self) -> Matrix:
        """The embedding. ModelError: another stage has it."""
        if self.embedding is None:
            raise ModelError("the embedding is in another pipeline stage")
        return self.embedding.table

    def with_head(self, head: Head) -> Decoder:
        """The same parts with another head."""
        changed = copy(self)
        changed.head, changed.shard = head, WHOLE
        return changed

    def graph(self, layers: range | None = None, taps: Sequence[int] = (), headless: bool = False) -> Graph:
        """The model, or the stage of it that computes `layers` and keeps the output of the layers `taps`.

        Only layers of the stage are tapped. With `headless` the last stage, too, gives the output of its last layer
        for all tokens. ModelError if `layers` or `taps` are not layers of the model.
        """
        config, count = self.config, self.config.num_layers
        layers = config.stage(self.shard) if layers is None else layers
        if not layers or layers.step != 1 or layers.start < 0 or layers.stop > count:
            raise ModelError(f"a stage must be a run of the model's {count} layers, got {layers}")
        if not all(0 <= tap < count for tap in taps):
            raise ModelError(f"only layers 0 to {count - 1} can be tapped, got {list(taps)}")
        own = tuple(sorted({tap for tap in taps if tap in layers}))
        for place in (layers.start, layers.stop):
            if 0 < place < count and not config.parts_before(place):
                raise ModelError(
                    f"the model cannot be parted before layer {place}: later layers read earlier ones"
                )
        ends = layers.stop == count and not headless
        hidden = partial(self._hidden, layers=layers, taps=own, ends=ends)
        if not ends:
            return record(hidden, None, config.vocab_size, config.stream_width, layers, own)
        if self.head is None:
            return record(hidden, self.logits, config.hidden_size, config.hidden_size, layers, own)
        return record(hidden, self.logits, config.vocab_size, self.head.weight.shape[1], layers, own)

    def logits(self, g: Recorder, hidden: Value) -> Value:
        """[L, D] -> logits [L, V], or the hidden states of a model without a head."""
        return g(Scale(hidden, 1.0)) if self.head is None else self.head(g, hidden)

    def _hidden(self, g: Recorder, layers: range, taps: tuple[int, ...], ends: bool) -> Value:
        """The step's tokens, or the previous stage's output -> final hidden states of the logit rows: [L, D].

        For a stage that does not end the model: the hidden states of all tokens [T, D].
        """
        r = Recording(g, layers.start, further=self.config.further(layers))
        added = self._additions
        x = g(Receive(self.config.stream_width)) if layers.start else self._embed(g)
        x = x if added is None else added.begin(r, x, self._embed)
        for index in layers:
            x = self.layers[index](r, x)
            if index in taps:
                g(Tap(x if added is None else added.active(g, x)))
        if not ends:
            return x
        x = g(SelectRows(x))
        x = x if added is None else added.end(g, x)
        if self.norm is not None:
            x = self.norm(g, x)
        return x if self._project is None else self._project(g, x)

    def _embed(self, g: Recorder) -> Value:
        if self.embedding is None:
            raise ModelError("the embedding is in another pipeline stage")
        return self.embedding(g)
