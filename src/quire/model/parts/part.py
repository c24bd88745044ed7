"""Kinds of parts by name, and what each role of a part must tell.

A new kind is a config and its part in a module of this folder, and an entry in PARTS. The module is imported when a
model has such a part.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from quire.devices.graph import Recorder
from quire.devices.ops import Value
from quire.devices.protocol import KVLayer, Routing, StateSpec
from quire.model.parts.source import Recording, WeightSource
from quire.model.shard import Shard

if TYPE_CHECKING:
    from quire.model.parts.decoder import DecoderConfig
    from quire.model.parts.layer import Layer, LayerConfig
    from quire.model.parts.linear import Output
    from quire.model.parts.rope import RopeSpec
    from quire.model.parts.scores import ScoresConfig

# The class of a kind's config, whose tag is the kind, in its module.
PARTS = {
    "attention": "attention:AttentionConfig",
    "latent": "latent:LatentConfig",
    "shared_block": "shared_block:SharedBlockConfig",
    "embedded": "shared_block:EmbeddedConfig",
    "convolution": "convolution:ConvolutionConfig",
    "delta": "delta:DeltaConfig",
    "state_space": "state_space:StateSpaceConfig",
    "selective": "selective:SelectiveConfig",
    "lightning": "lightning:LightningConfig",
    "gated_recurrence": "gated_recurrence:GatedRecurrenceConfig",
    "relative": "relative:RelativeConfig",
    "compressed": "compressed:CompressedConfig",
    "indexer": "indexer:IndexerConfig",
    "mlp": "mlp:MLPConfig",
    "mixture": "mixture:MixtureConfig",
    "gemma3n": "gemma3n:LayerExtrasConfig",
    "streams": "gemma3n:ModelExtrasConfig",
    "hyper": "streams:HyperConfig",
    "gated_streams": "streams:GatedStreamsConfig",
    "ngrams": "ngrams:NgramsConfig",
    "stream_ends": "streams:StreamEndsConfig",
}


class Part:
    """The config of a part, a struct tagged with its kind."""

    __slots__ = ()

    @property
    def gathers(self) -> bool:
        """Whether ranks must gather inputs of a projection in place of adding outputs."""
        return False

    def check(self, index: int, where: str) -> None:
        """Raise ModelError, naming `where`, for sizes that do not fit each other in layer `index`."""


class Index(msgspec.Struct, frozen=True):
    """What choosing costs: `operations` for a query and an index key, each of which stands for `every` positions.

    A query sees at most `most` of its positions, or of the entries in the cache layer `entries` of Mixer.further.
    """

    operations: int = 0
    every: int = 1
    most: int | None = None
    entries: int | None = None


class Mixer(Part):
    """What lets the tokens of a sequence see each other: attention, or a recurrence."""

    __slots__ = ()

    @property
    def scores(self) -> ScoresConfig | None:
        """The positions that a query sees; None: it reads no keys."""
        return None

    @property
    def rope(self) -> RopeSpec | None:
        """The rotation of queries and keys."""
        return None

    @property
    def back(self) -> int:
        """The distance of the earlier layer whose keys and values it reads in place of its own; 0: it has its own."""
        return 0

    @property
    def index(self) -> Index | None:
        """How it chooses what a query sees; None: it sees all that `scores` allow, or `shares` a choice."""
        return None

    @property
    def shares(self) -> bool:
        """Whether queries see the keys that an earlier mixer chose last."""
        return False

    @property
    def separable(self) -> bool:
        """Whether ranks can divide it by heads: nothing looks at all heads together."""
        return False

    @property
    def made_of(self) -> tuple[Mixer, ...]:
        """The mixers inside it."""
        return ()

    @property
    def scaled_heads(self) -> int:
        """The heads whose cached keys and values may have scales."""
        return 0

    @property
    def heads_apart(self) -> bool:
        """Whether each query head has values of its own, each row of which makes one input of the projection."""
        return False

    def heads(self, shard: Shard) -> tuple[range, range]:
        """The query and key/value heads of a rank."""
        return range(0), range(0)

    def cache(self, shard: Shard) -> KVLayer:
        """What a rank keeps per token and per sequence."""
        raise NotImplementedError

    def further(self, shard: Shard) -> tuple[KVLayer, ...]:
        """What a rank keeps in cache layers beside the layer's own (Recording.further)."""
        return ()

    def columns(self) -> list[int]:
        """The inner sizes that ranks divide, beside heads."""
        return []

    def operations(self, shard: Shard) -> int:
        """The operations of a rank for a query and a position that it sees."""
        return 0

    def messages(self, shard: Shard) -> list[int]:
        """The activations per token that a rank sends to each other one of its stage: one entry per message."""
        return []

    def make(self, source: WeightSource, path: str, index: int, shard: Shard) -> MixerPart:
        """Read the part of layer `index`, which lies at `path`."""
        raise NotImplementedError


