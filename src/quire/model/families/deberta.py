"""DeBERTa 1, 2 and 3: BERT whose scores also compare content with embeddings of distances."""

from __future__ import annotations

from typing import Any

from quire.model.families.bert import post_norm, segments
from quire.model.families.bert_names import bert_names
from quire.model.families.config import ConfigReader
from quire.model.families.names import TensorNames
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.relative import RelativeConfig

UNUSED = """hidden_dropout_prob attention_probs_dropout_prob pooler_dropout pooler_hidden_size initializer_range legacy
    cls_dropout padding_idx classifier_dropout"""
HEADS = (r"(lm_predictions|cls|mask_predictions|classifier)\..*", r"pooler\.dense\..*")


def deberta_names(spec: DecoderConfig, config: ConfigReader) -> TensorNames:
    """Versions 2 and 3."""
    names = _names(spec)
    return names.changed(
        {
            "attention.q": "attention.self.query_proj",
            "attention.k": "attention.self.key_proj",
            "attention.v": "attention.self.value_proj",
            "attention.relative.keys": "attention.self.pos_key_proj",
            "attention.relative.queries": "attention.self.pos_query_proj",
        }
    )


def first_deberta_names(spec: DecoderConfig, config: ConfigReader) -> TensorNames:
    """Version 1: head by head in one projection, whose biases are apart."""
    return _names(spec).changed(
        {
            "attention.qkv": "attention.self.in_proj",
            "qkv_layout": "grouped",
            "attention.q.bias": "attention.self.q_bias",
            "attention.v.bias": "attention.self.v_bias",
            "attention.relative.keys": "attention.self.pos_proj",
            "relative_keys_bias": False,
            "attention.relative.queries": "attention.self.pos_q_proj",
        }
    )


def _names(spec: DecoderConfig) -> TensorNames:
    names = bert_names("deberta.", *HEADS)
    left_out = (
        () if spec.embedding.positions is not None else (r"deberta\.embeddings\.position_embeddings\..*",)
    )
    return names.changed(
        {
            "relative": "deberta.encoder.rel_embeddings",
            "relative_norm": "deberta.encoder.LayerNorm",
            "ignored": (*names.ignored, *left_out),
        }
    )


def read_deberta(config: ConfigReader) -> DecoderConfig:
    """Versions 2 and 3 (He et al. 2021, arXiv:2111.09543): distances in buckets, often with the layer's projections."""
    config.expect("conv_kernel_size", 0, None)
    norms = config.get("norm_rel_ebd")
    norms = "none" if norms is None else norms
    if not isinstance(norms, str) or norms.strip().lower() not in ("none", "layer_norm"):
        raise config.wrong("norm_rel_ebd", norms, "none or layer_norm")
    buckets = config.optional_integer("position_buckets", low=-(1 << 30)) or 0
    buckets = max(buckets, 0)
    if buckets and (buckets < 4 or buckets % 2):
        raise config.wrong("position_buckets", buckets, "even and at least 4, or below 1")
    shared = config.boolean("share_att_key", False)
    return _read(config, buckets, shared=shared, normed=norms.strip().lower() == "layer_norm")


def read_first_deberta(config: ConfigReader) -> DecoderConfig:
    """Version 1, arXiv:2006.03654."""
    config.expect("talking_head", False)
    return _read(config, 0, shared=False, normed=False)


def _read(config: ConfigReader, buckets: int, **relative: bool) -> DecoderConfig:
    config.skip(UNUSED)
    config.expect("embedding_size", config.integer("hidden_size"))
    size = config.integer("hidden_size") // config.integer("num_attention_heads")
    config.expect("attention_head_size", size)
    config.expect("pooler_hidden_act", "gelu")
    rows = config.count("type_vocab_size")
    kinds = _kinds(config)
    positions = config.integer("max_position_embeddings")
    reach = config.optional_integer("max_relative_positions", low=-(1 << 30)) or 0
    reach = reach if reach > 0 else positions
    near = None
    if config.boolean("relative_attention") and kinds:
        near = RelativeConfig(buckets or reach, buckets, reach, "c2p" in kinds, "p2c" in kinds, **relative)
    return post_norm(
        config,
        0 if config.boolean("position_biased_input") else None,
        scores_scale=(size * (1 + len(kinds))) ** -0.5,
        attention_relative=near,
        **segments(config, rows),
    )


def _kinds(config: ConfigReader) -> frozenset[str]:
    """What meets distances: c2p (queries), p2c (keys), or both; a list, or a text with bars."""
    given: Any = config.get("pos_att_type")
    parts = given.split("|") if isinstance(given, str) else given or []
    if not isinstance(parts, list) or any(not isinstance(part, str) for part in parts):
        raise config.wrong("pos_att_type", given, "a list of c2p and p2c")
    kinds = [part.strip().lower() for part in parts]
    if any(kind not in ("c2p", "p2c") for kind in kinds) or len(set(kinds)) != len(kinds):
        raise config.wrong("pos_att_type", given, "a list of c2p and p2c")
    return frozenset(kinds)


DEBERTA = {
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-7,
    "type_vocab_size": 0,
    "relative_attention": False,
    "position_biased_input": True,
}
