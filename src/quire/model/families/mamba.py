"""Decoders with Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): Nemotron-H and 3, Granite 4, Falcon-H1, Bamba, Mamba-2."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    FULL,
    Family,
    architecture_of,
    biases,
    head_size,
    layer_kinds,
    listed_layers,
    num_layers,
    read_decoder,
    read_list,
    read_moe,
)
from quire.model.families.granite import MOE as GRANITE
from quire.model.families.granite import MOE_NAMES, read_granite
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import rotary_dim
from quire.model.parts.bounds import MAX_NUMBER
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.norm import NormConfig
from quire.model.tree import make_decoder

SCAN, MAMBA, LINEAR, ATTENTION = "state_space", "mamba", "linear_attention", "attention"
BLOCKS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}  # the letters of Nemotron-H's pattern


def read_scan(config: ConfigReader, inner: int | None, normed: bool = True, **fields: Any) -> dict[str, Any]:
    """Read the fields of the mixer, which has `inner` channels (None: those of its heads), and perhaps a norm."""
    heads = config.integer("mamba_n_heads")
    auto = inner is not None and config.get("mamba_d_head") == "auto"
    head_dim = (inner or 0) // heads if auto else config.integer("mamba_d_head")
    if inner is not None and heads * head_dim != inner:
        raise config.wrong("mamba_n_heads", heads, f"heads of {head_dim} channels, {inner} in all")
    config.expect("mamba_hidden_act", "silu")
    return {
        "num_heads": heads,
        "head_dim": head_dim,
        "groups": config.integer("mamba_n_groups"),
        "state_dim": config.integer("mamba_d_state"),
        "taps": config.integer("mamba_d_conv", low=2),
        "conv_bias": config.boolean("mamba_conv_bias"),
        "bias": config.boolean("mamba_proj_bias"),
        "steps": _steps(config),
        "norm": NormConfig("rms", config.number("rms_norm_eps", 1e-6)) if normed else None,
        **fields,
    }


def _steps(config: ConfigReader) -> tuple[float, float]:
    """Read the bounds of steps; transformers writes an infinite one as an object."""
    given = config.get("time_step_limit")
    limit = (
        [math.inf if x == {"__float__": "Infinity"} else x for x in given] if isinstance(given, list) else []
    )
    if len(limit) != 2 or any(type(x) not in (int, float) for x in limit) or not 0 <= limit[0] < limit[1]:
        raise config.wrong("time_step_limit", given, "two numbers, the least and the most")
    return float(limit[0]), min(float(limit[1]), MAX_NUMBER)


def _inner(config: ConfigReader) -> int:
    return config.integer("mamba_expand") * config.integer("hidden_size")


def _blocks(config: ConfigReader) -> list[str]:
    """Read the kinds of Nemotron-H's layers: letters, or a list. The number of layers may be left out."""
    letters, listed = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    known = BLOCKS if listed is None else {**_SAME, **{kind: kind for kind in BLOCKS.values()}}
    found = letters if listed is None else listed
    count = config.optional_integer("num_hidden_layers") or (
        len(found) if isinstance(found, (str, list)) else 1
    )
    key = "hybrid_override_pattern" if listed is None else "layers_block_type"
    if (
        not isinstance(found, (str, list))
        or len(found) != count
        or any(not isinstance(kind, str) or kind not in known for kind in found)
    ):
        raise config.wrong(key, found, f"{count} layers, each one of {' '.join(known)}")
    return [known[kind] for kind in found]


_SAME = {MAMBA: LINEAR, ATTENTION: FULL}


def read_nemotron_h(config: ConfigReader) -> DecoderConfig:
    """NVIDIA 2025, arXiv:2504.03624: each layer is one mixer, one MLP or one mixture, which have no gates.

    As in transformers' class, time_step_min bounds the steps, and time_step_limit does not.
    """
    kinds = _blocks(config)
    config.expect("sliding_window", None)
    config.expect("n_shared_experts", 1)
    # Layers of mtp.* are found by their tensors (further.py), where they draft.
    config.skip("num_nextn_predict_layers mtp_hybrid_override_pattern mtp_layers_block_type")
    bias = config.boolean("mlp_bias")
    moe = None
    if "moe" in kinds:
        moe = read_moe(
            config,
            layers=[kind == "moe" for kind in kinds],
            experts="n_routed_experts",
            shared=config.integer("moe_shared_expert_intermediate_size"),
            correction=True,
            scoring="sigmoid",
            group_sum=True,
            renormalize=config.boolean("norm_topk_prob"),
            scale=config.number("routed_scaling_factor", 1.0),
        )
        latent = config.optional_integer("moe_latent_size") or 0
        moe |= {"gated": False, "latent_size": latent}
        moe["routing"] = replace(moe["routing"], shared=not latent)
    else:
        config.skip(
            "n_routed_experts moe_intermediate_size moe_shared_expert_intermediate_size norm_topk_prob "
            "routed_scaling_factor num_experts_per_tok n_group topk_group moe_latent_size"
        )
    inner, least = config.integer("intermediate_size"), config.number("time_step_min")
    return read_decoder(
        config,
        **biases(config),
        num_layers=len(kinds),
        rotated=0,
        kinds=[{LINEAR: SCAN, FULL: "attention"}.get(kind) for kind in kinds],
        mixers={SCAN: read_scan(config, None, steps=(least, MAX_NUMBER))},
        moe=moe,
        mlp_bias=bias,
        mlp_gated=False,
        mlp_intermediate_size=[inner if kind == "mlp" else 0 for kind in kinds],
    )


