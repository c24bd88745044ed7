"""DeepSeek-V2, V3 and their kin: latent attention over a compressed cache, experts chosen by group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, num_layers, read_decoder, read_moe, sparse_after
from quire.model.families.names import LLAMA_NAMES, TensorNames
from quire.model.families.rope import read_rope
from quire.model.parts.bounds import MAX_LAYERS
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.norm import NormConfig
from quire.model.tree import mixture_fields

NOTHING: Mapping[str, Any] = {}


def deepseek_names(
    spec: DecoderConfig, config: ConfigReader, changes: Mapping[str, Any] = NOTHING
) -> TensorNames:
    """Turn neighbours or halves as the config says; `changes` are a later family's."""
    interleaved = config.boolean("rope_interleave", True)
    return LLAMA_NAMES.changed(
        {"interleaved": interleaved, "mixture.shared": "mlp.shared_experts.", **changes}
    )


def read_deepseek_v2(config: ConfigReader) -> DecoderConfig:
    """DeepSeek-AI 2024, arXiv:2405.04434. V2 chooses among the best groups, V2-Lite among all experts."""
    config.expect("scoring_func", "softmax")
    config.expect("norm_topk_prob", False, None)
    config.expect("rope_interleave", True)  # of V3; V2's code is always interleaved
    method = config.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.wrong("topk_method", method, "greedy or group_limited_greedy")
    if method == "greedy":
        config.skip("n_group topk_group")
    groups = {"num_groups": 1} if method == "greedy" else {}
    return read_latent(config, moe=read_routed(config, **groups))


def read_deepseek_v3(
    config: ConfigReader,
    first_dense: int = 0,
    latent: Mapping[str, Any] = NOTHING,
    about: Mapping[str, Any] = NOTHING,
    **moe: Any,
) -> DecoderConfig:
    """DeepSeek-AI 2024, arXiv:2412.19437. A bias that balances the experts' load counts for the choice alone."""
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    extra = config.count("num_nextn_predict_layers", 0)
    if extra > 1:
        raise config.wrong("num_nextn_predict_layers", extra, "0 or 1")
    routing = {"scoring": "sigmoid", "group_sum": True, "renormalize": config.boolean("norm_topk_prob")}
    mixture = read_routed(config, first_dense, correction=True, **routing)
    return read_latent(config, latent=latent, moe=None if mixture is None else mixture | moe, **about)


def read_routed(config: ConfigReader, first_dense: int = 0, **fields: Any) -> dict[str, Any] | None:
    config.expect("moe_layer_freq", 1)
    config.skip("ep_size")  # how training was spread
    layers = sparse_after(config, default=first_dense, prevails=True)
    if not any(layers):
        config.skip(
            "n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts n_group topk_group"
        )
        config.skip("routed_scaling_factor topk_method")
        return None
    shared = config.optional_integer("n_shared_experts") or 0
    return read_moe(
        config,
        layers=layers,
        experts="n_routed_experts",
        shared=shared * config.integer("moe_intermediate_size"),
        scale=config.number("routed_scaling_factor"),
        **fields,
    )


def read_latent(
    config: ConfigReader, value_dim: int | None = None, latent: Mapping[str, Any] = NOTHING, **fields: Any
) -> DecoderConfig:
    """A decoder with latent attention; head_dim, if the config has it, repeats the size of the rotated part.

    The family sets other fields of its attention in `latent`.
    """
    config.skip("head_dim")
    heads = config.integer("num_attention_heads")
    config.expect("num_key_value_heads", heads, None)
    nope, rotated = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    bias = config.boolean("attention_bias", False)
    own = {
        "q_rank": config.optional_integer("q_lora_rank"),
        "kv_rank": config.integer("kv_lora_rank"),
        "nope_dim": nope,
        "rope_dim": rotated,
        "value_dim": value_dim or config.integer("v_head_dim"),
        "bias": bias,
        "norm": NormConfig("rms", 1e-6),
        **latent,
    }
    rope = read_rope(config, rotated, config.integer("max_position_embeddings"))
    head_dim = nope + rotated
    config.expect("qk_head_dim", head_dim)
    return read_decoder(
        config,
        num_kv_heads=heads,
        head_dim=head_dim,
        rotated=rotated,
        rope=rope,
        scores_scale=head_dim**-0.5 * rope.temperature,
        attention_out_bias=bias,
        **{"kinds": "latent", **fields, "mixers": {"latent": own, **fields.get("mixers", {})}},
    )


