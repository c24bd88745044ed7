"""Encoders: BERT, RoBERTa and XLM-R, ModernBERT. Attention sees the whole text; the result is its hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.llama import Keys, llama_like
from quire.model.families.names import TensorNames
from quire.model.spec import ArchSpec, RopeSpec

_TRAINING = """hidden_dropout_prob attention_probs_dropout_prob classifier_dropout pooler_fc_size directionality
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type output_past gradient_checkpointing
    sentence_transformers sbert_ce_default_activation_function"""


def _bert_names(base: str, *ignored: str) -> TensorNames:
    escaped = base.replace(".", r"\.")
    return TensorNames(
        base=base,
        embedding=f"{base}embeddings.word_embeddings",
        positions=f"{base}embeddings.position_embeddings",
        segments=f"{base}embeddings.token_type_embeddings",
        embedding_norm=f"{base}embeddings.LayerNorm",
        layer=f"{base}encoder.layer.{{i}}.",
        q="attention.self.query",
        k="attention.self.key",
        v="attention.self.value",
        out="attention.output.dense",
        attention_post_norm="attention.output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        mlp_post_norm="output.LayerNorm",
        # heads are read apart from the encoder, where they are used
        ignored=(rf"{escaped}embeddings\.position_ids", rf"{escaped}pooler\.dense\..*", *ignored),
    )


BERT_NAMES = _bert_names("bert.", r"cls\..*", r"classifier\..*")
ROBERTA_NAMES = _bert_names("roberta.", r"lm_head\..*", r"classifier\..*")
DISTILBERT_NAMES = TensorNames(
    base="distilbert.",
    embedding="distilbert.embeddings.word_embeddings",
    positions="distilbert.embeddings.position_embeddings",
    embedding_norm="distilbert.embeddings.LayerNorm",
    layer="distilbert.transformer.layer.{i}.",
    q="attention.q_lin",
    k="attention.k_lin",
    v="attention.v_lin",
    out="attention.out_lin",
    attention_post_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_post_norm="output_layer_norm",
    ignored=(r"vocab_(transform|layer_norm|projector)\..*", r"(pre_)?classifier\..*"),
)
MODERNBERT_NAMES = TensorNames(
    base="model.",
    embedding="model.embeddings.tok_embeddings",
    embedding_norm="model.embeddings.norm",
    norm="model.final_norm",
    attention_norm="attn_norm",
    qkv="attn.Wqkv",
    out="attn.Wo",
    mlp_norm="mlp_norm",
    gate_up="mlp.Wi",
    down="mlp.Wo",
    ignored=(r"head\..*", r"decoder\..*", r"classifier\..*"),
)


@dataclass(frozen=True, slots=True)
class ClassifierNames:
    """Where a classifier over one pooled vector lies: dense (activated), a norm or none, then the labels' weights.

    `base` may be left out of `dense` where it begins with it, as in TensorNames.
    """

    dense: str
    out: str
    activation: Literal["tanh", "gelu", "relu"] = "tanh"
    norm: str | None = None


CLASSIFIERS: Mapping[str, ClassifierNames] = {
    "BertForSequenceClassification": ClassifierNames("bert.pooler.dense", "classifier"),
    "RobertaForSequenceClassification": ClassifierNames("classifier.dense", "classifier.out_proj"),
    "XLMRobertaForSequenceClassification": ClassifierNames("classifier.dense", "classifier.out_proj"),
    "DistilBertForSequenceClassification": ClassifierNames("pre_classifier", "classifier", "relu"),
    "ModernBertForSequenceClassification": ClassifierNames("head.dense", "classifier", "gelu", "head.norm"),
}


def read_bert(config: ConfigReader) -> ArchSpec:
    """Devlin et al. 2019, arXiv:1810.04805: learned positions, norms after the sums."""
    return _bert_like(config, 0)


def read_roberta(config: ConfigReader) -> ArchSpec:
    """Liu et al. 2019, arXiv:1907.11692; Conneau et al. 2020, arXiv:1911.02116: positions count from pad + 1."""
    pad = config.get("pad_token_id")
    if pad not in (None, 1):
        raise config.wrong("pad_token_id", pad, "1, from where positions count")
    return _bert_like(config, 2)


def read_distilbert(config: ConfigReader) -> ArchSpec:
    """Sanh et al. 2019, arXiv:1910.01108: BERT without segments. Sinusoidal positions are stored like others."""
    for key in ("dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"):
        config.get(key)
    keys = Keys("dim", "n_layers", "n_heads", "n_heads", "hidden_dim", "activation", "layer_norm_eps")
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else "DistilBertModel"
    return _post_norm(config, keys, architecture, 0, {})


def _bert_like(config: ConfigReader, offset: int) -> ArchSpec:
    config.expect("position_embedding_type", "absolute")
    config.expect("is_decoder", False)
    for key in _TRAINING.split():
        config.get(key)
    rows = config.integer("type_vocab_size", 2)
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else "BertModel"
    pairs = min(rows, 2) if architecture in CLASSIFIERS else 1  # only classifiers read pairs of texts
    segments = {"segments": pairs, "segment_rows": rows}
    spec = _post_norm(config, Keys(eps="layer_norm_eps"), architecture, offset, segments)
    return replace(spec, max_position=spec.max_position - offset, vocab_size=spec.vocab_size * pairs)


def _post_norm(
    config: ConfigReader, keys: Keys, architecture: str, offset: int, segments: Mapping[str, int]
) -> ArchSpec:
    """What BERT and its kin share."""
    config.get("tie_word_embeddings")
    return llama_like(
        config,
        architecture,
        keys=keys,
        num_kv_heads=config.integer(keys.heads),
        default_max_position=512,
        default_activation="gelu",
        default_eps=1e-12,
        rotated=0,
        position_offset=offset,
        placement="sum",
        norm="layer",
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        tie_embeddings=False,
        embedding_norm=True,
        final_norm=False,
        bidirectional=True,
        has_head=False,
        **segments,
    )


def read_modernbert(config: ConfigReader) -> ArchSpec:
    """Warner et al. 2024, arXiv:2412.13663: rotary positions; two layers of three see their neighbourhood alone."""
    for key in ("attention_bias", "mlp_bias", "norm_bias"):
        config.expect(key, False)
    config.expect("classifier_activation", "gelu")
    layers, heads = config.integer("num_hidden_layers", high=4096), config.integer("num_attention_heads")
    every, near = config.integer("global_attn_every_n_layers", 3), config.integer("local_attention", 128) // 2
    kinds = config.get("layer_types")
    wide = [i % every == 0 for i in range(layers)]
    if kinds is not None and kinds != ["full_attention" if w else "sliding_attention" for w in wide]:
        raise config.wrong("layer_types", kinds, f"every {every}th layer full_attention")
    for key in ("embedding_dropout", "mlp_dropout", "classifier_dropout", "classifier_bias", "classifier_pooling",
                "decoder_bias", "deterministic_flash_attn", "reference_compile",
                "repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction", "initializer_cutoff_factor",
                "layer_norm_eps", "tie_word_embeddings", "cls_token_id", "position_embedding_type"):  # fmt: skip
        config.get(key)
    thetas = _modernbert_thetas(config)
    size = config.integer("hidden_size") // heads
    ropes = tuple(RopeSpec("default", thetas[0 if w else 1], size) for w in wide)
    names = config.get("architectures")
    return llama_like(
        config,
        names[0] if isinstance(names, list) and names else "ModernBertModel",
        keys=Keys(activation="hidden_activation", eps="norm_eps"),
        num_kv_heads=heads,
        default_max_position=8192,
        default_activation="gelu",
        default_eps=1e-5,
        rope=ropes[0],
        layer_ropes=ropes,
        windows=tuple(None if w else near + 1 for w in wide),
        norm="layer",
        tie_embeddings=False,
        embedding_norm=True,
        bidirectional=True,
        bare_first=True,
        has_head=False,
    )


def _modernbert_thetas(config: ConfigReader) -> tuple[float, float]:
    """Bases of the layers that see all and of the others, in either spelling."""
    wide, near = config.number("global_rope_theta", 160000.0), config.number("local_rope_theta", 10000.0)
    by_kind = config.get("rope_parameters")
    if by_kind is None:
        return wide, near
    found = []
    for kind, default in (("full_attention", wide), ("sliding_attention", near)):
        values = by_kind.get(kind) if isinstance(by_kind, dict) else None
        if not isinstance(values, dict) or values.get("rope_type", "default") != "default":
            raise config.wrong("rope_parameters", by_kind, "a default rope for each kind of layer")
        found.append(ConfigReader(values, f"{config.where}: rope_parameters").number("rope_theta", default))
    return found[0], found[1]
