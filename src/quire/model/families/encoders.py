"""Encoders: BERT and its kin, ModernBERT, EuroBERT. Attention sees the whole text; the result is its hidden states."""

from __future__ import annotations

from typing import Any

from quire.model.families import ENCODER_TASKS
from quire.model.families.classifiers import CLASSIFIERS
from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    SLIDING,
    Family,
    architecture_of,
    layer_kinds,
    num_layers,
    read_decoder,
)
from quire.model.families.gpt import PLAIN, UNGROUPED
from quire.model.families.llama import read_llama
from quire.model.families.names import LLAMA_NAMES, TensorNames
from quire.model.families.rope import read_layer_ropes
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.relative import RelativeConfig

UNUSED = "pooler_dropout pooler_hidden_size legacy cls_dropout padding_idx"
HEADS = (r"(lm_predictions|cls|mask_predictions|classifier)\..*", r"pooler\.dense\..*")


def deberta_names(spec: DecoderConfig, config: ConfigReader) -> TensorNames:
    """Name the tensors of versions 2 and 3."""
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
    """Name the tensors of version 1: head by head in one projection, whose biases are apart."""
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
    """Read what meets distances: c2p (queries), p2c (keys), or both; a list, or a text with bars."""
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


def bert_names(base: str, *ignored: str) -> TensorNames:
    """Name BERT's tensors below `base`. `ignored` name heads' tensors, which are read where they are used."""
    escaped = base.replace(".", r"\.")
    return LLAMA_NAMES.changed(
        {
            "base": base,
            "embedding": f"{base}embeddings.word_embeddings",
            "positions": f"{base}embeddings.position_embeddings",
            "segments": f"{base}embeddings.token_type_embeddings",
            "embedding_norm": f"{base}embeddings.LayerNorm",
            "layer": f"{base}encoder.layer.{{i}}.",
            "attention.q": "attention.self.query",
            "attention.k": "attention.self.key",
            "attention.v": "attention.self.value",
            "attention.out": "attention.output.dense",
            "attention_post_norm": "attention.output.LayerNorm",
            "mlp.up": "intermediate.dense",
            "mlp.down": "output.dense",
            "mlp_post_norm": "output.LayerNorm",
            "ignored": (rf"{escaped}embeddings\.position_ids", rf"{escaped}pooler\.dense\..*", *ignored),
        }
    )


def post_norm(config: ConfigReader, offset: int | None, rotated: int | None = 0, **own: Any) -> DecoderConfig:
    """Read a model with norms after the sums and the whole text in view. `own` are further fields of parts."""
    config.skip("tie_word_embeddings")
    return read_decoder(
        config,
        **PLAIN,
        rotated=rotated,
        **({} if offset is None else {"positions_offset": offset}),
        placement="sum",
        head_tied=False,
        embedding_norm=True,
        final_norm=False,
        bidirectional=True,
        headless=True,
        **own,
    )


def segments(config: ConfigReader, rows: int) -> dict[str, int]:
    """Give the fields of a vocabulary that each segment repeats; only classifiers read pairs of texts."""
    pairs = min(rows, 2 if architecture_of(config) in CLASSIFIERS else 1)
    size = config.integer("vocab_size") * max(pairs, 1)
    return {"vocab_size": size, "embedding_segments": pairs, "embedding_segment_rows": rows}


_TRAINING = """pooler_fc_size directionality pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    pooler_type output_past sentence_transformers sbert_ce_default_activation_function"""
_JINA_UNUSED = """lora_adaptations lora_task lora_rank lora_alpha lora_dropout_p lora_main_params_trainable
    load_trained_adapters task_instructions truncate_dim use_flash_attn use_reentrant"""
_MODERNBERT_UNUSED = """mlp_dropout classifier_bias classifier_pooling decoder_bias deterministic_flash_attn
    reference_compile repad_logits_with_grad sparse_pred_ignore_index sparse_prediction initializer_cutoff_factor
    layer_norm_eps tie_word_embeddings cls_token_id position_embedding_type"""