def read_granite_hybrid(config: ConfigReader) -> DecoderConfig:
    """IBM 2025, Granite 4: multipliers as in Granite 3, and a shared MLP beside a mixture, or alone."""
    place = config.get("position_embedding_type")
    if place not in ("rope", "nope", None):
        raise config.wrong("position_embedding_type", place, "rope or nope")
    shared, moe = config.integer("shared_intermediate_size"), None
    if config.count("num_local_experts"):
        moe = read_moe(
            config, inner="intermediate_size", experts="num_local_experts", shared=shared, softmax_after=True
        )
    else:
        config.skip("num_experts_per_tok intermediate_size")
    if place != "rope":
        config.skip("rope_theta rope_scaling rope_parameters")
    kinds = layer_kinds(config, [MAMBA] * num_layers(config), (MAMBA, LINEAR, FULL, ATTENTION))
    return read_granite(
        config,
        **({} if place == "rope" else {"rotated": 0}),
        intermediate_size=shared,
        kinds=[SCAN if kind in (MAMBA, LINEAR) else "attention" for kind in kinds],
        mixers={SCAN: read_scan(config, _inner(config))},
        moe=moe,
    )


def read_bamba(config: ConfigReader) -> DecoderConfig:
    """IBM 2024: every mixer is followed by an MLP; half of a head turns."""
    attends = listed_layers(config, "attn_layer_indices", ())
    return read_decoder(
        config,
        **biases(config),
        rotated=rotary_dim(config, head_size(config), 0.5),
        mlp_bias=config.boolean("mlp_bias"),
        kinds=["attention" if i in attends else SCAN for i in range(num_layers(config))],
        mixers={SCAN: read_scan(config, _inner(config))},
    )


def read_falcon_h1(config: ConfigReader) -> DecoderConfig:
    """TII 2025, arXiv:2507.22448: attention and a scan side by side in each layer, and multipliers everywhere."""
    config.expect("attn_layer_indices", None)
    normed = config.boolean("mamba_rms_norm")
    if normed:
        config.expect("mamba_norm_before_gate", False)
    config.skip("mamba_norm_before_gate")
    inner = config.optional_integer("mamba_d_ssm") or _inner(config)
    before, after = config.number("attention_in_multiplier"), config.number("attention_out_multiplier")
    into, parts = config.number("ssm_in_multiplier"), _numbers(config, "ssm_multipliers", 5)
    gate, down = _numbers(config, "mlp_multipliers", 2)
    scan = read_scan(
        config,
        inner,
        normed,
        factors=tuple(into * part for part in parts),
        scale=config.number("ssm_out_multiplier"),
        out_bias=config.boolean("projectors_bias"),
    )
    size = head_size(config)
    return read_decoder(
        config,
        **biases(config),
        mlp_bias=config.boolean("mlp_bias"),
        mlp_scales=(gate, down),
        embedding_scale=config.number("embedding_multiplier"),
        head_scale=config.number("lm_head_multiplier"),
        scores_scale=size**-0.5 * before * before * config.number("key_multiplier"),
        attention_value_scale=before * after,
        second=SCAN,
        mixers={SCAN: scan},
    )


def _numbers(config: ConfigReader, key: str, count: int) -> list[float]:
    """Read factors, which are 1 if absent."""
    found = read_list(
        config, key, [1.0] * count, lambda x: type(x) in (int, float) and x > 0, "numbers above 0"
    )
    return [float(x) for x in found]


def read_mamba2(config: ConfigReader) -> DecoderConfig:
    config.expect("rms_norm", True)
    return scans_alone(config, SCAN, read_scan(config, _inner(config)))


