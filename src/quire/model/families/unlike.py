"""Families whose layers have unlike shapes: Gemma 4 (text), MiMo-V2-Flash, Laguna, Nemotron-NAS (DeciLM)."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    DENSE,
    FULL,
    SLIDING,
    SPARSE,
    Family,
    alternate,
    biases,
    head_size,
    layer_kinds,
    num_layers,
    read_decoder,
    read_list,
    read_moe,
    sparse_after,
    windows_of,
)
from quire.model.families.gemma import SANDWICH_NAMES, cap
from quire.model.families.names import TensorNames
from quire.model.families.rope import kind_dims, read_layer_ropes
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.gemma3n import LayerInputsConfig

KINDS = (FULL, SLIDING)


def read_gemma4(config: ConfigReader) -> DecoderConfig:
    """Google 2026: full layers have longer and fewer keys, the last layers may read earlier layers' keys."""
    config.expect("use_bidirectional_attention", None, False, "vision")  # a text is causal in both
    kinds = layer_kinds(config, alternate(num_layers(config), 6))
    kinds[-1] = FULL
    shared = config.boolean("attention_k_eq_v", False)
    sizes = _gemma4_sizes(config, kinds, shared)
    near, far = sizes[SLIDING][1], sizes[FULL][1]
    inner = config.integer("intermediate_size")
    wide = 2 if config.boolean("use_double_wide_mlp", False) else 1
    back = keys_back(config, kinds)
    ropes = read_layer_ropes(config, {FULL: far, SLIDING: near}, kinds, "rope_local_base_freq")
    moe = None
    if config.boolean("enable_moe_block", False):
        moe = read_moe(config, renormalize=True, beside=True)
    else:
        config.skip("num_experts top_k_experts moe_intermediate_size")
    size = config.count("hidden_size_per_layer_input")
    config.expect("vocab_size_per_layer_input", config.integer("vocab_size"))
    return read_decoder(
        config,
        **biases(config),
        num_kv_heads=[sizes[kind][0] for kind in kinds],
        head_dim=[sizes[kind][1] for kind in kinds],
        intermediate_size=[inner * (wide if distance else 1) for distance in back],
        attention_back=back,
        attention_keys_as_values=[shared and kind == FULL for kind in kinds],
        attention_value_norm=True,
        scale=True,
        **({"added_inputs": LayerInputsConfig(size, config.integer("vocab_size"))} if size else {}),
        placement="sandwich",
        qk_norm="head",
        scores_scale=1.0,
        **ropes,
        scores_window=windows_of(config, kinds),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        head_cap=cap(config, "final_logit_softcapping"),
        moe=moe,
    )


def _gemma4_sizes(config: ConfigReader, kinds: list[str], shared: bool) -> dict[str, tuple[int, int]]:
    """Read key/value heads and head_dim by kind: published files have keys for each, others tell layer by layer."""
    kv, size = config.integer("num_key_value_heads"), config.integer("head_dim")
    far = config.optional_integer("num_global_key_value_heads") if shared else None
    config.skip("num_global_key_value_heads")
    sizes = {SLIDING: (kv, size), FULL: (far or kv, config.integer("global_head_dim"))}
    layers = config.section("per_layer_config")
    if layers is None:
        return sizes
    found: dict[str, tuple[int, int]] = {}
    for i, kind in enumerate(kinds):
        own = layers.section(str(i)) or ConfigReader({}, config.where)
        pair = own.integer("num_key_value_heads", kv), own.integer("head_dim", size)
        if found.setdefault(kind, pair) != pair:
            raise config.wrong("per_layer_config", pair, f"the same in all layers of {kind}")
    return {**sizes, **found}


def keys_back(config: ConfigReader, kinds: list[str]) -> list[int]:
    """Count how far back the keys of each layer are: its own (0), or those of the last one of its kind that has any."""
    first = len(kinds) - config.integer("num_kv_shared_layers", low=0, high=len(kinds))
    own, back = kinds[:first][::-1], [0] * first
    for i, kind in enumerate(kinds[first:], 1):
        if kind not in own:
            raise config.wrong(
                "num_kv_shared_layers", first, f"such that a layer of {kind} keeps its own keys"
            )
        back.append(i + own.index(kind))
    return back


def without_shared_keys(names: TensorNames, spec: DecoderConfig) -> TensorNames:
    """Leave out keys and values in layers that read another layer's: checkpoints may hold them."""
    unused = tuple(
        rf"model\.layers\.{i}\.self_attn\.[kv]_(proj|norm)\..*"
        for i in range(spec.num_layers)
        if (mixer := spec.layers[i].mixer) is not None and mixer.back
    )
    return names.changed({"ignored": (*names.ignored, *unused)})