BERT_NAMES = bert_names("bert.", r"cls\..*", r"classifier\..*", r"linear\..*")
ROBERTA_NAMES = bert_names("roberta.", r"lm_head\..*", r"classifier\..*")
DISTILBERT_NAMES = LLAMA_NAMES.changed(
    {
        "base": "distilbert.",
        "embedding": "distilbert.embeddings.word_embeddings",
        "positions": "distilbert.embeddings.position_embeddings",
        "embedding_norm": "distilbert.embeddings.LayerNorm",
        "layer": "distilbert.transformer.layer.{i}.",
        "attention.q": "attention.q_lin",
        "attention.k": "attention.k_lin",
        "attention.v": "attention.v_lin",
        "attention.out": "attention.out_lin",
        "attention_post_norm": "sa_layer_norm",
        "mlp.up": "ffn.lin1",
        "mlp.down": "ffn.lin2",
        "mlp_post_norm": "output_layer_norm",
        "ignored": (r"vocab_(transform|layer_norm|projector)\..*", r"(pre_)?classifier\..*"),
    }
)
MPNET_NAMES = bert_names("mpnet.", r"lm_head\..*", r"classifier\..*").changed(
    {
        "position_bias": "mpnet.encoder.relative_attention_bias",
        "attention.q": "attention.attn.q",
        "attention.k": "attention.attn.k",
        "attention.v": "attention.attn.v",
        "attention.out": "attention.attn.o",
        "attention_post_norm": "attention.LayerNorm",
    }
)
JINA_NAMES = LLAMA_NAMES.changed(
    {
        "base": "roberta.",
        "embedding": "roberta.embeddings.word_embeddings",
        "segments": "roberta.embeddings.token_type_embeddings",
        "embedding_norm": "roberta.emb_ln",
        "layer": "roberta.encoder.layers.{i}.",
        "attention.qkv": "mixer.Wqkv",
        "attention.out": "mixer.out_proj",
        "attention_post_norm": "norm1",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
        "mlp_post_norm": "norm2",
        "ignored": (r"roberta\.pooler\.dense\..*", r"lm_head\..*", r"classifier\..*"),
    }
)
EUROBERT_NAMES = LLAMA_NAMES.changed({"ignored": (r"(lm_head|dense|classifier)\..*",)})
MODERNBERT_NAMES = LLAMA_NAMES.changed(
    {
        "base": "model.",
        "embedding": "model.embeddings.tok_embeddings",
        "embedding_norm": "model.embeddings.norm",
        "norm": "model.final_norm",
        "attention_norm": "attn_norm",
        "attention.qkv": "attn.Wqkv",
        "attention.out": "attn.Wo",
        "mlp_norm": "mlp_norm",
        "mlp.gate_up": "mlp.Wi",
        "mlp.down": "mlp.Wo",
        "ignored": (r"head\..*", r"decoder\..*", r"classifier\..*"),
    }
)


def read_bert(config: ConfigReader) -> DecoderConfig:
    """Devlin et al. 2019, arXiv:1810.04805: learned positions, norms after the sums."""
    return _bert_like(config, 0)


def read_roberta(config: ConfigReader) -> DecoderConfig:
    """Liu et al. 2019, arXiv:1907.11692; Conneau et al. 2020, arXiv:1911.02116: positions count from pad + 1."""
    config.expect("pad_token_id", 1)
    return _bert_like(config, 2)


def read_distilbert(config: ConfigReader) -> DecoderConfig:
    """Sanh et al. 2019, arXiv:1910.01108: BERT without segments. Sinusoidal positions are stored like others."""
    config.skip("dropout qa_dropout seq_classif_dropout sinusoidal_pos_embds")
    return post_norm(config, 0)


def _bert_like(config: ConfigReader, offset: int) -> DecoderConfig:
    config.expect("position_embedding_type", "absolute")
    config.expect("is_decoder", False)
    config.skip(_TRAINING)
    own = segments(config, config.integer("type_vocab_size", 2))
    return post_norm(config, offset, max_position=config.integer("max_position_embeddings") - offset, **own)


def read_mpnet(config: ConfigReader) -> DecoderConfig:
    """Song et al. 2020, arXiv:2004.09297: BERT whose scores depend on the distance."""
    config.expect("pad_token_id", 1)
    config.skip(_TRAINING)
    buckets = config.integer("relative_attention_num_buckets")
    if buckets != 32:  # whatever the size of the table, the class computes the buckets of 32
        raise config.wrong("relative_attention_num_buckets", buckets, "32")
    positions = config.integer("max_position_embeddings") - 2
    return post_norm(config, 2, max_position=positions, scores_position_buckets=buckets)


