"""Reads GGUF architectures with recurrent layers: Qwen3-Next and Qwen3.5 (gated delta rule), LFM2 (convolutions).

llama.cpp's converter adds 1 to the norms of Qwen's models, but not to the gated ones, stores -exp(A_log), and from
Qwen3.5 on lays value heads by their number within the group of a key head.
"""

from __future__ import annotations

from typing import Any

from quire.model.gguf.decoder import decoder, dense_first, mixture, read_rope
from quire.model.gguf.keys import Keys
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.norm import NormConfig

DELTA: dict[str, Any] = {
    "mlp_norm": "post_attention_norm",
    "attention.gate": "attn_q",
    "delta.qkv": "attn_qkv",
    "delta.gate": "attn_gate",
    "delta.beta": "ssm_beta",
    "delta.steps": "ssm_alpha",
    "delta.steps.bias": "ssm_dt.bias",
    "delta.rates": "ssm_a",
    "delta.taps": "ssm_conv1d",
    "delta.norm": "ssm_norm",
    "delta.out": "ssm_out",
    "rates": "negative",
    "taps_axes": (),
}
NEXT = {**DELTA, "delta.ba": "ssm_ba"}
TILED = {**DELTA, "tiled": True}
CONVOLUTIONS: dict[str, Any] = {
    "norm": "token_embd_norm",
    "convolution.in": "shortconv.in_proj",
    "convolution.taps": "shortconv.conv",
    "convolution.out": "shortconv.out_proj",
    "taps_axes": (),
}


def _delta(keys: Keys, name: str, **fields: Any) -> DecoderConfig:
    """Read the gated delta rule, by keys of state spaces: every n-th layer has attention."""
    keys.get("rope.dimension_sections")  # of pictures
    every, values = keys.integer("full_attention_interval", 4), keys.integer("ssm.time_step_rank")
    inner, groups = keys.integer("ssm.inner_size"), keys.integer("ssm.group_count")
    if inner % values or values % groups:
        raise keys.wrong(
            "ssm.time_step_rank", f"a multiple of {groups} (ssm.group_count), and divide {inner}", values
        )
    delta = {
        "key_heads": groups,
        "value_heads": values,
        "key_dim": keys.integer("ssm.state_size"),
        "value_dim": inner // values,
        "taps": keys.integer("ssm.conv_kernel"),
        "norm": NormConfig("rms", keys.number("attention.layer_norm_rms_epsilon")),
    }
    return decoder(
        keys,
        name,
        num_kv_heads=max(keys.by_layer("attention.head_count_kv", low=0)),
        rope=read_rope(keys),
        qk_norm="head",
        attention_gate="elements",
        kinds=["delta" if (i + 1) % every else "attention" for i in range(keys.layers)],
        mixers={"delta": delta},
        **fields,
    )


def _experts(keys: Keys) -> dict[str, Any]:
    keys.get("feed_forward_length")  # of an MLP that no layer has
    shared = keys.integer("expert_shared_feed_forward_length")
    inner = keys.integer("expert_feed_forward_length")
    moe = mixture(keys, inner=inner, shared=shared, renormalize=True, shared_gate=True)
    return {"moe": moe, "intermediate_size": inner}


def qwen3next(keys: Keys) -> DecoderConfig:
    return _delta(keys, "Qwen3NextForCausalLM", **_experts(keys))


def qwen35(keys: Keys) -> DecoderConfig:
    return _delta(keys, "Qwen3_5ForCausalLM")


def qwen35moe(keys: Keys) -> DecoderConfig:
    return _delta(keys, "Qwen3_5MoeForCausalLM", **_experts(keys))


def lfm2(keys: Keys, name: str = "Lfm2ForCausalLM", **fields: Any) -> DecoderConfig:
    """Layers without key heads are convolutions."""
    heads = keys.by_layer("attention.head_count_kv", low=0)
    taps = {"taps": keys.integer("shortconv.l_cache"), "bias": keys.has_bias("shortconv.in_proj")}
    return decoder(
        keys,
        name,
        num_kv_heads=max(heads),
        qk_norm="head",
        kinds=["attention" if count else "convolution" for count in heads],
        mixers={"convolution": taps},
        **fields,
    )


def lfm2moe(keys: Keys) -> DecoderConfig:
    moe = mixture(
        keys,
        layers=dense_first(keys),
        correction=True,
        scoring="sigmoid",
        renormalize=True,
        floor=1e-6,
        scale=keys.number("expert_weights_scale", 1.0) or 1.0,
    )
    return lfm2(keys, "Lfm2MoeForCausalLM", moe=moe)
