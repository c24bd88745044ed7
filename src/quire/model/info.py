"""ModelInfo: a model before its weights are read. Reading: how to read one that its files alone do not describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import msgspec

from quire.devices.protocol import KVDtype, KVScales, KVSpec
from quire.model.kv_scales import scaled_spec
from quire.model.parts.decoder import DecoderConfig
from quire.model.shard import WHOLE, Shard
from quire.weights.schemes import Quantization
from quire.weights.tensor import FloatDtype

if TYPE_CHECKING:
    from quire.model.pooling import HeadReader
    from quire.model.pooling_head import PoolingHead

AskedDtype = Literal["auto", "float32", "float16", "bfloat16"]
Limit = Annotated[int, msgspec.Meta(ge=1)]


class ModelShape(Protocol):
    """The facts about a model that an engine needs, whichever code computes it."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def bidirectional(self) -> bool: ...
    @property
    def segments(self) -> int: ...
    @property
    def has_head(self) -> bool: ...
    @property
    def windows(self) -> Sequence[int]: ...
    @property
    def stream_width(self) -> int: ...
    def kv_spec(self, dtype: KVDtype, shard: Shard = WHOLE) -> KVSpec: ...
    def division(self, shard: Shard) -> Shard: ...
    def stage(self, shard: Shard) -> range: ...
    def messages(self, shard: Shard) -> list[int]: ...
    def sent_bytes(self, shard: Shard) -> int: ...
    def passed_bytes(self, shard: Shard) -> int: ...


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits that the engine was built for; None if not given."""

    max_batch_size: Limit | None = None
    max_input_len: Limit | None = None
    max_seq_len: Limit | None = None


UNLIMITED = EngineLimits()


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read a model that its files alone do not describe.

    `architecture` replaces the config's own, `config` replaces single keys. With `dummy` the weights are random, and
    none are read. `spare_tokens` makes room for tokens that adapters add.
    """

    architecture: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    dummy: bool = False
    spare_tokens: int = 0


AS_IT_IS = Reading()


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that concern a model's weights.

    `dtype` "auto" keeps the matrices of a model that has them all in bfloat16, or all in float16; else it makes them
    float32. `quantized` rounds the matrices further, one by one as they are read. No sequence is longer than `max_len`.
    """

    dtype: AskedDtype = "auto"
    quantized: Quantization | None = None
    reading: Reading = AS_IT_IS
    max_len: int | None = None

    def applied(self, config: DecoderConfig) -> DecoderConfig:
        """The model with room for spare tokens, for sequences of the length that is asked for."""
        if self.reading.spare_tokens:
            config = config.with_spare_tokens(self.reading.spare_tokens)
        return config if self.max_len is None else config.for_length(self.max_len)


NOTHING = Asked()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model before its weights are read.

    `dtype` is the type of its values, `quantized` the types of its matrices if they are quantized. `weight_bytes` is
    the size of the values in `dtype` (vectors in float32). `generation` is generation_config.json, or empty.
    `directory` (or a GGUF file) also holds the tokenizer. `pooling` makes vectors of hidden states if the model defines
    it, and `head_of` reads it from another checkpoint of the model. `limits` come from an engine's build. A `foreign`
    model runs on the backend of its own library. `kv_scales` has the scales of each layer's keys and values, if the
    checkpoint has any.
    """

    directory: Path
    spec: ModelShape
    dtype: FloatDtype
    num_parameters: int
    weight_bytes: int
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]
    limits: EngineLimits = UNLIMITED
    pooling: PoolingHead | None = None
    quantized: Quantization | None = None
    foreign: bool = False
    head_of: HeadReader | None = field(default=None, compare=False)
    kv_scales: tuple[KVScales | None, ...] = ()

    def kv_spec(self, dtype: KVDtype, shard: Shard = WHOLE) -> KVSpec:
        """The KV cache of a rank; in FP8 with the scales that came along with the weights."""
        kv = self.spec.kv_spec(dtype, shard)
        return (
            scaled_spec(kv, self.spec, self.kv_scales, shard) if isinstance(self.spec, DecoderConfig) else kv
        )
