"""The packed weights of a decoder, part by part. Knows ArchSpec and matrices; computes nothing."""

from __future__ import annotations

import msgspec

from quire.devices.protocol import XIELU, Expert, FloatArray, Matrix, Norm
from quire.errors import ModelError
from quire.model.shard import Shard
from quire.model.spec import ArchSpec


class LatentWeights(msgspec.Struct, frozen=True):
    """Latent attention. N heads, C = kv_rank, R = rope_dim; `q_down` and `q_norm` are None without a query rank.

    Biases are those of the down projections.

    kv_down [C + R, D]; q_nope [N nope_dim, .] and q_rope [N R, .] of the query's rank or D. By head: `keys` [C,
    nope_dim] takes a query to the latent, `values` [value_dim, C] takes the latent to a value.
    """

    q_down: Matrix | None
    q_down_bias: FloatArray | None
    q_norm: Norm | None
    q_nope: Matrix
    q_rope: Matrix
    kv_down: Matrix
    kv_down_bias: FloatArray | None
    kv_norm: Norm
    keys: tuple[Matrix, ...]
    values: tuple[Matrix, ...]


class RelativeWeights(msgspec.Struct, frozen=True):
    """By head, [B, H]: keys and queries made of the embeddings of B distances; None if not in use."""

    keys: tuple[Matrix, ...] | None
    queries: tuple[Matrix, ...] | None


class AttentionWeights(msgspec.Struct, frozen=True):
    """N and G query and key/value heads, H head_dim. qkv [(N + 2 G) H, D] is q, k and v stacked (None where latent)."""

    qkv: Matrix | None
    qkv_bias: FloatArray | None
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: FloatArray | None
    latent: LatentWeights | None
    gate: Matrix | None
    out_norm: Norm | None
    out: Matrix
    out_bias: FloatArray | None
    v_norm: Norm | None = None
    position_bias: FloatArray | None = None
    relative: RelativeWeights | None = None


class MLPWeights(msgspec.Struct, frozen=True):
    """I intermediate size. `up` is [I, D], or a gated matrix [2 I, D] of gate and up; down is [D, I].

    With `gate` [I, D] both are apart, and the gate is sparse.
    """

    up: Matrix
    up_bias: FloatArray | None
    xielu: XIELU | None
    down_norm: Norm | None
    down: Matrix
    down_bias: FloatArray | None
    gate: Matrix | None = None


class BesideWeights(msgspec.Struct, frozen=True):
    """A mixture beside an MLP (MoESpec.beside): norms before the router, before the experts, and after the MLP."""

    router_norm: Norm
    norm: Norm
    mlp_norm: Norm
    expert_scales: FloatArray


class MoEWeights(msgspec.Struct, frozen=True):
    """router [E, D], or [E + 1, D] with a shared expert that has a gate; the shared expert is the last.

    An expert that is None returns its input.
    """

    router: Matrix
    router_bias: FloatArray | None
    correction: FloatArray | None
    experts: tuple[Expert | None, ...]
    norm: Norm | None
    beside: BesideWeights | None = None


class PerLayerWeights(msgspec.Struct, frozen=True):
    """P elements by layer. model [P, D] projects the embedding; gate [P, D] and out [D, P]."""

    model: Matrix
    norm: Norm
    gate: Matrix
    out: Matrix
    post_norm: Norm


class LaurelWeights(msgspec.Struct, frozen=True):
    """A residual of rank R: x + norm(right(left(x))), with left [R, D] and right [D, R]."""

    left: Matrix
    right: Matrix
    norm: Norm


class AltUpWeights(msgspec.Struct, frozen=True):
    """Of one layer, with S streams: router [S, D], predict [S S, S], correct [S, S], scale [D]."""

    router_norm: Norm
    router: Matrix
    predict: Matrix
    correct: Matrix
    scale: FloatArray


class LayerWeights(msgspec.Struct, frozen=True):
    """One layer: the parts that its place in the spec calls for; exactly one of `mlp` and `moe`.

    Norms come before attention and MLP, or after them (on their output, or on the sum if the spec says so).
    """

    attention_norm: Norm | None
    attention: AttentionWeights | None
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: MLPWeights | None
    moe: MoEWeights | None
    mlp_post_norm: Norm | None
    per_layer: PerLayerWeights | None = None
    scale: FloatArray | None = None
    laurel: LaurelWeights | None = None
    altup: AltUpWeights | None = None


ELSEWHERE = LayerWeights(None, None, None, None, None, None, None)
"""Stands for a layer of another pipeline stage."""


class DecoderWeights(msgspec.Struct, frozen=True):
    """`head` is `embedding` itself if the spec ties them: both [V, D]; None if the model has no head.

    A pipeline stage holds its own layers, with ELSEWHERE in place of the others; the first stage has the embedding, the
    last one norm and head. `layer_inputs` [V, layers P], the inputs of all layers, are in every stage. Of S streams,
    `spread` [(S - 1) D, D] makes all but the first, at the beginning; `merge`, S - 1 matrices [D, D], ends them.
    """

    embedding: Matrix | None
    positions: Matrix | None
    project_in: Matrix | None
    embedding_norm: Norm | None
    layers: tuple[LayerWeights, ...]
    norm: Norm | None
    project_out: Matrix | None
    head: Matrix | None
    head_bias: FloatArray | None
    spread: Matrix | None = None
    merge: tuple[Matrix, ...] | None = None
    layer_inputs: Matrix | None = None

    @property
    def table(self) -> Matrix:
        """The embedding. ModelError: another stage has it."""
        if self.embedding is None:
            raise ModelError("the embedding is in another pipeline stage")
        return self.embedding

    def of_stage(self, spec: ArchSpec, shard: Shard) -> DecoderWeights:
        """What a stage needs of the whole weights."""
        own, structs = shard.layers(spec), msgspec.structs
        if len(own) == spec.num_layers:
            return self
        layers = tuple(layer if i in own else ELSEWHERE for i, layer in enumerate(self.layers))
        kept = structs.replace(self, layers=layers)
        if not shard.embeds(spec):
            kept = structs.replace(kept, embedding=None, positions=None, project_in=None, embedding_norm=None)
        if not shard.begins:
            kept = structs.replace(kept, spread=None)
        if shard.ends:
            return kept
        return structs.replace(kept, norm=None, project_out=None, head=None, head_bias=None, merge=None)

    def check(self, spec: ArchSpec) -> None:
        """Raise ModelError if the parts are not those that the spec asks for. Shapes are checked by the device."""
        if len(self.layers) != spec.num_layers:
            raise ModelError(
                f"there are weights of {len(self.layers)} layers, the model has {spec.num_layers}"
            )
        if (self.head is not None) != spec.has_head or (self.positions is None) != (
            spec.position_offset is None
        ):
            raise ModelError("the head or the positions are not those of the model")
        for i, layer in enumerate(self.layers):
            sparse, latent, attends = spec.is_sparse(i), spec.latent is not None, spec.attends(i)
            if (layer.mlp is not None, layer.moe is not None) != (spec.is_dense(i), sparse):
                raise ModelError(f"layer {i} has not the mixture or the MLP that the model has there")
            if (layer.attention is not None) != attends:
                raise ModelError(f"layer {i} has not the attention that the model has there")
            if layer.attention is None:
                continue
            if (layer.attention.qkv is None, layer.attention.latent is not None) != (latent, latent):
                raise ModelError(f"layer {i} has not the attention that the model has there")
            if layer.attention_norm is None and not spec.bare_first and spec.placement not in ("post", "sum"):
                raise ModelError(f"layer {i} has no norm before its attention")
