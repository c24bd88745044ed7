"""Decoders with Mamba-1 (Gu and Dao 2023, arXiv:2312.00752): Jamba, Mamba, Falcon-Mamba."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, num_layers, read_decoder, read_moe
from quire.model.families.mamba import BACKBONE_KEYS, BACKBONE_NAMES, HYBRID_NAMES, UNUSED, scans_alone
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.norm import NormConfig

SCAN = "selective"


def _scan(config: ConfigReader, norm: NormConfig | None) -> dict[str, Any]:
    """Read the fields of the mixer, whose steps, B and C may be normed."""
    hidden, rank = config.integer("hidden_size"), config.get("mamba_dt_rank")
    inner = config.integer("mamba_expand") * hidden
    config.expect("hidden_act", "silu")
    return {
        "inner": inner,
        "state_dim": config.integer("mamba_d_state"),
        "rank": -(-hidden // 16) if rank == "auto" else config.integer("mamba_dt_rank"),
        "taps": config.integer("mamba_d_conv", low=2),
        "norm": norm,
        "conv_bias": config.boolean("mamba_conv_bias"),
        "bias": config.boolean("mamba_proj_bias"),
    }


def _every(config: ConfigReader, name: str) -> list[bool]:
    """Read the layers of a kind: one in each period, from an offset on."""
    period, offset = config.integer(f"{name}_layer_period"), config.count(f"{name}_layer_offset")
    if offset >= period:
        raise config.wrong(f"{name}_layer_offset", offset, f"less than {name}_layer_period ({period})")
    return [i % period == offset for i in range(num_layers(config))]


def read_jamba(config: ConfigReader) -> DecoderConfig:
    """AI21 2024, arXiv:2403.19887: attention without positions in some layers, mixtures in some."""
    config.expect("sliding_window", None)
    moe = None
    if config.integer("num_experts") > 1:
        moe = read_moe(config, layers=_every(config, "expert"), inner="intermediate_size")
    else:
        config.skip("expert_layer_period expert_layer_offset num_experts_per_tok")
    norm = NormConfig("rms", config.number("rms_norm_eps", 1e-6))
    return read_decoder(
        config,
        rotated=0,
        intermediate_size=config.integer("intermediate_size"),
        kinds=["attention" if attends else SCAN for attends in _every(config, "attn")],
        mixers={SCAN: _scan(config, norm)},
        moe=moe,
    )


def read_mamba(config: ConfigReader, norm: NormConfig | None = None) -> DecoderConfig:
    fields = _scan(config, norm)
    if config.given("intermediate_size"):
        config.expect("intermediate_size", fields["inner"])
    return scans_alone(config, SCAN, fields)


def read_falcon_mamba(config: ConfigReader) -> DecoderConfig:
    """TII 2024, arXiv:2410.05355: steps, B and C are normed without weights."""
    return read_mamba(config, NormConfig("rms", config.number("mixer_rms_eps"), weight=False))


SCAN_DEFAULTS = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "hidden_act": "silu",
}
MAMBA = {**SCAN_DEFAULTS, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
KEYS = {**BACKBONE_KEYS, "mamba_d_state": "state_size", "mamba_dt_rank": "time_step_rank"}
OTHERS = UNUSED + "time_step_scale time_step_init_scheme use_mambapy use_falcon_mambapy use_associative_scan "
FAMILIES = {
    "JambaForCausalLM": Family(
        "Jamba 1.5, 1.6, Reasoning",
        read_jamba,
        HYBRID_NAMES.changed(
            {"mixture.router": "feed_forward.router", "mixture.experts": "feed_forward.experts.{e}."}
        ),
        {
            **SCAN_DEFAULTS,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
        },
        unused=OTHERS + "mamba_inner_layernorms",
    ),
    "MambaForCausalLM": Family("Mamba (130M to 2.8B)", read_mamba, BACKBONE_NAMES, MAMBA, KEYS, OTHERS),
    "FalconMambaForCausalLM": Family(
        "Falcon-Mamba 7B", read_falcon_mamba, BACKBONE_NAMES, {**MAMBA, "mixer_rms_eps": 1e-6}, KEYS, OTHERS
    ),
}
