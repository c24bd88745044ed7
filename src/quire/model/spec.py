"""ArchSpec: a decoder-only transformer as data. Knows no checkpoint, no backend and no family by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from quire.devices.protocol import Activation, KVDtype, KVSpec, NormKind, Routing, Temperature
from quire.errors import ModelError
from quire.model.parts.bounds import (
    MAX_HEAD_DIM,
    MAX_LATENT,
    MAX_LAYERS,
    MAX_NUMBER,
    MAX_POSITION,
    MAX_REACH,
    MAX_STREAMS,
    MAX_TABLE,
)
from quire.model.parts.layer import Placement
from quire.model.parts.norm import QKNorm
from quire.model.parts.rope import RopeSpec

if TYPE_CHECKING:
    from quire.model.parts.gemma3n import AltUpConfig, LayerInputsConfig
    from quire.model.parts.relative import RelativeConfig

# MOST is the largest size that is read, by field.
MOST = {
    "vocab_size": 1 << 23,
    "hidden_size": 1 << 20,
    "num_layers": MAX_LAYERS,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": MAX_HEAD_DIM,
    "intermediate_size": 1 << 20,
    "max_position": MAX_POSITION,
}
BY_LAYER = (
    "windows",
    "layer_ropes",
    "chunks",
    "temperatures",
    "qk_norm_layers",
    "sink_layers",
    "o_bias_layers",
    "shapes",
    "kv_sources",
    "keys_as_values",
    "gate_cutoffs",
    "gate_limits",
)


class LatentSpec(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): kv_rank + rope_dim cached elements per token.

    `q_rank` is None if queries come from the hidden state directly. `norm_eps` belongs to the latents' norms. Queries
    and latents are multiplied by `q_scale` and `kv_scale` after their norms. `bias`: both down projections have one.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6
    q_scale: float = 1.0
    kv_scale: float = 1.0
    bias: bool = False

    def check(self, where: str) -> None:
        """Raise ModelError, naming `where` and the field, for sizes that no model has."""
        for name in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim"):
            size = getattr(self, name)
            if size is not None and not 1 <= size <= MAX_LATENT:
                raise ModelError(f"{where}: {name} must be from 1 to {MAX_LATENT}, got {size}")
        if self.rope_dim % 2:
            raise ModelError(f"{where}: rope_dim must be even, got {self.rope_dim}")


class MoESpec(msgspec.Struct, frozen=True):
    """Mixture of experts in the layers where `layers` is true; the others have the MLP of ArchSpec.

    `bias`: the router and the experts have biases; `correction`: the choice adds its own bias. `scale` multiplies
    the sum of all experts, including the shared one; with `norm` a norm follows. The last `zero_experts` of
    routing.num_experts return their input. With `beside` a layer also has the MLP: both read the residual stream
    through norms of their own, the router through one without weights, and their results are normed and added; the
    weight of each expert has a learned scale (Gemma 4). `score_cap` caps the router's scores. With `shortcut` a layer
    also has the MLP, and the mixture's result joins the residual stream after the layer that follows (LongCat).
    `limits`, by layer, bound the factors of the experts' gated products (0: none); ArchSpec's bound the shared one's.
    """

    routing: Routing
    intermediate_size: int
    layers: tuple[bool, ...]
    shared_intermediate_size: int = 0
    bias: bool = False
    correction: bool = False
    scale: float = 1.0
    norm: bool = False
    zero_experts: int = 0
    beside: bool = False
    score_cap: float | None = None
    shortcut: bool = False
    limits: tuple[float, ...] | None = None


class LayerShape(msgspec.Struct, frozen=True):
    """The sizes of one layer. Without heads it has no attention, with an intermediate size of 0 no MLP."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int


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
    def kv_spec(self, dtype: KVDtype) -> KVSpec: ...