def read_longcat(config: ConfigReader) -> DecoderConfig:
    """Meituan 2025, arXiv:2509.01322: each module has two layers; the first's mixture joins after the second.

    Some experts return their input.
    """
    config.expect_all({"zero_expert_type": "identity", "router_bias": False, "attention_method": "MLA"})
    config.expect_all({"mla_scale_q_lora": True, "mla_scale_kv_lora": True})
    modules, hidden = config.integer("num_layers", high=MAX_LAYERS // 2), config.integer("hidden_size")
    config.expect("num_hidden_layers", 2 * modules)
    twice = config.derived({"num_hidden_layers": 2 * modules})
    experts, zero = config.integer("n_routed_experts"), config.count("zero_expert_num")
    moe = mixture_fields(
        experts + zero,
        config.integer("num_experts_per_tok", high=experts + zero),
        config.integer("moe_intermediate_size"),
        [True, False] * modules,
        scale=config.number("routed_scaling_factor"),
        correction=True,
        zero_experts=zero,
        with_mlp=True,
    )
    scales = {
        "q_scale": (hidden / config.integer("q_lora_rank")) ** 0.5,
        "kv_scale": (hidden / config.integer("kv_lora_rank")) ** 0.5,
    }
    return read_latent(twice, latent=scales, moe=moe)


def longcat_names(spec: DecoderConfig, config: ConfigReader) -> TensorNames:
    """transformers saves a gate for experts that have none."""
    first = config.integer("n_routed_experts")
    unused = "|".join(str(first + i) for i in range(config.count("zero_expert_num")))
    plain = LLAMA_NAMES.changed({"interleaved": True})
    own = {path: name.replace("self_attn.", "self_attn.{j}.") for path, name in plain.modules.items()}
    return plain.changed(
        {
            "sublayers": 2,
            **own,
            "attention_norm": "input_layernorm.{j}",
            "mlp_norm": "post_attention_layernorm.{j}",
            "mlp.gate": "mlps.{j}.gate_proj",
            "mlp.up": "mlps.{j}.up_proj",
            "mlp.down": "mlps.{j}.down_proj",
            "mixture.router": "mlp.router.classifier",
            "mixture.correction": "mlp.router.e_score_correction_bias",
            "ignored": (
                *plain.ignored,
                r"model\.mtp\..*",
                rf"model\.layers\.\d+\.mlp\.experts\.({unused})\..*",
            ),
        }
    )


def read_youtu(config: ConfigReader) -> DecoderConfig:
    """Tencent 2025: dense layers with latent attention."""
    config.skip("embedding_initializer_range")
    return read_latent(config)


def read_minicpm3(config: ConfigReader) -> DecoderConfig:
    """Hu et al. 2024, arXiv:2404.06395: multipliers, and latent attention with halves as rotary pairs."""
    hidden, layers = config.integer("hidden_size"), num_layers(config)
    depth = config.optional_number("scale_depth")
    base = config.optional_integer("dim_model_base")
    value = config.optional_integer("v_head_dim") or hidden // config.integer("num_attention_heads")
    return read_latent(
        config,
        value,
        mlp_bias=config.boolean("mlp_bias", False),
        embedding_scale=config.number("scale_emb"),
        multiplier=1.0 if depth is None else depth / math.sqrt(layers),
        head_scale=1.0 if base is None else base / hidden,
    )


LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
ROUTED = {"n_routed_experts": "n_routed_experts num_local_experts"}
MTP = {"num_nextn_predict_layers": "num_nextn_predict_layers num_mtp_layers"}
V3 = {
    **LATENT,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
}
FAMILIES = {
    "DeepseekV2ForCausalLM": Family(
        "DeepSeek-V2, V2-Lite",
        read_deepseek_v2,
        deepseek_names,
        {
            **LATENT,
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
        further=1,
    ),
    "DeepseekV3ForCausalLM": Family(
        "DeepSeek-V3, R1, Kimi-K2",
        read_deepseek_v3,
        deepseek_names,
        {**V3, "first_k_dense_replace": 3},
        {**MTP, **ROUTED},
        further=1,
    ),
    "SarvamMLAForCausalLM": Family(
        "Sarvam 105B",
        read_deepseek_v3,
        deepseek_names,
        {
            **V3,
            "q_lora_rank": None,
            "n_routed_experts": 128,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        {
            **MTP,
            "n_routed_experts": "n_routed_experts num_experts num_local_experts",
            "n_shared_experts": "n_shared_experts num_shared_experts",
            "qk_head_dim": "qk_head_dim q_head_dim",
        },
        further=1,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "GLM-4.7-Flash",
        partial(read_deepseek_v3, first_dense=1),
        deepseek_names,
        {
            **V3,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "v_head_dim": 256,
            "qk_nope_head_dim": 192,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
        },
        {**MTP, **ROUTED},
        further=1,
    ),
    "AXK1ForCausalLM": Family(
        "A.X K1",
        partial(read_deepseek_v3, first_dense=1, norm=True),
        partial(deepseek_names, changes={"mixture.norm": "post_mlp_layernorm"}),
        {**V3, "max_position_embeddings": 32768, "n_routed_experts": 192},
        {**MTP, **ROUTED},
        further=1,
    ),
    "LongcatFlashForCausalLM": Family(
        "LongCat-Flash 560B",
        read_longcat,
        longcat_names,
        {
            **LATENT,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e7,
            "zero_expert_num": 256,
            "routed_scaling_factor": 6.0,
        },
        {
            "intermediate_size": "ffn_hidden_size intermediate_size",
            "moe_intermediate_size": "expert_ffn_hidden_size moe_intermediate_size",
            "num_experts_per_tok": "moe_topk num_experts_per_tok",
            **ROUTED,
        },
    ),
    "YoutuForCausalLM": Family(
        "Youtu-LLM 2B",
        read_youtu,
        deepseek_names,
        {**LATENT, "max_position_embeddings": 131072, "tie_word_embeddings": True},
        further=1,
    ),
    "MiniCPM3ForCausalLM": Family(
        "MiniCPM 3 4B",
        read_minicpm3,
        {},
        {
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "scale_emb": 12.0,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
    ),
}
