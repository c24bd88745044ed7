"""Reads GGUF architectures with recurrent layers: the gated delta rule, convolutions, scans.

llama.cpp's converter adds 1 to the norms of Qwen's models, but not to the gated ones, stores -exp(A_log), and from
Qwen3.5 on lays value heads by their number within the group of a key head.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from quire.model.families.gated_delta import kda
from quire.model.gguf.decoder import (
    decoder,
    dense_first,
    mixture,
    read_rope,
    routed,
    small_experts,
    with_router,
)
from quire.model.gguf.keys import Keys
from quire.model.gguf.unlike import latent
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.rope import RopeSpec

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
SCAN: dict[str, Any] = {
    "scan.in_proj": "ssm_in",
    "scan.conv1d": "ssm_conv1d",
    "scan.x_proj": "ssm_x",
    "scan.dt_proj": "ssm_dt",
    "scan.dt_bias": "ssm_dt.bias",
    "scan.A_log": "ssm_a",
    "scan.D": "ssm_d",
    "scan.norm": "ssm_norm",
    "scan.out_proj": "ssm_out",
    **{f"scan.{name}_layernorm": f"ssm_{name}_norm" for name in ("dt", "b", "c")},
    "rates": "negative",
    "taps_axes": (),
}
ALONE = {
    **SCAN,
    "mlp_norm": "attn_norm",
    "mixture.latent_down": "ffn_latent_down",
    "mixture.latent_up": "ffn_latent_up",
}
KIMI = {
    **DELTA,
    "mlp_norm": "ffn_norm",
    **{f"delta.{name}": f"attn_{name}" for name in "qkv"},
    **{f"delta.{name}_taps": f"ssm_conv1d_{name}" for name in "qkv"},
    "delta.steps_down": "ssm_f_a",
    "delta.steps": "ssm_f_b",
    "delta.gate_down": "ssm_g_a",
    "delta.gate": "ssm_g_b",
    "delta.out": "attn_output",
    "delta.qkv": "",
}
CONVOLUTIONS: dict[str, Any] = {
    "norm": "token_embd_norm",
    "convolution.in": "shortconv.in_proj",
    "convolution.taps": "shortconv.conv",
    "convolution.out": "shortconv.out_proj",
    "taps_axes": (),
}


def _delta(keys: Keys, name: str, **fields: Any) -> DecoderConfig:
    """Read the gated delta rule, by keys of state spaces; the other layers have attention."""
    keys.get("rope.dimension_sections")  # of pictures
    recurrent = keys.all_but_every("attention.recurrent_layers", "full_attention_interval", 4)
    keys.get("full_attention_interval")  # beside flags for each layer it says the same
    values = keys.integer("ssm.time_step_rank")
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
        kinds=["delta" if flag else "attention" for flag in recurrent],
        mixers={"delta": delta},
        **fields,
    )


def _experts(keys: Keys) -> dict[str, Any]:
    shared = keys.integer("expert_shared_feed_forward_length")
    return small_experts(keys, shared=shared, renormalize=True, shared_gate=True)


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


def _scan(keys: Keys) -> dict[str, Any]:
    """Read the scan of Mamba-2; its heads are under the key of Mamba-1's rank. Only some models norm its result."""
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % heads:
        raise keys.wrong("ssm.time_step_rank", f"a divisor of {inner} (ssm.inner_size)", heads)
    normed = any(keys.has(f"blk.{i}.ssm_norm.weight") for i in range(keys.layers))
    return {
        "num_heads": heads,
        "head_dim": inner // heads,
        "groups": keys.integer("ssm.group_count", 1),
        "state_dim": keys.integer("ssm.state_size"),
        "taps": keys.integer("ssm.conv_kernel"),
        "norm": NormConfig("rms", keys.number("attention.layer_norm_rms_epsilon")) if normed else None,
        "conv_bias": keys.has_bias("ssm_conv1d"),
        "bias": keys.has_bias("ssm_in"),
        "out_bias": keys.has_bias("ssm_out"),
    }


def _selective(keys: Keys, norm: NormConfig | None) -> dict[str, Any]:
    return {
        "inner": keys.integer("ssm.inner_size"),
        "state_dim": keys.integer("ssm.state_size"),
        "rank": keys.integer("ssm.time_step_rank"),
        "taps": keys.integer("ssm.conv_kernel"),
        "norm": norm,
        "conv_bias": keys.has_bias("ssm_conv1d"),
        "bias": keys.has_bias("ssm_in"),
    }