def read_jina(config: ConfigReader) -> DecoderConfig:
    """Sturua et al. 2024, arXiv:2409.10173: XLM-R with rotary positions. The changes for tasks are in its weights."""
    config.expect("position_embedding_type", "rotary", "absolute", None)
    config.expect("emb_pooler", "mean", None)  # as modules.json says
    config.skip(_JINA_UNUSED)
    config.skip(_TRAINING)
    return post_norm(config, None, rotated=None, **segments(config, config.integer("type_vocab_size")))


def read_eurobert(config: ConfigReader) -> DecoderConfig:
    """Boizard et al. 2025, arXiv:2503.05500: Llama's decoder that sees both sides."""
    config.skip("mask_token_id classifier_pooling classifier_dropout clf_pooling tie_word_embeddings")
    return read_llama(config, bidirectional=True, headless=True, head_tied=False)


def read_modernbert(config: ConfigReader) -> DecoderConfig:
    """Warner et al. 2024, arXiv:2412.13663: rotary positions; two layers of three see their neighbourhood alone."""
    for key in ("attention_bias", "mlp_bias", "norm_bias"):
        config.expect(key, False)
    config.expect("classifier_activation", "gelu")
    config.skip(_MODERNBERT_UNUSED)
    every, near = config.integer("global_attn_every_n_layers", 3), config.integer("local_attention") // 2
    default = [FULL if i % every == 0 else SLIDING for i in range(num_layers(config))]
    kinds = layer_kinds(config, default)
    ropes = read_layer_ropes(
        config,
        config.integer("hidden_size") // config.integer("num_attention_heads"),
        kinds,
        "local_rope_theta",
        "global_rope_theta",
    )
    return read_decoder(
        config,
        **ropes,
        scores_window=[None if kind == FULL else near + 1 for kind in kinds],
        norm_kind="layer",
        head_tied=False,
        embedding_norm=True,
        bidirectional=True,
        bare=[i == 0 for i in range(len(kinds))],
        headless=True,
    )


BERT_KEYS = {"rms_norm_eps": "layer_norm_eps", **UNGROUPED}
BERT = {"hidden_act": "gelu", "max_position_embeddings": 512, "rms_norm_eps": 1e-12}
DISTILBERT_KEYS = {
    "hidden_size": "dim hidden_size",
    "num_hidden_layers": "n_layers num_hidden_layers",
    "num_attention_heads": "n_heads num_attention_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    **BERT_KEYS,
}
_FAMILIES = {
    "Bert": Family("BERT, MiniLM, BGE, E5", read_bert, BERT_NAMES, BERT, BERT_KEYS),
    "DistilBert": Family("DistilBERT", read_distilbert, DISTILBERT_NAMES, BERT, DISTILBERT_KEYS),
    "Roberta": Family("RoBERTa", read_roberta, ROBERTA_NAMES, BERT, BERT_KEYS),
    "XLMRoberta": Family("XLM-R, multilingual E5, BGE-M3", read_roberta, ROBERTA_NAMES, BERT, BERT_KEYS),
    "MPNet": Family(
        "MPNet, all-mpnet-base-v2, paraphrase-multilingual-mpnet",
        read_mpnet,
        MPNET_NAMES,
        {**BERT, "relative_attention_num_buckets": 32},
        BERT_KEYS,
    ),
    "Deberta": Family(
        "DeBERTa (base, large, xlarge)", read_first_deberta, first_deberta_names, DEBERTA, BERT_KEYS
    ),
    "DebertaV2": Family(
        "DeBERTa v3, mDeBERTa; mxbai-rerank", read_deberta, deberta_names, DEBERTA, BERT_KEYS
    ),
    "JinaEmbeddingsV3": Family(
        "Jina embeddings v3",
        read_jina,
        JINA_NAMES,
        {
            **BERT,
            "max_position_embeddings": 8194,
            "rms_norm_eps": 1e-5,
            "type_vocab_size": 1,
            "rope_theta": 2e4,
        },
        {**BERT_KEYS, "rope_theta": "rope_theta rotary_emb_base"},
    ),
    "EuroBert": Family(
        "EuroBERT 210M to 2.1B",
        read_eurobert,
        EUROBERT_NAMES,
        {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
    ),
    "ModernBert": Family(
        "ModernBERT, GTE",
        read_modernbert,
        MODERNBERT_NAMES,
        {
            "hidden_act": "gelu",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "local_attention": 128,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
        },
        {"hidden_act": "hidden_activation", "rms_norm_eps": "norm_eps", **UNGROUPED},
    ),
}
FAMILIES = {f"{name}{task}": family for name, family in _FAMILIES.items() for task in ENCODER_TASKS}
