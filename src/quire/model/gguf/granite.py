"""Reads Granite's GGUF architectures: multipliers, mixtures, and scans in Granite 4."""

from __future__ import annotations

from typing import Any

from quire.model.gguf.decoder import decoder, small_experts
from quire.model.gguf.keys import Keys
from quire.model.gguf.recurrent import hybrid
from quire.model.parts.decoder import DecoderConfig


def granite(keys: Keys, name: str = "GraniteForCausalLM", **fields: Any) -> DecoderConfig:
    scale = keys.number("logit_scale", 1.0)
    if scale == 0:
        raise keys.wrong("logit_scale", "above 0", scale)
    return decoder(
        keys,
        name,
        scores_scale=keys.number("attention.scale"),
        embedding_scale=keys.number("embedding_scale", 1.0),
        multiplier=keys.number("residual_scale", 1.0),
        head_scale=1.0 / scale,
        **fields,
    )


def granite_moe(keys: Keys) -> DecoderConfig:
    shared = keys.count("expert_shared_feed_forward_length")
    name = "GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"
    return granite(keys, name, **small_experts(keys, shared=shared, softmax_after=True))


def granite_hybrid(keys: Keys) -> DecoderConfig:
    """Read Granite 4, whose files say that they have no rope. Bamba's, which have, turn half of a head."""
    keys.expect("rope.scaling.finetuned", False)
    fields = {**hybrid(keys), "rope": None}
    shared = keys.count("expert_shared_feed_forward_length")
    if keys.get("expert_count"):
        fields |= small_experts(keys, shared=shared, softmax_after=True)
    else:
        keys.expect("expert_shared_feed_forward_length", keys.integer("feed_forward_length"))
    return granite(keys, "GraniteMoeHybridForCausalLM", **fields)