def _alone(keys: Keys, name: str, kind: str, mixer: dict[str, Any]) -> DecoderConfig:
    """Read a model of scans alone, whose files give 0 as the size of what it lacks."""
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        keys.expect(key, 0)
    nothing: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "rope": None}
    nothing["intermediate_size"] = [0] * keys.layers
    return decoder(keys, name, kinds=kind, mixers={kind: mixer}, **nothing)


def mamba(keys: Keys) -> DecoderConfig:
    """Read Mamba, or Falcon-Mamba if steps, B and C are normed."""
    normed = keys.get("ssm.dt_b_c_rms")
    norm = NormConfig("rms", keys.number("attention.layer_norm_rms_epsilon"), weight=False)
    name = "FalconMambaForCausalLM" if normed else "MambaForCausalLM"
    return _alone(keys, name, "selective", _selective(keys, norm if normed else None))


def mamba2(keys: Keys) -> DecoderConfig:
    return _alone(keys, "Mamba2ForCausalLM", "state_space", _scan(keys))


def hybrid(keys: Keys, kind: str = "state_space") -> dict[str, Any]:
    """Read the fields of a model whose layers without key heads are scans."""
    heads = keys.by_layer("attention.head_count_kv", low=0)
    norm = NormConfig("rms", keys.number("attention.layer_norm_rms_epsilon"))
    return {
        "num_kv_heads": max(heads) or 1,
        "kinds": ["attention" if count else kind for count in heads],
        "mixers": {kind: _scan(keys) if kind == "state_space" else _selective(keys, norm)},
    }


def jamba(keys: Keys) -> DecoderConfig:
    fields, sparse = hybrid(keys, "selective"), with_router(keys)
    if any(sparse):
        fields["moe"] = mixture(keys, inner=keys.integer("feed_forward_length"), layers=sparse)
    return decoder(keys, "JambaForCausalLM", rope=None, **fields)


def falcon_h1(keys: Keys) -> DecoderConfig:
    """Read attention and a scan side by side; the converter has put all multipliers into the weights."""
    mixers = {"state_space": _scan(keys)}
    return decoder(keys, "FalconH1ForCausalLM", second="state_space", mixers=mixers)


def nemotron_h(keys: Keys) -> DecoderConfig:
    """Read layers of one mixer, one MLP or one mixture, which have a size of an MLP."""
    fields, sparse = hybrid(keys), with_router(keys)
    sizes = keys.by_layer("feed_forward_length", low=0)
    fields["kinds"] = [None if size else kind for size, kind in zip(sizes, fields["kinds"], strict=True)]
    plain = [0 if expert else size for size, expert in zip(sizes, sparse, strict=True)]
    if any(sparse):
        fields["moe"] = _ungated(keys, sparse)
    return decoder(
        keys,
        "NemotronHForCausalLM",
        rope=None,
        activation="relu2",
        mlp_gated=False,
        intermediate_size=plain,
        **fields,
    )


def _ungated(keys: Keys, layers: list[bool]) -> dict[str, Any]:
    """Read experts without gates, perhaps in a latent width, beside which the shared one then is."""
    keys.expect("expert_shared_count", 1)
    moe = mixture(
        keys,
        layers=layers,
        shared=keys.integer("expert_shared_feed_forward_length"),
        correction=True,
        scoring="sigmoid",
        group_sum=True,
        renormalize=bool(keys.get("expert_weights_norm")),
        scale=keys.number("expert_weights_scale", 1.0),
        num_groups=keys.integer("expert_group_count", 1),
        top_groups=keys.integer("expert_group_used_count", 1),
    )
    latent_size = keys.count("moe_latent_size")
    moe["routing"] = replace(moe["routing"], shared=not latent_size)
    return moe | {"gated": False, "latent_size": latent_size}


def kimi_linear(keys: Keys) -> DecoderConfig:
    """Read Kimi Delta Attention in layers without key heads, and latent attention that nothing turns in the others."""
    attends, size = keys.by_layer("attention.head_count_kv", low=0), keys.integer("kda.head_dim")
    heads, eps = keys.integer("attention.head_count"), keys.number("attention.layer_norm_rms_epsilon")
    delta = kda(heads, size, keys.integer("ssm.conv_kernel"), eps, rank=size)
    return latent(
        keys,
        "KimiLinearForCausalLM",
        still=RopeSpec("proportional", 10000.0, keys.integer("rope.dimension_count")),
        kinds=["latent" if count else "delta" for count in attends],
        mixers={"delta": delta},
        moe=routed(keys, renormalize=True),
    )