class ArchSpec(msgspec.Struct, frozen=True):
    """A residual stream between an embedding and a head, with attention and an MLP in each layer.

    `windows` has one entry per layer: the sliding window in tokens, or None for full attention. If given,
    `layer_ropes` has one entry per layer and replaces `rope` (None: a layer without positions), and `chunks` gives the
    length of attention chunks. `position_offset` belongs to a learned position table; `embedding_size` is the
    embedding's width if it is projected to hidden_size. Residual branches are multiplied by residual_multiplier,
    logits by logit_scale.

    Encoders: `bidirectional` attention sees the whole sequence, or from window - 1 positions before to as many after;
    such a model runs on whole sequences only. With `segments` the vocabulary has each token once per segment; its
    row is the sum of the token's and the segment's embedding (`segment_rows` in the checkpoint). `bare_first`: the
    first layer has no norm before its attention. Without a head, the logits are the final hidden states.
    `position_buckets`: heads add a value of their own to scores by the bucket of the distance (rope.position_buckets).

    `sinusoid`: the position table is computed, its frequencies spaced over that many steps (half the hidden size).
    `norm_weight`, `qk_norm_weight`: norms have weights (else 1). `inner_norms`: a norm before the projections that end
    attention and MLP. `xielu`: the activation, with parameters of its own in each layer. `attention_gate`: what heads
    gather is multiplied by a sigmoid of the layer's input, by element or by head. `clip_qkv` bounds queries, keys and
    values. `temperatures` of queries, norms of queries and keys, sinks, and the bias of attention's result may be on
    some layers alone.

    `shapes`, if given, has the sizes of each layer; the spec's own are then the largest. `kv_sources` names the
    layer whose keys and values each layer reads: itself, or an earlier one. `value_dim`: values are shorter than keys
    (they are padded in the cache). `value_scale` multiplies values; `value_norm`: they are normed, without weights.
    `keys_as_values`: layers whose values are their keys before norm and rope. `layer_scale`: the stream is multiplied
    by a number after each layer. `gate_activation` belongs to the attention gate. `laurel_rank`: a low-rank residual
    of this rank beside attention (Menghani et al. 2024, arXiv:2411.07501). `gate_cutoffs`, by layer: the MLP's gate
    keeps only what exceeds its mean by this many standard deviations (SparseGELU). `gate_limits`, by layer, bound the
    factors of the MLP's gated product (0: none).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm: NormKind
    norm_eps: float
    activation: Activation
    rope: RopeSpec | None
    attention_scale: float
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    tie_embeddings: bool = False
    placement: Placement = "pre"
    norm_bias: bool = False
    qk_norm_bias: bool = False
    final_norm: bool = True
    gated: bool = True
    head_bias: bool = False
    layer_ropes: tuple[RopeSpec | None, ...] | None = None
    alibi: Literal["scores", "scaled"] | None = (
        None  # "scaled": the slopes too are multiplied by attention_scale
    )
    position_offset: int | None = None
    embedding_size: int | None = None
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    attention_cap: float | None = None
    sinks: bool = False
    chunks: tuple[int | None, ...] | None = None
    logit_scale: float = 1.0
    logit_cap: float | None = None
    latent: LatentSpec | None = None
    moe: MoESpec | None = None
    bidirectional: bool = False
    segments: int = 0
    segment_rows: int = 0
    position_buckets: int | None = None
    bare_first: bool = False
    has_head: bool = True
    sinusoid: Literal["half", "half_less_one"] | None = None
    norm_weight: bool = True
    inner_norms: bool = False
    xielu: bool = False
    attention_gate: Literal["elements", "heads"] | None = None
    clip_qkv: float | None = None
    temperatures: tuple[Temperature | None, ...] | None = None
    qk_norm_after_rope: bool = False
    qk_norm_weight: bool = True
    qk_norm_eps: float | None = None
    qk_norm_layers: tuple[bool, ...] | None = None
    sink_layers: tuple[bool, ...] | None = None
    o_bias_layers: tuple[bool, ...] | None = None
    shapes: tuple[LayerShape, ...] | None = None
    kv_sources: tuple[int, ...] | None = None
    value_dim: int | None = None
    value_scale: float = 1.0
    value_norm: bool = False
    keys_as_values: tuple[bool, ...] | None = None
    layer_scale: bool = False
    gate_activation: Activation = "sigmoid"
    per_layer: LayerInputsConfig | None = None
    altup: AltUpConfig | None = None
    laurel_rank: int | None = None
    gate_cutoffs: tuple[float | None, ...] | None = None
    relative: RelativeConfig | None = None
    gate_limits: tuple[float, ...] | None = None

    def check(self, where: str) -> None:
        """Raise ModelError, naming `where` and the field, for a model that no machine could hold or compute.

        The bounds keep all that is derived from sizes small until a checkpoint's tensors confirm them.
        """
        for name, most in MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ModelError(f"{where}: {name} must be from 1 to {most}, got {getattr(self, name)}")
        for name, product, most in (
            ("num_attention_heads x head_dim", self.num_heads * self.head_dim, 1 << 22),
            ("num_hidden_layers x their width", self.num_layers * self._width(), 1 << 25),
            ("num_experts x their width", self._num_experts() * self._expert_width(), 1 << 24),
            ("num_hidden_layers x num_experts", self.num_layers * self._num_experts(), 1 << 17),
        ):
            if product > most:
                raise ModelError(f"{where}: {name} is {product}; the most that is read is {most}")
        if self.latent is None and self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{where}: {self.num_heads} heads are not a multiple of {self.num_kv_heads} key/value heads"
            )
        self._check_layers(where)
        self._check_shapes(where)
        if self.position_buckets is not None and not 4 <= self.position_buckets <= 256:
            raise ModelError(f"{where}: position_buckets must be from 4 to 256, got {self.position_buckets}")
        if self.relative is not None and not 2 <= self.relative.span <= self.relative.reach <= MAX_REACH:
            raise ModelError(
                f"{where}: scores of distances need from 2 to {MAX_REACH} of them: {self.relative}"
            )
        if self.relative is not None and self.max_position > MAX_REACH:
            raise ModelError(f"{where}: distances of {self.max_position} positions; at most {MAX_REACH}")
        if self.position_offset is not None and self.max_position > MAX_TABLE:
            raise ModelError(
                f"{where}: a table of {self.max_position} positions; at most {MAX_TABLE} are read"
            )
        if self.latent is not None:
            self.latent.check(where)
        for rope in {self.rope, *(self.layer_ropes or ())}:
            if rope is not None:
                rope.check(where)
        for name, value in _numbers(self):
            if not math.isfinite(value) or abs(value) > MAX_NUMBER:
                raise ModelError(f"{where}: {name} must be a number of at most {MAX_NUMBER}, got {value}")

    def _check_layers(self, where: str) -> None:
        given = {name: getattr(self, name) for name in BY_LAYER} | {
            "moe.layers": self.moe and self.moe.layers,
            "moe.limits": self.moe and self.moe.limits,
        }
        for name, values in given.items():
            if values is not None and len(values) != self.num_layers:
                raise ModelError(f"{where}: {name} has {len(values)} entries for {self.num_layers} layers")
        shortcuts = self.moe is not None and self.moe.shortcut
        if shortcuts and any(self.is_sparse(i) and self.is_sparse(i + 1) for i in range(self.num_layers - 1)):
            raise ModelError(f"{where}: a layer after one whose mixture joins later cannot have a mixture")
        if shortcuts and self.is_sparse(self.num_layers - 1):
            raise ModelError(f"{where}: the last layer's mixture has no layer after which it could join")
        for name in ("windows", "chunks"):
            if not all(size is None or 1 <= size <= MAX_POSITION for size in getattr(self, name) or ()):
                raise ModelError(f"{where}: {name} must be at least 1 token and at most {MAX_POSITION}")

    def _check_shapes(self, where: str) -> None:
        """Check per-layer sizes: none exceeds the model's, heads divide evenly, KV sources store KV."""
        for i in range(self.num_layers if self.shapes is not None or self.kv_sources is not None else 0):
            shape, source = self.shape(i), self.kv_source(i)
            most = self.num_heads, self.num_kv_heads, self.head_dim, self.intermediate_size
            sizes = msgspec.structs.astuple(shape)
            if any(not 0 <= size <= top for size, top in zip(sizes, most, strict=True)) or shape.head_dim < 1:
                raise ModelError(f"{where}: layer {i} has sizes {sizes}; the model's are {most}")
            if shape.num_heads and (not shape.num_kv_heads or shape.num_heads % shape.num_kv_heads):
                raise ModelError(
                    f"{where}: layer {i}: {shape.num_heads} heads for {shape.num_kv_heads} key/value heads"
                )
            if not 0 <= source <= i or self.kv_source(source) != source:
                raise ModelError(f"{where}: layer {i} cannot read the keys of layer {source}")
        if self.value_dim is not None and not 1 <= self.value_dim <= self.head_dim:
            raise ModelError(f"{where}: values of {self.value_dim} elements beside keys of {self.head_dim}")
        if self.per_layer is not None and not 1 <= self.per_layer.size <= MAX_LATENT:
            raise ModelError(f"{where}: inputs by layer must have from 1 to {MAX_LATENT} elements")
        if self.laurel_rank is not None and not 1 <= self.laurel_rank <= MAX_LATENT:
            raise ModelError(f"{where}: laurel_rank must be from 1 to {MAX_LATENT}, got {self.laurel_rank}")
        if self.altup is not None and not 0 <= self.altup.active < self.altup.streams <= MAX_STREAMS:
            raise ModelError(
                f"{where}: at most {MAX_STREAMS} streams, one of which is active; got {self.altup}"
            )

    def _expert_width(self) -> int:
        return (
            max(self.moe.intermediate_size, self.moe.shared_intermediate_size) if self.moe is not None else 1
        )

    def _width(self) -> int:
        return max(self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim)

    def _num_experts(self) -> int:
        return self.moe.routing.num_experts if self.moe is not None else 1

    @property
    def parallel(self) -> bool:
        return self.placement in ("parallel", "parallel_two")

    def rope_of(self, layer: int) -> RopeSpec | None:
        return self.rope if self.layer_ropes is None else self.layer_ropes[layer]

    def shape(self, layer: int) -> LayerShape:
        if self.shapes is not None:
            return self.shapes[layer]
        return LayerShape(self.num_heads, self.num_kv_heads, self.head_dim, self.intermediate_size)

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        return layer if self.kv_sources is None else self.kv_sources[layer]

    def attends(self, layer: int) -> bool:
        return self.shape(layer).num_heads > 0

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has an MLP: alone, or beside a mixture."""
        both = self.moe is not None and (self.moe.beside or self.moe.shortcut)
        return (both or not self.is_sparse(layer)) and self.shape(layer).intermediate_size > 0

    def gate_cutoff(self, layer: int) -> float | None:
        return None if self.gate_cutoffs is None else self.gate_cutoffs[layer]

    def gate_limit(self, layer: int) -> float:
        return 0.0 if self.gate_limits is None else self.gate_limits[layer]

    def norms_qk(self, layer: int) -> bool:
        return self.qk_norm is not None and (self.qk_norm_layers is None or self.qk_norm_layers[layer])

    def has_sinks(self, layer: int) -> bool:
        return self.sinks and (self.sink_layers is None or self.sink_layers[layer])

    def has_out_bias(self, layer: int) -> bool:
        return self.o_bias and (self.o_bias_layers is None or self.o_bias_layers[layer])

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]


def _numbers(spec: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the name and value of each float in a spec and in the specs inside it."""
    if isinstance(spec, float):
        yield path, spec
    elif isinstance(spec, msgspec.Struct):
        for field in spec.__struct_fields__:
            yield from _numbers(getattr(spec, field), f"{path}.{field}" if path else field)
    elif isinstance(spec, tuple):
        for i, value in enumerate(spec):
            yield from _numbers(value, f"{path}[{i}]")