class MixerPart(Protocol):
    """Makes what the projection `out` reads. `divided`: each rank has a share of it."""

    out: Output
    divided: bool

    def __call__(self, r: Recording, x: Value) -> Value: ...


class DistanceScores(Part):
    """What attention adds to scores by the distance of query and key."""

    __slots__ = ()

    def make(
        self, source: WeightSource, path: str, sizes: tuple[int, int], positions: int, scale: float
    ) -> DistanceScoresPart:
        """Read the part of attention with `sizes` heads and elements of a head, for at most `positions` tokens."""
        raise NotImplementedError


class DistanceScoresPart(Protocol):
    def __call__(self, g: Recorder, q: Value, qkv: Value) -> Value: ...


class FeedForward(Part):
    """What a layer computes for each token alone: an MLP, or a mixture of experts."""

    __slots__ = ()

    @property
    def routing(self) -> Routing | None:
        """The choice of experts, if there are any."""
        return None

    @property
    def carries(self) -> bool:
        """Whether a result joins the residual stream after the next layer."""
        return False

    def columns(self, whole_experts: bool) -> list[int]:
        """The inner sizes that ranks divide."""
        raise NotImplementedError

    def messages(self, shard: Shard) -> list[int]:
        """As of a Mixer; the last is that of `out`, if it has one."""
        raise NotImplementedError

    def make(self, source: WeightSource, path: str, shard: Shard) -> FeedForwardPart:
        """Read the part of the layer at `path`."""
        raise NotImplementedError


class FeedForwardPart(Protocol):
    def compute(self, r: Recording, x: Value, stream: Value) -> tuple[Value, Output | None]:
        """The result for `x`, the normed `stream`, or what a projection makes the result of, and that projection."""


class Streams(Part):
    """How attention and MLP of a layer work on several residual streams."""

    __slots__ = ()

    @property
    def layer(self) -> type[Layer]:
        """The class of the layer."""
        raise NotImplementedError

    def check_layer(self, layer: LayerConfig, where: str) -> None:
        """Raise ModelError, naming `where`, for a layer that cannot have several streams."""


class LayerAdditions(Part):
    """What a few families add around a layer."""

    __slots__ = ()

    @property
    def reads_tokens(self) -> bool:
        """Whether the layer looks the step's tokens up in tables."""
        return False

    def states(self, size: int) -> tuple[StateSpec, ...]:
        """What it keeps of each sequence, after the layer's mixers; the hidden state has `size` elements."""
        return ()

    def make(
        self, source: WeightSource, path: str, place: tuple[int, int], size: int, states: int
    ) -> LayerAdditionsPart:
        """Read the part of a layer by its index and the number of layers; `states` is the number of its first state."""
        raise NotImplementedError


class LayerAdditionsPart(Protocol):
    def around(self, r: Recording, x: Value, compute: Callable[[Recording, Value], Value]) -> Value:
        """The stream, or all streams, after the layer, which `compute` makes of one stream."""

    def beside(self, g: Recorder, after: Value, normed: Value) -> Value:
        """The stream after attention, which read `normed`."""


class ModelAdditions(Part):
    """What a few families add around all layers."""

    __slots__ = ()

    @property
    def streams(self) -> int:
        """The number of residual streams."""
        return 1

    @property
    def reads_tokens(self) -> bool:
        """Whether layers look tokens up in a table."""
        return False

    def make(self, source: WeightSource, model: DecoderConfig, shard: Shard) -> ModelAdditionsPart:
        """Read a rank's part."""
        raise NotImplementedError


class ModelAdditionsPart(Protocol):
    def begin(self, r: Recording, x: Value, embed: Callable[[Recorder], Value]) -> Value:
        """The streams before the first layer of a stage, which has `x` from the embedding or from another stage."""

    def active(self, g: Recorder, x: Value) -> Value:
        """The stream that layers compute."""

    def end(self, g: Recorder, x: Value) -> Value:
        """The hidden state of the last streams."""


def kind_of(config: Part) -> str:
    """The kind of a part."""
    return str(cast(msgspec.Struct, config).__struct_config__.tag)


def config_class(kind: str) -> Any:
    """Load the class of a kind's config."""
    module, _, name = PARTS[kind].partition(":")
    return getattr(importlib.import_module(f"quire.model.parts.{module}"), name)


def config_of(role: type, value: Any) -> Any:
    """Make a part's config from its plain form, as msgspec's `dec_hook`. ValidationError: there is no such kind."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not issubclass(role, Part) or not isinstance(kind, str) or kind not in PARTS:
        raise msgspec.ValidationError(f"there is no part of the kind {kind!r:.80}")
    return msgspec.convert(value, config_class(kind), dec_hook=config_of)