def gemma4_names(spec: DecoderConfig, config: ConfigReader) -> TensorNames:
    return without_shared_keys(GEMMA4_NAMES, spec)


def read_mimo(config: ConfigReader) -> DecoderConfig:
    """Xiaomi 2026, arXiv:2601.02780: sliding layers have more keys and sinks; values are shorter than keys."""
    layers = num_layers(config)
    default = [int(i > 0 and (i + 1) % 6 != 0) for i in range(layers)]
    slides = layer_kinds(config, default, (0, 1), "hybrid_layer_pattern")
    kinds = layer_kinds(config, [SLIDING if slide else FULL for slide in slides])
    routed = layer_kinds(config, [0] + [1] * (layers - 1), (0, 1), "moe_layer_freq")
    said = [SPARSE if one else DENSE for one in routed]
    sparse = layer_kinds(config, said, (DENSE, SPARSE), "mlp_layer_types")
    _expect_mimo(config)
    size, kv = head_size(config), config.integer("num_key_value_heads")
    dims = kind_dims(config, size, dict.fromkeys(KINDS, config.number("partial_rotary_factor")))
    ropes = read_layer_ropes(config, dims, kinds, "swa_rope_theta")
    windows = windows_of(config, kinds)
    previous = config.optional_integer("sliding_window_size")
    if previous is not None:  # this key does not count the query itself
        windows = [None if window is None else previous + 1 for window in windows]
    scale = config.optional_number("attention_value_scale")
    moe = read_moe(
        config,
        layers=[kind == SPARSE for kind in sparse],
        experts="n_routed_experts",
        correction=True,
        scoring="sigmoid",
        group_sum=True,
        renormalize=config.boolean("norm_topk_prob"),
        scale=config.optional_number("routed_scaling_factor") or 1.0,
    )
    return read_decoder(
        config,
        attention_qkv_bias=config.boolean("attention_bias", False),
        num_kv_heads=[kv if kind == FULL else 2 * kv for kind in kinds],
        attention_value_dim=config.integer("v_head_dim", high=size),
        attention_value_scale=1.0 if scale is None else scale,
        scores_sinks=[kind == SLIDING for kind in kinds],
        **ropes,
        scores_window=windows,
        moe=moe,
    )


def _expect_mimo(config: ConfigReader) -> None:
    """Refuse other values of keys that the class takes as given."""
    config.expect("swa_num_attention_heads", config.integer("num_attention_heads"))
    config.expect("swa_num_key_value_heads", 2 * config.integer("num_key_value_heads"))
    config.expect("swa_head_dim", config.integer("head_dim"))
    config.expect("swa_v_head_dim", config.integer("v_head_dim"))
    config.expect("add_swa_attention_sink_bias", True)
    config.expect("add_full_attention_sink_bias", False)
    config.expect("n_shared_experts", None)
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    config.skip("attention_chunk_size")


def read_laguna(config: ConfigReader) -> DecoderConfig:
    """Poolside 2026: layers have unlike numbers of heads; attention's output is gated by softplus."""
    layers, size = num_layers(config), head_size(config)
    kinds = layer_kinds(config, [FULL] * layers)
    config.expect("moe_apply_router_weight_on_input", False)
    config.expect("rope_scaling", None)  # the class does not read it
    most, kv = config.integer("num_attention_heads"), config.integer("num_key_value_heads")

    def fits(count: Any) -> bool:
        return type(count) is int and count > 0 and count % kv == 0

    counts = read_list(config, "num_attention_heads_per_layer", [most] * layers, fits, f"multiples of {kv}")
    gating = config.get("gating")
    if gating not in (True, "per-head", "per-element"):
        raise config.wrong("gating", gating, 'true, "per-head" or "per-element"')
    dims = kind_dims(config, size, {FULL: 0.5, SLIDING: 1.0})
    ropes = read_layer_ropes(config, dims, kinds)
    moe = read_moe(
        config,
        layers=sparse_after(config, "", 1),
        shared=config.count("shared_expert_intermediate_size"),
        correction=True,
        scoring="sigmoid",
        renormalize=True,
        scale=config.number("moe_routed_scaling_factor"),
        score_cap=config.number("moe_router_logit_softcapping") or None,
    )
    return read_decoder(
        config,
        **biases(config),
        num_heads=counts,
        qk_norm="head",
        attention_gate="elements" if gating == "per-element" else "heads",
        attention_gate_activation="softplus",
        **ropes,
        scores_window=windows_of(config, kinds),
        moe=moe,
    )


