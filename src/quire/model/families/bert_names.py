"""Names of BERT's tensors, and of those of encoders like it."""

from __future__ import annotations

from quire.model.families.names import LLAMA_NAMES, TensorNames


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
