"""Tiny random transformers models, saved as checkpoints, and a hand-driven session over a loaded one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from quire.devices.protocol import Backend, KVDtype, Limits, ModelInput, StateInput
from quire.model.loaded import LoadedModel

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# epsilons are large enough to be missed where one is forgotten
RMS = {**SMALL, "rms_norm_eps": 2e-3}
LAYER = {**SMALL, "layer_norm_eps": 2e-3}
MOE = {**RMS, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
TOKENS = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {**TOKENS, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
GPT = {**TOKENS, "hidden_size": 48, "n_layer": 3, "n_head": 4, "layer_norm_epsilon": 2e-3}
TABLES = ("embed", "wte", "wpe")
DEEPSEEK = {
    **RMS,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
LFM = {
    **SMALL,
    "num_hidden_layers": 5,
    "norm_eps": 2e-3,
    "pad_token_id": 0,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
}
DELTA = {
    **RMS,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
SCAN = {
    **SMALL,
    "num_hidden_layers": 5,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
# Families: what their classes are called, and the options that all variants have.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", RMS),
    "mistral": ("Mistral", RMS),
    "ministral": ("Ministral", {**RMS, "head_dim": 12}),
    "mixtral": ("Mixtral", {**RMS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", RMS),
    "qwen2_moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 40}),
    "qwen3": ("Qwen3", RMS),
    "qwen3_moe": ("Qwen3Moe", MOE),
    "granite": ("Granite", RMS),
    "smollm3": ("SmolLM3", {**RMS, "num_hidden_layers": 4, "pad_token_id": 0}),
    "stablelm": ("StableLm", {**LAYER, "partial_rotary_factor": 0.5}),
    "gemma": ("Gemma", {**RMS, "head_dim": 16, "num_hidden_layers": 2}),
    "gemma2": ("Gemma2", {**RMS, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3Text", {**RMS, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 20}),
    "phi": ("Phi", {**LAYER, "num_key_value_heads": 4}),
    "phi3": ("Phi3", {**RMS, "pad_token_id": 0}),
    "starcoder2": ("Starcoder2", {**SMALL, "norm_epsilon": 2e-3}),
    "olmo2": ("Olmo2", RMS),
    "olmo3": ("Olmo3", {**RMS, "sliding_window": 7, "num_hidden_layers": 4}),
    "exaone4": ("Exaone4", {**RMS, "sliding_window": 7, "num_hidden_layers": 4}),
    "cohere": ("Cohere", {**LAYER, "logit_scale": 0.6}),
    "cohere2": ("Cohere2", {**LAYER, "logit_scale": 0.6, "sliding_window": 7, "num_hidden_layers": 4}),
    "glm": ("Glm", {**RMS, "head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {**RMS, "head_dim": 16, "pad_token_id": 0}),
    "gpt2": ("GPT2", {**GPT, "n_positions": 128, "n_inner": 80}),
    "gptj": ("GPTJ", {**GPT, "n_positions": 128, "rotary_dim": 6}),
    "gpt_neox": (
        "GPTNeoX",
        {**PLAIN, "layer_norm_eps": 2e-3, "max_position_embeddings": 128, "intermediate_size": 80},
    ),
    "gpt_neox_japanese": (
        "GPTNeoXJapanese",
        {**PLAIN, "layer_norm_eps": 2e-3, "max_position_embeddings": 128},
    ),
    "opt": ("OPT", {**PLAIN, "ffn_dim": 80, "max_position_embeddings": 128}),
    "falcon": ("Falcon", {**PLAIN, "layer_norm_epsilon": 2e-3}),
    "bloom": ("Bloom", GPT),
    "gpt_oss": (
        "GptOss",
        {**RMS, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 7},
    ),
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK, "first_k_dense_replace": 1}),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}),
}
V3 = {
    **MOE,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
del V3["num_experts"]
LATENT = {key: value for key, value in DEEPSEEK.items() if "experts" not in key and "routed" not in key}
del LATENT["moe_intermediate_size"]
SLIDES = {"sliding_window": 7, "num_hidden_layers": 4}
LOCAL = {**RMS, "num_local_experts": 6, "num_experts_per_tok": 3}
GRANITE = {
    "attention_multiplier": 0.4,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
FAMILIES |= {
    "arcee": ("Arcee", RMS),
    "emu3_text_model": ("Emu3Text", {**RMS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "cwm": ("Cwm", {**RMS, "head_dim": 16, **SLIDES}),
    "seed_oss": ("SeedOss", {**RMS, "head_dim": 16}),
    "helium": ("Helium", {**RMS, "head_dim": 12}),
    "nanochat": ("NanoChat", RMS),
    "apertus": ("Apertus", RMS),
    "apertus1p5_text": ("Apertus1p5Text", RMS),
    "jais2": ("Jais2", LAYER),
    "nemotron": ("Nemotron", {**SMALL, "norm_eps": 2e-3, "head_dim": 16}),
    "bitnet": ("BitNet", RMS),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {**RMS, "head_dim": 16}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {**RMS, "head_dim": 16, "num_experts": 6, "moe_topk": 3}),
    "hy_v3": ("HYV3", {**MOE, "num_shared_experts": 2, "router_scaling_factor": 1.4}),
    "ernie4_5": ("Ernie4_5", {**RMS, "head_dim": 16}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**RMS, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24},
    ),
    "granite_swa": ("GraniteSWA", {**RMS, **GRANITE, **SLIDES, "logits_scaling": 3.0}),
    "granitemoe": ("GraniteMoe", {**LOCAL, **GRANITE}),
    "granitemoeshared": ("GraniteMoeShared", {**LOCAL, **GRANITE, "shared_intermediate_size": 40}),
    "granitemoe_swa": ("GraniteMoeSWA", {**LOCAL, **GRANITE, **SLIDES, "shared_intermediate_size": 40}),
    "hyperclovax": ("HyperCLOVAX", {**RMS, **GRANITE}),
    "ministral3": ("Ministral3", {**RMS, "head_dim": 16}),
    "vaultgemma": ("VaultGemma", {**RMS, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 20}),
    "olmo": ("Olmo", SMALL),
    "olmoe": ("Olmoe", {**RMS, "num_experts": 6, "num_experts_per_tok": 3}),
    "flex_olmo": ("FlexOlmo", {**RMS, "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0}),
    "minimax_m2": ("MiniMaxM2", {**LOCAL, "head_dim": 16}),
    "glm4_moe": ("Glm4Moe", {**V3, "num_nextn_predict_layers": 0}),
    "solar_open": ("SolarOpen", {k: v for k, v in V3.items() if k != "first_k_dense_replace"}),
    "dots1": ("Dots1", {**V3, **SLIDES, "max_window_layers": 2, "norm_topk_prob": True}),
    "exaone_moe": (
        "ExaoneMoe",
        {**MOE, **SLIDES, "num_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    ),
    "mellum": ("Mellum", {**MOE, **SLIDES}),
    "kolibri1": ("Kolibri1", {**MOE, **SLIDES, "shared_expert_intermediate_size": 40}),
    "flint": ("Flint", {**MOE, **SLIDES, "shared_expert_intermediate_size": 40}),
    "afmoe": ("Afmoe", {**MOE, **SLIDES, "num_dense_layers": 1, "route_scale": 1.4}),
    "phimoe": ("Phimoe", {**RMS, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "aria_text": ("AriaText", {**RMS, "moe_num_experts": 6, "moe_topk": 3, "pad_token_id": 0}),
    "cohere2_moe": (
        "Cohere2Moe",
        {**LAYER, **SLIDES, "head_dim": 16, "logit_scale": 0.6, "num_experts": 6, "num_experts_per_tok": 3},
    ),
    "llama4": (
        "Llama4Text",
        {**LOCAL, "head_dim": 16, "num_hidden_layers": 4, "intermediate_size_mlp": 96, "floor_scale": 9},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "axk1": ("AXK1", {**DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "exaone": ("Exaone", RMS),
    "internlm3": ("InternLM3", {**RMS, "head_dim": 16}),
    "iquestcoder": ("IQuestCoder", {**RMS, "head_dim": 16}),
    "sarvam_moe": ("SarvamMoE", {**V3, "num_nextn_predict_layers": 0}),
    "sarvam_mla": ("SarvamMLA", {**DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "longcat_flash": (
        "LongcatFlash",
        {
            **{k: v for k, v in LATENT.items() if k not in ("intermediate_size", "num_hidden_layers")},
            "num_layers": 2,
            "ffn_hidden_size": 80,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 6,
            "zero_expert_num": 3,
            "moe_topk": 4,
            "head_dim": 8,
            "routed_scaling_factor": 1.7,
        },
    ),
    "youtu": ("Youtu", LATENT),
    "minicpm3": ("MiniCPM3", LATENT),
    "gpt_bigcode": ("GPTBigCode", {**GPT, "n_positions": 128}),
    "codegen": ("CodeGen", {**GPT, "n_positions": 128, "rotary_dim": 6}),
    "gpt_neo": (
        "GPTNeo",
        {
            **TOKENS,
            "hidden_size": 48,
            "num_layers": 4,
            "num_heads": 4,
            "max_position_embeddings": 128,
            "window_size": 7,
            "attention_types": [[["global", "local"], 2]],
            "layer_norm_epsilon": 2e-3,
        },
    ),
    "openai-gpt": ("OpenAIGPT", {**GPT, "n_positions": 128}),
    "ctrl": ("CTRL", {**GPT, "n_positions": 128, "dff": 80, "layer_norm_epsilon": 1e-6}),
    "xglm": (
        "XGLM",
        {
            **TOKENS,
            "d_model": 48,
            "num_layers": 3,
            "attention_heads": 4,
            "ffn_dim": 80,
            "max_position_embeddings": 128,
        },
    ),
    "biogpt": (
        "BioGpt",
        {**PLAIN, "intermediate_size": 80, "max_position_embeddings": 128, "layer_norm_eps": 2e-3},
    ),
    "mpt": (
        "Mpt",
        {
            **TOKENS,
            "d_model": 48,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 128,
            "layer_norm_epsilon": 2e-3,
        },
    ),
    "persimmon": (
        "Persimmon",
        {**PLAIN, "intermediate_size": 80, "max_position_embeddings": 128, "layer_norm_eps": 2e-3},
    ),
}
FOUR = ["sliding_attention", "full_attention"] * 2
GEMMA4 = {
    **RMS,
    **SLIDES,
    "layer_types": FOUR,
    "head_dim": 16,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 97,
}
GEMMA3N = {
    **RMS,
    "num_hidden_layers": 5,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "sliding_window": 7,
    "head_dim": 16,
    "laurel_rank": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 90,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.7, 0.0, 0.4, 0.0, 0.0],
    "intermediate_size": [80, 80, 96, 64, 80],
}
FAMILIES |= {
    "gemma3n": ("Gemma3nText", GEMMA3N),
    "qwen3_next": (
        "Qwen3Next",
        {
            **DELTA,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": ("Qwen3_5Text", DELTA),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {
            **{key: value for key, value in DELTA.items() if key != "intermediate_size"},
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen4": (
        "Qwen4ExpText",
        {
            **{key: value for key, value in DELTA.items() if key != "intermediate_size"},
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "hc_count": 3,
            "hc_lowrank": 10,
            "indexer_n_heads": 12,  # with few, relu makes equal scores
            "indexer_kv_heads": 1,
            "indexer_head_dim": 20,
            "indexer_budget": 12,
            "indexer_compress_ratio": 3,
            "ple_layer_ids": [1, 4],
            "ple_embed_dim": 24,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 61,
            "make_ngram_vocab_size_divisible_by": 16,
            "split_ngram_parts": 3,
            "eos_token_id": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "minimax_m3": (
        "MiniMaxM3VLText",
        {
            **RMS,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 24,
            "dense_intermediate_size": 56,
            "shared_intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2, "full_attention"],
            "rotary_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "swiglu_limit": 1.5,
            "index_n_heads": 2,
            "index_head_dim": 12,
            "index_block_size": 5,
            "index_topk_blocks": 6,
            "routed_scaling_factor": 1.0,
        },
    ),
    "olmo_hybrid": (  # queries, keys and values are as wide as each other: transformers saves thirds of their taps
        "OlmoHybrid",
        {
            **DELTA,
            "num_key_value_heads": 4,
            "pad_token_id": 0,
            "linear_num_key_heads": 3,
            "linear_key_head_dim": 14,
            "linear_value_head_dim": 7,
        },
    ),
    "glm5_next": (
        "Glm5Next",
        {
            "text_config": {
                **RMS,
                "num_hidden_layers": 4,
                "num_key_value_heads": 4,
                "q_lora_rank": 20,
                "kv_lora_rank": 24,
                "qk_nope_head_dim": 12,
                "v_head_dim": 10,
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "routed_scaling_factor": 1.7,
                "swiglu_limit": 0.9,
                "index_head_dim": 12,
                "index_n_heads": 24,
                "index_topk": 12,
                "index_kpool": 4,
                "hc_mult": 3,
                "hc_sinkhorn_iters": 4,
                "hc_eps": 1e-3,
                "pad_token_id": 0,
                "linear_head_dim": 12,
                "linear_num_heads": 3,
                "layer_types": [
                    "linear_attention",
                    "indexed_attention",
                    "indexed_attention",
                    "linear_attention",
                ],
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                "indexer_types": ["full", "full", "shared", "full"],
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 8,
                "num_heads": 1,
                "intermediate_size": 8,
                "out_hidden_size": 48,
                "projection_intermediate_size": 8,
            },
            "experts_implementation": "eager",
        },
    ),
    "deepseek_v4": (
        "DeepseekV4",
        {
            **RMS,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 8,
            "o_groups": 2,
            "o_lora_rank": 12,
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "num_hash_layers": 1,
            "swiglu_limit": 0.9,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "hc_eps": 1e-3,
            "index_head_dim": 12,
            "index_n_heads": 24,
            "index_topk": 4,
            "sliding_window": 9,
            "compress_ratios": [0, 4, 128, 4],
            "compress_rate_hca": 16,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "rope_theta": 10000,
            "compress_rope_theta": 40000,
            "experts_implementation": "eager",
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **{key: value for key, value in DEEPSEEK.items() if "experts" not in key and "q_lora" not in key},
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "pad_token_id": 0,
            "linear_head_dim": 14,
            "linear_num_heads": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        },
    ),
    "lfm2": ("Lfm2", {**LFM, "intermediate_size": 150, "block_multiple_of": 16}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **LFM,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.4,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **SMALL,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "hybrid_override_pattern": "MEM*-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 10,
            "chunk_size": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **SCAN,
            "layer_types": ["mamba", "mamba", "attention", "mamba", "attention"],
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "num_local_experts": 8,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.3,
        },
    ),
    "bamba": ("Bamba", {**SCAN, "attn_layer_indices": [2]}),
    "falcon_h1": (
        "FalconH1",
        {
            **SCAN,
            "mamba_d_ssm": 96,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9,
            "embedding_multiplier": 1.9,
            "key_multiplier": 0.7,
            "lm_head_multiplier": 0.4,
            "mlp_multipliers": [0.9, 0.6],
            "ssm_in_multiplier": 1.2,
            "ssm_multipliers": [0.4, 0.7, 0.6, 0.5, 0.8],
            "ssm_out_multiplier": 0.6,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            **TOKENS,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 10,
            "chunk_size": 8,
        },
    ),
    "jamba": (
        "Jamba",
        {
            **RMS,
            "num_hidden_layers": 5,
            "attn_layer_period": 3,
            "num_experts": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 9,
            "mamba_dt_rank": 5,
        },
    ),
    "mamba": ("Mamba", {**TOKENS, "hidden_size": 48, "num_hidden_layers": 3, "state_size": 9}),
    "minimax": (
        "MiniMax",
        {
            **RMS,
            "head_dim": 14,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "block_size": 16,
            "full_attn_alpha_factor": 1.3,
            "full_attn_beta_factor": 0.9,
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.8,
            "mlp_alpha_factor": 1.1,
            "mlp_beta_factor": 0.7,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        {
            **{key: value for key, value in RMS.items() if key != "max_position_embeddings"},
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "lru_width": 54,
            "attention_window_size": 7,
            "logits_soft_cap": 20.0,
        },
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        {
            **{key: value for key, value in DEEPSEEK.items() if "experts" not in key and "q_lora" not in key},
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "pad_token_id": 0,
            "head_dim": 14,
            "layer_group_size": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **RMS,
            "num_key_value_heads": 4,
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 2,
            "adapter_rank": 5,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 10,
            "chunk_size": 8,
            "pad_token_id": 0,
        },
    ),
    "falcon_mamba": ("FalconMamba", {**TOKENS, "hidden_size": 48, "num_hidden_layers": 3, "state_size": 9}),
    "lfm3": (
        "Lfm3",
        {
            **LFM,
            "head_dim": 16,
            "conv_L_cache": 5,
            "sliding_window": 7,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention", "sliding_attention"],
        },
    ),
    "gemma4": ("Gemma4Text", GEMMA4),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            **RMS,
            **SLIDES,
            "layer_types": FOUR[::-1],
            "head_dim": 24,
            "v_head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "laguna": (
        "Laguna",
        {
            **MOE,
            **SLIDES,
            "layer_types": FOUR,
            "num_attention_heads_per_layer": [2, 4, 6, 8],
            "shared_expert_intermediate_size": 40,
            "moe_routed_scaling_factor": 1.7,
        },
    ),
}
# Enough heads that no key scores exactly nothing, as where all products are negative: equal scores are no test.
INDEXED = {
    **DEEPSEEK,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 11,
    "index_head_dim": 14,
    "index_n_heads": 20,
}
SHARING = {"indexer_types": ["full", "shared", "full", "shared"]}
FAMILIES |= {
    "deepseek_v32": ("DeepseekV32", {**INDEXED, "num_hidden_layers": 3}),
    "glm_moe_dsa": ("GlmMoeDsa", {**INDEXED, "num_hidden_layers": 3}),
    "hy_v4": (
        "HYV4",
        {
            **{key: value for key, value in INDEXED.items() if key != "first_k_dense_replace"},
            **SHARING,
            "hc_mult": 3,
            "hc_magnitude": 1.4,
            "hc_eps": 1e-2,
            "swiglu_limit": 0.8,
            "pad_token_id": 0,
        },
    ),
    "mistral_large4": (
        "MistralLarge4Text",
        {**{key: value for key, value in INDEXED.items() if key != "q_lora_rank"}, **SHARING},
    ),
}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
FAMILIES["hy_v4_vl"] = ("HYV4VLText", {**FAMILIES["hy_v4"][1], "rope_parameters": MROPE})
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_FULL_ONLY = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": YARN,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
}
ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa-head-dim": ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}},
    ),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN, "head_dim": 16}),
    "llama-rope-yarn-mscale": (
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "mscale": 0.7,
                "mscale_all_dim": 1.4,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
                "truncate": False,
            },
            "head_dim": 16,
        },
    ),
    "llama-rope-yarn-factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.25}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "layer_types": ALTERNATE},
    ),
    "ministral-layer-types": ("ministral", {"sliding_window": 8, "layer_types": ALTERNATE}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 7, "num_experts_per_tok": 3}),
    "qwen2-moe": ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen2-moe-plain-weights": ("qwen2_moe", {"decoder_sparse_step": 2, "qkv_bias": False}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-moe-window": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 9, "mlp_only_layers": [0]},
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.4,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.7,
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-interval": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    "llama-rope-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": ALTERNATE[::-1]},
    ),
    "gemma3": ("gemma3", {"layer_types": ALTERNATE, "final_logit_softcapping": 4.0}),
    "gemma3-rope-linear": (
        "gemma3",
        {
            "num_hidden_layers": 6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            },
        },
    ),
    "phi": ("phi", {}),
    "phi-qk-norm": ("phi", {"qk_layernorm": True, "hidden_act": "gelu"}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3-longrope-short": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "phi3-partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 9}),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"rope_parameters": YARN_FULL_ONLY}),
    "exaone4": ("exaone4", {}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "cohere": ("cohere", {}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("cohere2", {}),
    "gpt2": ("gpt2", {}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False, "n_inner": None, "tie_word_embeddings": False}),
    "gptj": ("gptj", {}),
    "gptj-tied": ("gptj", {"tie_word_embeddings": True, "n_inner": 60}),
    "gpt-neox": ("gpt_neox", {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}),
    "gpt-neox-sequential": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
    ),
    "gpt-neox-japanese": (
        "gpt_neox_japanese",
        {
            "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
            "intermediate_multiple_size": 2,
        },
    ),
    "opt": ("opt", {}),
    "opt-post-norm-projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-plain": ("opt", {"enable_bias": False, "_remove_final_layer_norm": True}),
    "falcon-7b": ("falcon", {}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-11b": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-rw": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-alibi": ("falcon", {"alibi": True}),
    "bloom": ("bloom", {}),
    "bloom-6-heads": ("bloom", {"n_head": 6}),
    "gpt-oss": ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False}}),
    "deepseek-v2": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek-v2-lite": ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek-v3": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek-v3-one-group": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "norm_topk_prob": False, "q_lora_rank": None},
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
}


LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
THREE = ["dense", "sparse", "sparse", "dense"]
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 4.0, "rope_theta": 100.0}
LLAMA_4 = {
    **YARN,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
    "original_max_position_embeddings": 16,
}
PER_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "default", "rope_theta": 900.0},
}
VARIANTS |= {name: (name, {}) for name in FAMILIES if not any(v[0] == name for v in VARIANTS.values())}
VARIANTS |= {
    "helium": ("helium", {"num_attention_heads": 4, "attention_bias": True}),
    "seed-oss-bias": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "hunyuan-alpha": ("hunyuan_v1_dense", {"rope_parameters": ALPHA}),
    "hy-v3-layers": ("hy_v3", {"num_hidden_layers": 4, "mlp_layer_types": THREE}),
    "ernie-bias": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "granite-swa-thetas": ("granite_swa", {"layer_rope_theta": [100.0, 0.0, 50.0, 100.0]}),
    "hyperclovax-pre": ("hyperclovax", {"use_post_norm": False, "attention_multiplier": None}),
    "ministral3": ("ministral3", {"rope_parameters": LLAMA_4}),
    "olmo-clip": ("olmo", {"clip_qkv": 0.8}),
    "minimax-rotary": ("minimax_m2", {"rotary_dim": 8}),
    "glm4-moe-norms": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False}),
    "mellum-layers": (
        "mellum",
        {"layer_types": LAYERS, "mlp_layer_types": THREE, "rope_parameters": PER_LAYER},
    ),
    "kolibri1": ("kolibri1", {"norm_topk_prob": True, "layer_types": LAYERS}),
    "flint": ("flint", {"layer_types": LAYERS}),
    "afmoe-mup": ("afmoe", {"mup_enabled": True, "layer_types": LAYERS}),
    "phimoe-head-bias": ("phimoe", {"lm_head_bias": True, "attention_bias": True, "sliding_window": 9}),
    "cohere2-moe": (
        "cohere2_moe",
        {"expert_selection_fn": "sigmoid", "num_shared_experts": 2, "first_k_dense_replace": 1},
    ),
    "cohere2-moe-sum": (
        "cohere2_moe",
        {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum"},
    ),
    "llama4": ("llama4", {"attention_chunk_size": 16, "interleave_moe_layer_step": 2}),
    "llama4-no-norm": ("llama4", {"use_qk_norm": False, "attn_temperature_tuning": False}),
    "deepseek-v3-halves": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    "minicpm3-plain": ("minicpm3", {"scale_depth": None, "dim_model_base": None, "v_head_dim": None}),
    "bigcode-heads": ("gpt_bigcode", {"multi_query": False}),
    "mpt-clip": ("mpt", {"attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.4}}),
    "xglm-unscaled": ("xglm", {"scale_embedding": False}),
    "persimmon-no-norm": ("persimmon", {"qk_layernorm": False}),
    "gemma3n": ("gemma3n", {}),
    "qwen3_next-dense-1": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5-half": (
        "qwen3_5",
        {
            "layer_types": None,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3_5-biases": ("qwen3_5", {"attention_bias": True}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "qwen4": ("qwen4", {}),
    "qwen4-long-ngrams": (
        "qwen4",
        {
            "ngram_size": 4,
            "heads_per_ngram": 1,
            "ple_conv_kernel_size": 3,
            "attention_bias": True,
            "output_gate_type": "sigmoid",
            "layer_types": None,
            "ple_layer_ids": [1, 3],
            "hc_count": 2,
            "indexer_compress_ratio": 6,
            "tie_word_embeddings": True,
        },
    ),
    "minimax_m3": ("minimax_m3", {}),
    "minimax_m3-local": (
        "minimax_m3",
        {
            "index_local_blocks": 3,
            "index_block_size": 3,
            "mlp_layer_types": ["dense", "dense", "dense", "sparse"],
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "olmo_hybrid-plain": (
        "olmo_hybrid",
        {
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "kimi_linear": ("kimi_linear", {}),
    "glm5_next": ("glm5_next", {}),
    "deepseek_v4": ("deepseek_v4", {}),
    "deepseek_v4-others": (
        "deepseek_v4",
        {
            "compress_ratios": None,
            "compress_rate_hca": None,
            "layer_types": [
                "compressed_sparse_attention",
                "sliding_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 9},
            "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"],
            "scoring_func": "sigmoid",
            "rope_scaling": None,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 1,
            "o_groups": 4,
        },
    ),
    "kimi_linear-groups": (
        "kimi_linear",
        {
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 20,
            "linear_conv_kernel_dim": 3,
            "norm_topk_prob": False,
        },
    ),
    "lfm2": ("lfm2", {}),
    "lfm2-bias": (
        "lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "layer_types": None,
            "full_attn_idxs": [0, 2],
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm2_moe-plain": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True}),
    "lfm3": ("lfm3", {}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-latent": ("nemotron_h", {"moe_latent_size": 32, "norm_topk_prob": False, "use_bias": True}),
    "granitemoehybrid": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "granitemoehybrid-dense": ("granitemoehybrid", {"num_local_experts": 0, "mamba_proj_bias": True}),
    "bamba": ("bamba", {}),
    "bamba-limits": ("bamba", {"time_step_limit": (0.2, 0.5), "mamba_conv_bias": False}),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1-norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "mamba2": ("mamba2", {}),
    "jamba": ("jamba", {}),
    "jamba-dense": ("jamba", {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    "mamba": ("mamba", {}),
    "mamba-bias": ("mamba", {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False}),
    "minimax": ("minimax", {}),
    "minimax-window": ("minimax", {"layer_types": None, "sliding_window": 7, "mlp_alpha_factor": 1}),
    "recurrent_gemma": ("recurrent_gemma", {}),
    "recurrent_gemma-bias": (
        "recurrent_gemma",
        {
            "attention_bias": True,
            "block_types": ["attention", "recurrent"],
            "lru_width": None,
            "conv1d_width": 3,
        },
    ),
    "bailing_hybrid": ("bailing_hybrid", {}),
    "bailing_hybrid-unbounded": (
        "bailing_hybrid",
        {"kda_safe_gate": False, "q_lora_rank": 20, "short_conv_kernel_size": 3, "norm_topk_prob": False},
    ),
    "zamba2": ("zamba2", {}),
    "zamba2-plain": (
        "zamba2",
        {
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
            "num_mem_blocks": 1,
            "add_bias_linear": True,
        },
    ),
    "falcon_mamba": ("falcon_mamba", {"mixer_rms_eps": 2e-3}),
    "lfm3-plain": ("lfm3", {"use_sandwich_norm": False, "use_attention_gate": False}),
    "gemma3n-own-keys": (
        "gemma3n",
        {
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "activation_sparsity_pattern": None,
            "layer_types": None,
            "vocab_size_per_layer_input": 99,
            "intermediate_size": 80,
        },
    ),
    "gemma4": (
        "gemma4",
        {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 4.0},
    ),
    "gemma4-moe": (
        "gemma4",
        {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24},
    ),
    "gemma4-inputs-by-layer": (
        "gemma4",
        {"hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "mimo_v2_flash": ("mimo_v2_flash", {}),
    "mimo-odd-share": ("mimo_v2_flash", {"head_dim": 16}),
    "laguna": ("laguna", {"moe_router_logit_softcapping": 1.5}),
    "deepseek-v3.2": (
        "deepseek_v32",
        {"attention_bias": True, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "glm-5": ("glm_moe_dsa", {"n_group": 4, "topk_group": 2}),
    "glm-5.2": ("glm_moe_dsa", {"num_hidden_layers": 4, **SHARING}),
    "hunyuan-4": ("hy_v4", {}),
    "hunyuan-4-vl": ("hy_v4_vl", {}),
    "mistral-large-4": (
        "mistral_large4",
        {"index_topk": 36, "no_rope_layers": [1, 0, 0, 1], "kv_source_layers": [0, 1, 1, 0]},
    ),
    "laguna-elements": ("laguna", {"gating": "per-element", "num_attention_heads_per_layer": None}),
}


PARTS = {"Emu3Text": "Emu3ForCausalLM", "Glm5Next": "Glm5NextForConditionalGeneration"}
WHOLES = {"MistralLarge4Text": "MistralLarge4", "HYV4VLText": "HYV4VL"}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}


def make_model(variant: str, **changes: Any) -> Any:
    """A transformers model in float32 whose every parameter, norms and biases too, changes the logits."""
    family, options = VARIANTS[variant]
    name, common = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**common, **options, **changes})
    if name in WHOLES:  # which only a model that sees contains
        tower = (
            {"out_hidden_size": 48, "max_image_size": 16}
            if name == "HYV4VLText"
            else {"model_type": "pixtral"}
        )
        kind = getattr(transformers, f"{WHOLES[name]}Config")
        whole = kind(text_config=config.to_dict(), vision_config={**TOWER, **tower})
        kind = getattr(transformers, f"{WHOLES[name]}ForConditionalGeneration")
        return randomized(kind(whole).eval(), len(variant))
    if name in PARTS:  # transformers' automatic classes know only the whole of which it is a part
        return randomized(getattr(transformers, PARTS[name])(config).eval(), len(variant))
    return randomized(transformers.AutoModelForCausalLM.from_config(config).eval(), len(variant))


def randomized(model: Any, seed: int) -> Any:
    """The model with random parameters and buffers."""
    config = model.config
    torch.manual_seed(seed)
    tables = 0.5 if config.tie_word_embeddings else 1.0  # logits of a size that float32 can tell apart
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() >= 2:
                parameter.copy_(
                    tables * noise
                    if any(part in name for part in TABLES)
                    else (0.25 if "shared_transformer" in name else 1.5) * noise / parameter.shape[-1] ** 0.5
                )
            else:
                parameter.copy_(
                    0.5 * noise + (1.0 if "norm" in name or ".ln_" in name or "scale" in name else 0.0)
                )
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.copy_(0.2 * torch.randn_like(buffer))
            if "tid2eid" in name:
                buffer.copy_(torch.randint(config.n_routed_experts, buffer.shape))
            if "layer_scalar" in name:
                buffer.fill_(0.8)
    return model


def save_torch(model: Any, directory: Path, shards: int = 1) -> None:
    """config.json beside pytorch_model.bin, or shards of it with an index."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    state = model.state_dict()
    if shards == 1:
        torch.save(state, directory / "pytorch_model.bin")
        return
    weight_map = {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin"
        part = {name: state[name] for name in list(state)[shard::shards]}
        torch.save(part, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def torch_logits(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens])).logits[0])


