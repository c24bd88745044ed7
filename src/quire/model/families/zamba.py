"""Zamba2 (Zyphra 2024, arXiv:2411.15242): Mamba-2, and blocks of attention and MLP that several layers share."""

from __future__ import annotations

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, layer_kinds, num_layers, read_decoder
from quire.model.families.mamba import LINEAR, SCAN, SCAN_DEFAULTS, UNUSED, read_scan
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import read_rope
from quire.model.parts.attention import AttentionConfig
from quire.model.parts.bounds import MAX_NUMBER
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.scores import ScoresConfig
from quire.model.parts.shared_block import EmbeddedConfig
from quire.model.parts.state_space import StateSpaceConfig

HYBRID, BLOCK = "hybrid", "shared_block"


def read_zamba2(config: ConfigReader) -> DecoderConfig:
    """Uses of the blocks take turns. A block reads twice the width, and its scores are scaled for half a head."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    size, kinds = 2 * hidden // heads, _kinds(config)
    if hidden % heads:
        raise config.wrong("num_attention_heads", heads, f"a divisor of {hidden}")
    uses = [i for i, kind in enumerate(kinds) if kind == HYBRID]
    inner, mamba_heads = config.integer("mamba_expand") * hidden, config.integer("mamba_n_heads")
    config.expect_all(
        {
            "use_long_context": False,
            "use_shared_mlp_adapter": True,
            "hidden_act": "gelu",
            "num_key_value_heads": heads,
            "num_query_groups": heads,
            "attention_head_dim": size,
            "attention_hidden_size": 2 * hidden,
            "kv_channels": hidden // heads,
            "mamba_headdim": inner // mamba_heads,
            "hybrid_layer_ids": uses,
        },
        None,
    )
    steps, norm = (config.number("time_step_min"), MAX_NUMBER), NormConfig("rms", 1e-5)
    scan = read_scan(config, inner, steps=steps, conv_bias=True, norm=norm)
    longest, rope = config.integer("max_position_embeddings"), None
    if config.boolean("use_mem_rope"):
        rope = read_rope(config, size, longest)
    config.skip("rope_theta rope_parameters rope_scaling")
    scores = ScoresConfig(heads, (size / 2) ** -0.5)
    blocks = config.integer("num_mem_blocks")
    order = [uses.index(i) if i in uses else 0 for i in range(len(kinds))]
    block = {
        "intermediate_size": config.optional_integer("intermediate_size") or 4 * hidden,
        "attention": AttentionConfig(
            hidden, heads, heads, size, scores, longest, rope, input_size=2 * hidden
        ),
        "scan": StateSpaceConfig(hidden, **scan),
        "norm": NormConfig("rms", config.number("rms_norm_eps", 1e-6)),
        "first": [uses[use % blocks] if uses else 0 for use in order],
        "use": order,
        "rank": config.integer("adapter_rank"),
        "adapts": config.boolean("use_shared_attention_adapter"),
        "bias": config.boolean("mamba_proj_bias"),
    }
    spec = read_decoder(
        config,
        rotated=0,
        num_kv_heads=heads,
        head_dim=size,
        intermediate_size=[0] * len(kinds),
        activation="gelu",
        kinds=[BLOCK if kind == HYBRID else SCAN for kind in kinds],
        bare=[kind == HYBRID for kind in kinds],
        mixers={BLOCK: block, SCAN: scan},
    )
    return replace(spec, additions=EmbeddedConfig()) if uses else spec


def _kinds(config: ConfigReader) -> list[str]:
    """Read the kinds of layers; by default those of the class's 54."""
    gaps = [6, *[5] * 6, 4, 3]
    default = [kind for gap in gaps for kind in [*[LINEAR] * gap, HYBRID]] + [LINEAR] * 2
    layers, given = num_layers(config), config.get("layers_block_type")
    if given is None and layers != len(default):
        raise config.wrong("layers_block_type", None, f"a list, where there are not {len(default)} layers")
    known = layer_kinds(config, [LINEAR] * layers, ("mamba", LINEAR, HYBRID), "layers_block_type")
    return default if given is None else [HYBRID if kind == HYBRID else LINEAR for kind in known]


ATTENTION = "shared_transformer.self_attn"
FAMILIES = {
    "Zamba2ForCausalLM": Family(
        "Zamba2 (1.2B, 2.7B, 7B)",
        read_zamba2,
        LLAMA_NAMES.changed(
            {
                "norm": "model.final_layernorm",
                "state_space": "mamba.",
                **{f"attention.{name}": f"{ATTENTION}.{name}_proj" for name in "qkv"},
                "attention.out": f"{ATTENTION}.o_proj",
                "mlp_norm": "shared_transformer.pre_ff_layernorm",
                "mlp.gate_up": "shared_transformer.feed_forward.gate_up_proj",
                "mlp.down": "shared_transformer.feed_forward.down_proj",
                **{f"low.{name}": f"{ATTENTION}.linear_{name}_adapter_list" for name in "qkv"},
                "low.gate_up": "shared_transformer.feed_forward.gate_up_proj_adapter_list",
                "by_mixer": {
                    BLOCK: {
                        "attention_norm": "shared_transformer.input_layernorm",
                        "scan_norm": "mamba_decoder.input_layernorm",
                        "state_space": "mamba_decoder.mamba.",
                        "join": "linear",
                    }
                },
            }
        ),
        {
            **SCAN_DEFAULTS,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "mamba_n_heads": 8,
            "mamba_d_state": 64,
            "time_step_min": 0.001,
            "num_mem_blocks": 1,
            "adapter_rank": 128,
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
            "tie_word_embeddings": True,
        },
        {
            "mamba_n_heads": "n_mamba_heads",
            "mamba_n_groups": "mamba_ngroups",
            "mamba_proj_bias": "add_bias_linear",
            "layers_block_type": "layers_block_type layer_types",
            "attention_head_dim": "attention_head_dim head_dim",
        },
        UNUSED.replace("time_step_min ", "") + "use_mem_eff_path use_conv_bias ffn_hidden_size",
    )
}
