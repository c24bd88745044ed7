"""Llama 4 (text): attention in chunks, layers without positions whose queries have a temperature, weighted inputs."""

from __future__ import annotations

from quire.devices.protocol import Temperature
from quire.model.families.config import ConfigReader
from quire.model.families.family import FULL, Family, biases, layer_kinds, num_layers, read_decoder, read_moe
from quire.model.parts.decoder import DecoderConfig

CHUNKED = "chunked_attention"


def read_llama4(config: ConfigReader) -> DecoderConfig:
    """Meta 2025. Norms of queries and keys have no weights and are on the layers with positions."""
    layers, interval = num_layers(config), config.integer("no_rope_layer_interval")
    default = [int((i + 1) % interval != 0) for i in range(layers)]
    given = config.derived({"no_rope_layers": config.get("no_rope_layers") or None})
    turned = layer_kinds(given, default, (0, 1), "no_rope_layers")
    kinds = layer_kinds(config, [CHUNKED if turn else FULL for turn in turned], (CHUNKED, FULL))
    chunk, step = config.optional_integer("attention_chunk_size"), config.integer("interleave_moe_layer_step")
    if CHUNKED in kinds and chunk is None:
        raise config.wrong("attention_chunk_size", chunk, f"an integer where layer_types has {CHUNKED}")
    sparse = config.get("moe_layers")
    sparse = list(range(step - 1, layers, step)) if sparse is None else sparse
    if not isinstance(sparse, list) or any(type(i) is not int for i in sparse):
        raise config.wrong("moe_layers", sparse, "a list of layers")
    config.skip("for_llm_compressor")
    inner = config.integer("intermediate_size")
    moe = read_moe(
        config,
        layers=[i in sparse for i in range(layers)],
        inner="intermediate_size",
        experts="num_local_experts",
        shared=inner,
        scoring="sigmoid",
        weigh_inputs=True,
    )
    far = Temperature(config.number("attn_scale"), config.integer("floor_scale"), 1)
    tuned, normed = far if config.boolean("attn_temperature_tuning") else None, config.boolean("use_qk_norm")
    return read_decoder(
        config,
        **biases(config),
        intermediate_size=config.integer("intermediate_size_mlp"),
        qk_norm=["head" if normed and turn else None for turn in turned],
        qk_norm_weight=False,
        qk_norm_after_rope=True,
        scores_chunk=[chunk if kind == CHUNKED else None for kind in kinds],
        attention_temperature=[None if turn else tuned for turn in turned],
        turned=turned,
        moe=moe,
    )


FAMILIES = {
    "Llama4ForCausalLM": Family(
        "Llama 4 Scout, Maverick (text)",
        read_llama4,
        {
            "interleaved": True,
            "mlp.gate": "feed_forward.gate_proj",
            "mlp.up": "feed_forward.up_proj",
            "mlp.down": "feed_forward.down_proj",
            "mixture.router": "feed_forward.router",
            "mixture.experts": "feed_forward.experts.",
            "mixture.expert.up": "gate_up_proj",
            "mixture.expert.down": "down_proj",
            "expert_stack": "columns",
            "expert_halves": True,
            "mixture.shared": "feed_forward.shared_expert.",
        },
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
    )
}