def read_decilm(config: ConfigReader) -> DecoderConfig:
    """Llama after a search over layers (NVIDIA 2024, arXiv:2411.19146): attention and MLP by layer, or none."""
    layers, heads = num_layers(config), config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers:
        raise config.wrong("block_configs", blocks, f"{layers} objects")
    shapes = []
    for i in range(layers):
        block = ConfigReader(
            blocks[i] if isinstance(blocks[i], dict) else {}, f"{config.where}: block_configs[{i}]"
        )
        attention, ffn = block.section("attention"), block.section("ffn")
        if attention is None or ffn is None:
            raise block.wrong("attention", blocks[i], "an object, as must ffn")
        for part in (attention, ffn):
            part.expect("replace_with_linear", False)
            part.expect("sparsify", None)
        for key in ("num_sink_tokens", "window_length"):
            attention.expect(key, None)
        attention.skip("unshifted_sink use_prefill_window_in_sink_attention")
        none = attention.boolean("no_op", False)
        group = None if none else attention.integer("n_heads_in_group", high=heads)
        attention.skip("n_heads_in_group")
        factor = 0.0 if ffn.boolean("no_op", False) else ffn.number("ffn_mult")
        ffn.skip("ffn_mult")
        block.finish()
        if group is not None and heads % group:
            raise attention.wrong("n_heads_in_group", group, f"a divisor of {heads}")
        wide = -(-int(2 * factor * hidden / 3) // 256) * 256
        shapes.append((heads if group else 0, heads // group if group else 0, wide))
    return read_decoder(
        config,
        **biases(config),
        mlp_bias=config.boolean("mlp_bias", False),
        num_heads=[shape[0] for shape in shapes],
        num_kv_heads=[shape[1] for shape in shapes],
        intermediate_size=[shape[2] for shape in shapes],
    )


PER_LAYER_NAMES = {
    "layer_inputs": "model.embed_tokens_per_layer",
    "input.model": "model.per_layer_model_projection",
    "input.norm": "model.per_layer_projection_norm",
    "input.gate": "per_layer_input_gate",
    "input.out": "per_layer_projection",
    "input.post_norm": "post_per_layer_input_norm",
}
GEMMA4_NAMES = SANDWICH_NAMES.changed(
    {
        "norm_offset": 0.0,
        "scale": "layer_scalar",
        "mixture.router": "router.proj",
        "mixture.router_scale": "router.scale",
        "mixture.expert_scales": "router.per_expert_scale",
        "mixture.mlp_norm": "post_feedforward_layernorm_1",
        "mixture.experts_norm": "pre_feedforward_layernorm_2",
        "mixture.norm": "post_feedforward_layernorm_2",
        "mixture.experts": "experts.",
        "mixture.expert.up": "gate_up_proj",
        "mixture.expert.down": "down_proj",
        "expert_stack": "rows",
        "expert_halves": True,
        **PER_LAYER_NAMES,
    }
)
FAMILIES = {
    "Gemma4ForCausalLM": Family(
        "Gemma 4 (text: 26B-A4B, 31B, E2B, E4B)",
        read_gemma4,
        gemma4_names,
        {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "num_kv_shared_layers": 0,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        },
        {"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    ),
    "MiMoV2FlashForCausalLM": Family(
        "MiMo-V2-Flash 309B-A15B",
        read_mimo,
        {"attention.sinks": "self_attn.attention_sink_bias"},
        {
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e6,
            "swa_rope_theta": 1e4,
            "partial_rotary_factor": 0.334,
            "sliding_window": 129,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "attention_value_scale": 0.707,
        },
        {
            "rms_norm_eps": "rms_norm_eps layernorm_epsilon",
            "n_routed_experts": "n_routed_experts num_local_experts",
        },
    ),
    "LagunaForCausalLM": Family(
        "Laguna",
        read_laguna,
        {"attention.gate": "self_attn.g_proj", "mixture.correction": "mlp.experts.e_score_correction_bias"},
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window": 512,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "gating": True,
            "moe_routed_scaling_factor": 1.0,
            "moe_router_logit_softcapping": 0.0,
            "rope_parameters": {
                FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_theta": 1e4},
            },
        },
    ),
    "DeciLMForCausalLM": Family(
        "Llama-Nemotron Super 49B, Ultra 253B",
        read_decilm,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    ),
}
