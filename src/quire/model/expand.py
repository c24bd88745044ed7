"""Expands a family's description, an ArchSpec, to the tree of configs that everything after it uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.lazy import Lazy
from quire.model.families import read_config
from quire.model.families.names import TensorNames
from quire.model.parts.attention import AttentionConfig
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.embedding import EmbeddingConfig, HeadConfig, PositionsConfig
from quire.model.parts.layer import LayerConfig
from quire.model.parts.mlp import MLPConfig
from quire.model.parts.norm import HeadNormConfig, NormConfig
from quire.model.parts.part import FeedForward, Mixer
from quire.model.parts.scores import ScoresConfig
from quire.model.spec import ArchSpec, LatentSpec, MoESpec

if TYPE_CHECKING:
    from quire.model.parts import gemma3n, latent, mixture
else:
    gemma3n, latent, mixture = (
        Lazy("quire.model.parts.gemma3n"),
        Lazy("quire.model.parts.latent"),
        Lazy("quire.model.parts.mixture"),
    )


def read_model(
    values: Mapping[str, Any], where: str = "config.json", architecture: str | None = None
) -> tuple[DecoderConfig, TensorNames]:
    """Read the model that a config.json describes, and the names of its tensors. ModelError as read_config."""
    spec, names = read_config(values, where, architecture)
    return decoder_config(spec), names


def decoder_config(spec: ArchSpec) -> DecoderConfig:
    """Make the config of a model, layer by layer."""
    norm, positions = norm_config(spec), None
    if spec.position_offset is not None:
        rows = spec.max_position + spec.position_offset
        positions = PositionsConfig(rows, spec.position_offset, spec.sinusoid)
    embedding = EmbeddingConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        width=spec.embedding_size or spec.hidden_size,
        projected=spec.embedding_size is not None,
        scale=spec.embedding_scale,
        norm=norm if spec.embedding_norm else None,
        positions=positions,
        segments=spec.segments,
        segment_rows=spec.segment_rows,
    )
    head = None
    if spec.has_head:
        head = HeadConfig(spec.tie_embeddings, spec.head_bias, spec.logit_scale, spec.logit_cap)
    return DecoderConfig(
        architecture=spec.architecture,
        max_position=spec.max_position,
        embedding=embedding,
        layers=tuple(layer_config(spec, i) for i in range(spec.num_layers)),
        norm=norm if spec.final_norm else None,
        head=head,
        bidirectional=spec.bidirectional,
        additions=gemma3n.ModelExtrasConfig(spec.per_layer, spec.altup)
        if spec.per_layer or spec.altup
        else None,
    )


def norm_config(spec: ArchSpec) -> NormConfig:
    return NormConfig(spec.norm, spec.norm_eps, spec.norm_weight, spec.norm_bias)


def layer_config(spec: ArchSpec, i: int) -> LayerConfig:
    """Make the config of layer `i`."""
    mixer = additions = None
    dense = _mlp(spec, i) if spec.is_dense(i) else None
    if spec.attends(i):
        mixer = _attention(spec, i) if spec.latent is None else _latent(spec, i, spec.latent)
    mlp: FeedForward | None = dense
    if spec.moe is not None and spec.is_sparse(i):
        mlp = _mixture(spec, i, spec.moe, dense)
    if spec.per_layer or spec.laurel_rank or spec.altup:
        additions = gemma3n.LayerExtrasConfig(
            norm_config(spec), spec.activation, spec.laurel_rank, spec.per_layer, spec.altup
        )
    return LayerConfig(
        hidden_size=spec.hidden_size,
        norm=norm_config(spec),
        mixer=mixer,
        mlp=mlp,
        placement=spec.placement,
        multiplier=spec.residual_multiplier,
        bare=spec.bare_first and i == 0,
        scale=spec.layer_scale,
        additions=additions,
    )


def _scores(spec: ArchSpec, i: int) -> ScoresConfig:
    alibi = None if spec.alibi is None else spec.attention_scale if spec.alibi == "scaled" else 1.0
    window = spec.windows[i]
    return ScoresConfig(
        num_heads=spec.shape(i).num_heads,
        scale=spec.attention_scale,
        window=window,
        chunk=None if spec.chunks is None else spec.chunks[i],
        ahead=(window or spec.max_position) - 1 if spec.bidirectional else 0,
        cap=spec.attention_cap,
        alibi=alibi,
        sinks=spec.has_sinks(i),
        position_buckets=spec.position_buckets,
    )


def _attention(spec: ArchSpec, i: int) -> AttentionConfig:
    shape, norm, qk_norm = spec.shape(i), norm_config(spec), None
    if spec.norms_qk(i) and spec.qk_norm is not None:
        eps = spec.norm_eps if spec.qk_norm_eps is None else spec.qk_norm_eps
        heads = NormConfig(spec.norm, eps, spec.qk_norm_weight, spec.qk_norm_bias)
        qk_norm = HeadNormConfig(heads, spec.qk_norm, spec.qk_norm_after_rope)
    return AttentionConfig(
        hidden_size=spec.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scores=_scores(spec, i),
        positions=spec.max_position,
        rope=spec.rope_of(i),
        qkv_bias=spec.qkv_bias,
        out_bias=spec.has_out_bias(i),
        qk_norm=qk_norm,
        value_norm=norm if spec.value_norm else None,
        value_dim=spec.value_dim,
        value_scale=spec.value_scale,
        keys_as_values=spec.keys_as_values is not None and spec.keys_as_values[i],
        clip=spec.clip_qkv,
        temperature=None if spec.temperatures is None else spec.temperatures[i],
        gate=spec.attention_gate,
        gate_activation=spec.gate_activation,
        out_norm=norm if spec.inner_norms else None,
        back=i - spec.kv_source(i),
        relative=spec.relative,
    )


def _latent(spec: ArchSpec, i: int, own: LatentSpec) -> Mixer:
    rope = spec.rope_of(i)
    assert rope is not None
    return latent.LatentConfig(
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        q_rank=own.q_rank,
        kv_rank=own.kv_rank,
        nope_dim=own.nope_dim,
        rope_dim=own.rope_dim,
        value_dim=own.value_dim,
        norm=NormConfig(spec.norm, own.norm_eps, spec.norm_weight, spec.norm_bias),
        scores=_scores(spec, i),
        rope=rope,
        q_scale=own.q_scale,
        kv_scale=own.kv_scale,
        bias=own.bias,
        out_bias=spec.has_out_bias(i),
    )


def _mlp(spec: ArchSpec, i: int) -> MLPConfig:
    return MLPConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.shape(i).intermediate_size,
        activation=spec.activation,
        gated=spec.gated,
        bias=spec.mlp_bias,
        xielu=spec.xielu,
        down_norm=norm_config(spec) if spec.inner_norms else None,
        cutoff=spec.gate_cutoff(i),
        limit=spec.gate_limit(i),
    )


def _mixture(spec: ArchSpec, i: int, moe: MoESpec, dense: MLPConfig | None) -> FeedForward:
    norm = norm_config(spec)
    return mixture.MixtureConfig(
        hidden_size=spec.hidden_size,
        routing=moe.routing,
        intermediate_size=moe.intermediate_size,
        activation=spec.activation,
        shared_intermediate_size=moe.shared_intermediate_size,
        bias=moe.bias,
        correction=moe.correction,
        scale=moe.scale,
        norm=norm if moe.norm else None,
        zero_experts=moe.zero_experts,
        beside=norm if moe.beside else None,
        score_cap=moe.score_cap,
        dense=dense,
        limit=0.0 if moe.limits is None else moe.limits[i],
        shared_limit=spec.gate_limit(i),
    )