def scans_alone(config: ConfigReader, kind: str, mixer: dict[str, Any]) -> DecoderConfig:
    """Read a decoder of mixers alone: no attention, no MLP, and no longest sequence."""
    return make_decoder(
        architecture_of(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=num_layers(config),
        max_position=LONGEST,
        activation="silu",
        kinds=kind,
        mixers={kind: mixer},
        norm_kind="rms",
        norm_eps=config.number("rms_norm_eps", 1e-6),
        mlp_intermediate_size=0,
        head_tied=config.boolean("tie_word_embeddings"),
    )


LONGEST = 1 << 20  # tokens: a recurrence has no bound of its own
SCAN_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "time_step_limit": [0.0, math.inf],
}
UNUSED = (
    "time_step_min time_step_max time_step_floor time_step_rank rescale_prenorm_residual residual_in_fp32 "
    "mamba_chunk_size chunk_size num_logits_to_keep use_mamba_kernels mamba_ssm_cache_dtype z_loss_coefficient "
)
HYBRID_NAMES = LLAMA_NAMES.changed(
    {
        "state_space": "mamba.",
        "selective": "mamba.",
        "norm": "model.final_layernorm",
        "mlp_norm": "pre_ff_layernorm",
        **{f"mlp.{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    }
)
BACKBONE_NAMES = LLAMA_NAMES.changed(
    {
        "base": "backbone.",
        "ignored": (r"mtp\..*",),
        "layer": "backbone.layers.{i}.",
        "embedding": "backbone.embeddings",
        "norm": "backbone.norm_f",
        "attention_norm": "norm",
        "mlp_norm": "norm",
        "state_space": "mixer.",
        "selective": "mixer.",
        "attention.q": "mixer.q_proj",
        "attention.k": "mixer.k_proj",
        "attention.v": "mixer.v_proj",
        "attention.out": "mixer.o_proj",
        "mlp.up": "mixer.up_proj",
        "mlp.down": "mixer.down_proj",
        "mixture.router": "mixer.gate",
        "mixture.correction": "mixer.gate.e_score_correction_bias",
        "mixture.experts": "mixer.experts.{e}.",
        "mixture.shared": "mixer.shared_experts.",
        "mixture.latent_down": "mixer.fc1_latent_proj",
        "mixture.latent_up": "mixer.fc2_latent_proj",
    }
)
BACKBONE_KEYS = {
    "mamba_n_groups": "n_groups mamba_n_groups",
    "mamba_d_conv": "conv_kernel mamba_d_conv",
    "mamba_conv_bias": "use_conv_bias mamba_conv_bias",
    "mamba_proj_bias": "use_bias",
    "mamba_expand": "expand mamba_expand",
    "rms_norm_eps": "layer_norm_epsilon rms_norm_eps",
}
HYBRID = {
    **SCAN_DEFAULTS,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
}
FAMILIES = {
    "NemotronHForCausalLM": Family(
        "Nemotron-H, Nemotron 3",
        read_nemotron_h,
        BACKBONE_NAMES.changed(
            {"further": "mtp.layers.{i}.", "further.norm": "mtp.layers.{i}.final_layernorm"}
        ),
        {
            **HYBRID,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "hidden_act": "relu2",
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "time_step_min": 0.001,
        },
        {
            **BACKBONE_KEYS,
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size",
            "layers_block_type": "layers_block_type layer_types",
            "hidden_act": "mlp_hidden_act",
        },
        UNUSED
        + "mamba_expand expand mamba_proj_bias moe_shared_expert_overlap norm_eps rope_theta partial_rotary_factor "
        "attention_head_dim mamba_dt_min mamba_dt_max mamba_dt_init_floor",
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "Granite 4 (Micro, Tiny, Small)",
        read_granite_hybrid,
        lambda model, config: (MOE_NAMES if config.get("num_local_experts") else LLAMA_NAMES).changed(
            {
                "state_space": "mamba.",
                "mlp.gate_up": "shared_mlp.input_linear",
                "mlp.down": "shared_mlp.output_linear",
            }
        ),
        {**GRANITE, **SCAN_DEFAULTS, "shared_intermediate_size": 1024, "intermediate_size": 11008},
        unused=UNUSED + "normalization_function init_method",
    ),
    "BambaForCausalLM": Family(
        "Bamba", read_bamba, HYBRID_NAMES, {**HYBRID, "max_position_embeddings": 262144}, unused=UNUSED
    ),
    "FalconH1ForCausalLM": Family(
        "Falcon-H1 (0.5B to 34B)",
        read_falcon_h1,
        HYBRID_NAMES,
        {
            **HYBRID,
            "max_position_embeddings": 8192,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "key_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
        },
        unused=UNUSED + "mamba_expand mamba_use_mlp",
    ),
    "Mamba2ForCausalLM": Family(
        "Mamba-2, Codestral Mamba",
        read_mamba2,
        BACKBONE_NAMES,
        {
            **SCAN_DEFAULTS,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "rms_norm_eps": 1e-5,
            "rms_norm": True,
            "tie_word_embeddings": False,
        },
        {
            **BACKBONE_KEYS,
            "mamba_n_heads": "num_heads",
            "mamba_d_head": "head_dim",
            "mamba_d_state": "state_size",
            "mamba_hidden_act": "hidden_act",
        },
        UNUSED + "norm_before_gate",
    ),
}
