"""Ernie 4.5: neighbouring rotary pairs, one key for all biases; dense and mixtures."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, num_layers, read_decoder, read_moe
from quire.model.parts.decoder import DecoderConfig


def read_ernie(config: ConfigReader, **fields: Any) -> DecoderConfig:
    bias = config.boolean("use_bias")
    return read_decoder(config, attention_qkv_bias=bias, attention_out_bias=bias, mlp_bias=bias, **fields)


def read_ernie_moe(config: ConfigReader) -> DecoderConfig:
    """Experts are chosen by a softmax and a correction; some layers, by their number, are mixtures."""
    config.expect("use_bias", False)  # its experts' biases would be refused with it
    config.expect("moe_norm_min", 1e-12)
    layers, start = num_layers(config), config.count("moe_layer_start_index")
    end, every = config.get("moe_layer_end_index"), config.integer("moe_layer_interval")
    if isinstance(end, bool) or not isinstance(end, int) or end < -1:
        raise config.wrong("moe_layer_end_index", end, "an integer >= -1")
    end = layers - 1 if end == -1 else end
    moe = read_moe(
        config,
        layers=[(i + 1) % every == 0 and start <= i <= end for i in range(layers)],
        shared=config.count("moe_num_shared_experts") * config.integer("moe_intermediate_size"),
        correction=True,
        renormalize=True,
    )
    return read_ernie(config, moe=moe)


ERNIE = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "use_bias": False,
}
FAMILIES = {
    "Ernie4_5ForCausalLM": Family("Ernie 4.5 0.3B", read_ernie, {"interleaved": True}, ERNIE),
    "Ernie4_5_MoeForCausalLM": Family(
        "Ernie 4.5 21B-A3B, 300B-A47B",
        read_ernie_moe,
        {
            "interleaved": True,
            "mixture.shared": "mlp.shared_experts.",
            "mixture.correction": "mlp.moe_statics.e_score_correction_bias",
            "correction_row": True,
        },
        {
            **{key: value for key, value in ERNIE.items() if key != "head_dim"},
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        {"num_experts": "moe_num_experts num_experts", "num_experts_per_tok": "moe_k num_experts_per_tok"},
    ),
}