def i32(*values: Any) -> Any:
    return np.array(values, np.int32)


@dataclasses.dataclass
class Session:
    """One sequence in a slot of 3, over blocks in shuffled order among blocks of nobody.

    It uses the adapter of slot 0 if there are slots for `adapters`.
    """

    model: LoadedModel
    backend: Backend
    block_size: int = 4
    kv_dtype: KVDtype = "float32"
    max_len: int = 320
    slot: int = 1
    adapters: int = 0

    def __post_init__(self) -> None:
        width = -(-self.max_len // self.block_size)
        spec = self.model.info.kv_spec(self.kv_dtype)
        self.has_states = spec.bytes_per_state(0) > 0
        rows = 3 if self.has_states else 0
        kv = self.kv = self.backend.kv_cache(spec, 3 * width, self.block_size, rows)
        limits = Limits(64, 4, 64, self.adapters)
        self.executable = self.backend.compile(self.model.graph, kv, limits)
        self.table = np.random.default_rng(0).permutation(3 * width).astype(np.int32).reshape(3, width)
        self.length = 0

    def feed(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """Append tokens; logits of each, copied."""
        count, start = len(tokens), self.length
        self.length += count
        inputs = ModelInput(
            tokens_T=i32(*tokens),
            positions_T=np.arange(start, self.length, dtype=np.int32),
            cu_q_B1=i32(0, count),
            kv_len_B=i32(self.length),
            slots_B=i32(self.slot),
            block_table_SM=self.table,
            logit_rows_L=np.arange(count, dtype=np.int32),
            adapters_B=i32(0) if self.adapters else None,
            states=self.states([self.slot], [count]),
        )
        return self.executable.run(inputs).numpy().copy()

    def states(self, slots: list[int], counts: list[int]) -> StateInput | None:
        """States that take in all tokens of a step; a sequence's row is its slot."""
        if not self.has_states:
            return None
        return StateInput(i32(*slots), i32(*[0] * len(slots)), i32(*counts), np.zeros((0, 3), np.int32))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        logits = self.feed(prompt)
        output = []
        for _ in range(count):
            output.append(int(logits[-1].argmax()))
            logits = self.feed(output[-1:])
        return output
