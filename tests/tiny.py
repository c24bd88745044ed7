"""Tiny random checkpoints made on the spot, as a hub would hold them: config, safetensors, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.model.families import read_model
from quire.model.packing import wanted_tensors

VOCAB_SIZE = 320
BOS, EOS = 256, 257
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]

CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
LAYER = {"rms_norm_eps": None, "layer_norm_eps": 1e-5}
SLIDING = {"sliding_window": 24}
# Without the keys that older families do not have.
BARE = dict.fromkeys(
    (
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "hidden_act",
        "rms_norm_eps",
        "rope_theta",
    )
)
GPT = {
    **BARE,
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")),
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "n_inner": 96,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "bloom": {
        **BARE,
        "architectures": ["BloomForCausalLM"],
        "max_position_embeddings": None,
        "seq_length": 512,
        "layer_norm_epsilon": 1e-5,
    },
}
# Families whose residual streams mix.
MIXED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "q_lora_rank": 20,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "index_head_dim": 12,
    "index_n_heads": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-6,
    "swiglu_limit": 1.2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
STREAMS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        **MIXED,
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 12,
        "intermediate_size": None,
        "num_hash_layers": 1,
        "index_topk": 3,
        "sliding_window": 7,
        "compress_ratios": [0, 4, 128, 4],
        "compress_rate_hca": 6,
    },
    "glm5_next_text": {
        **MIXED,
        "architectures": ["Glm5NextForCausalLM"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
        "head_dim": None,
        "index_topk": 8,
        "index_kpool": 4,
        "linear_head_dim": 12,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
}
# Families with recurrent layers.
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "full_attention_interval": 2,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "rms_norm_eps": None,
        "hidden_act": None,
        "norm_eps": 1e-5,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_multiple_of": 16,
    },
    "qwen3_5": {**DELTA, "architectures": ["Qwen3_5ForCausalLM"]},
    "qwen3_next": {
        **DELTA,
        "architectures": ["Qwen3NextForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
    },
    "kimi_linear": {
        "architectures": ["KimiLinearForCausalLM"],
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "moe_intermediate_size": 24,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "head_dim": 12,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "bailing_hybrid": {
        "architectures": ["BailingHybridForCausalLM"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "head_dim": 12,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "layer_group_size": 2,
        "first_k_dense_replace": 1,
    },
    "zamba2": {
        "architectures": ["Zamba2ForCausalLM"],
        "head_dim": None,
        "hidden_act": "gelu",
        "num_key_value_heads": 4,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
        "num_mem_blocks": 2,
        "adapter_rank": 5,
        "use_shared_attention_adapter": True,
        "n_mamba_heads": 4,
        "mamba_d_state": 10,
        "tie_word_embeddings": True,
        "rope_theta": None,
    },
    "minimax": {
        "architectures": ["MiniMaxForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_attn_alpha_factor": 1.3,
    },
    "recurrent_gemma": {
        "architectures": ["RecurrentGemmaForCausalLM"],
        "head_dim": 12,
        "lru_width": 56,
        "hidden_act": None,
        "max_position_embeddings": None,
        "attention_window_size": 24,
        "tie_word_embeddings": True,
    },
}
# Families that choose what attention sees, by blocks or pools.
CHOOSING: dict[str, dict[str, Any]] = {
    "minimax_m3": {
        "architectures": ["MiniMaxM3ForCausalLM"],
        "num_hidden_layers": 3,
        "hidden_act": "swigluoai",
        "partial_rotary_factor": 0.5,
        "intermediate_size": 32,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 40,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "moe_layer_freq": [0, 1, 1],
        "routed_scaling_factor": 2.0,
        "swiglu_limit": 7.0,
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 8,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 3,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 1],
        },
    },
    "qwen4": {
        **{key: value for key, value in DELTA.items() if key != "full_attention_interval"},
        "architectures": ["Qwen4ExpForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 41,
        "split_ngram_parts": 3,
        "eos_token_id": 2,
        "indexer_n_heads": 6,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
}
# The rest of the families that run natively.
OTHERS: dict[str, dict[str, Any]] = {
    "ministral": {"architectures": ["MinistralForCausalLM"], "sliding_window": 24},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.2,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.9,
    },
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2},
    "stablelm": {
        **LAYER,
        "architectures": ["StableLmForCausalLM"],
        "qk_layernorm": True,
        "partial_rotary_factor": 0.5,
    },
    "gemma": {"architectures": ["GemmaForCausalLM"]},
    "gemma2": {**SLIDING, "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 5.0},
    "gemma3": {**SLIDING, "architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2},
    "phi": {**LAYER, "architectures": ["PhiForCausalLM"], "partial_rotary_factor": 0.5},
    "phi3": {**SLIDING, "architectures": ["Phi3ForCausalLM"]},
    "starcoder2": {
        **SLIDING,
        "architectures": ["Starcoder2ForCausalLM"],
        "rms_norm_eps": None,
        "norm_epsilon": 1e-5,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "olmo3": {**SLIDING, "architectures": ["Olmo3ForCausalLM"], "rope_theta": 5e5},
    "exaone4": {**SLIDING, "architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": 2},
    "cohere": {**LAYER, "architectures": ["CohereForCausalLM"], "use_qk_norm": True},
    "cohere2": {**LAYER, **SLIDING, "architectures": ["Cohere2ForCausalLM"], "sliding_window_pattern": 2},
    "glm": {"architectures": ["GlmForCausalLM"]},
    "glm4": {"architectures": ["Glm4ForCausalLM"]},
    "gpt2": {**GPT, "architectures": ["GPT2LMHeadModel"]},
    "gptj": {**GPT, "architectures": ["GPTJForCausalLM"], "rotary_dim": 6},
    "gpt_neox": {
        **LAYER,
        "architectures": ["GPTNeoXForCausalLM"],
        "num_key_value_heads": None,
        "rotary_pct": 0.5,
    },
    "gpt_neox_japanese": {
        **LAYER,
        "architectures": ["GPTNeoXJapaneseForCausalLM"],
        "num_key_value_heads": None,
        "intermediate_size": None,
        "rope_theta": None,
        "rotary_pct": 0.5,
    },
    "opt": {**BARE, "architectures": ["OPTForCausalLM"], "ffn_dim": 96, "word_embed_proj_dim": 32},
    "falcon": {
        **BARE,
        "architectures": ["FalconForCausalLM"],
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "falcon_alibi": {**BARE, "architectures": ["FalconForCausalLM"], "alibi": True},
    "deepseek_v2": {
        **FAMILIES["deepseek_v3"],
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "group_limited_greedy",
    },
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
GROUPED = {
    **EXPERTS,
    "num_experts": None,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
SHARED = {"shared_expert_intermediate_size": 40}
MLA = {
    key: FAMILIES["deepseek_v3"][key]
    for key in ("num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
} | {"v_head_dim": 10, "head_dim": None}
OTHERS |= {
    name: {"architectures": [f"{architecture}ForCausalLM"], **changes}
    for name, architecture, changes in (
        ("emu3_text_model", "Emu3", {}),
        ("cwm", "Cwm", {**SLIDING, "rope_theta": None}),
        ("seed_oss", "SeedOss", {}),
        ("helium", "Helium", {"head_dim": 12}),
        ("arcee", "Arcee", {"hidden_act": "relu2"}),
        ("jais2", "Jais2", {**LAYER, "hidden_act": "relu2"}),
        ("nemotron", "Nemotron", {"rms_norm_eps": None, "hidden_act": "relu2", "norm_eps": 1e-5}),
        ("bitnet", "BitNet", {"hidden_act": "relu2"}),
        ("nanochat", "NanoChat", {"hidden_act": "relu2"}),
        ("apertus", "Apertus", {"hidden_act": "xielu", "rope_theta": 12e6}),
        ("apertus1p5_text", "Apertus1p5Text", {"hidden_act": "xielu", "rope_theta": 12e6}),
        ("internlm3", "InternLM3", {"qkv_bias": True}),
        ("iquestcoder", "IQuestCoder", {}),
        ("hunyuan_v1_dense", "HunYuanDenseV1", {}),
        ("hunyuan_v1_moe", "HunYuanMoEV1", {"num_experts": 6, "moe_topk": 2}),
        ("hy_v3", "HYV3", EXPERTS),
        ("ernie4_5", "Ernie4_5", {}),
        (
            "ernie4_5_moe",
            "Ernie4_5_Moe",
            {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32},
        ),
        ("granite_swa", "GraniteSWA", {**SLIDING, "layer_rope_theta": [100, 0, 1000], "logits_scaling": 0.9}),
        ("granitemoe", "GraniteMoe", LOCAL),
        ("granitemoeshared", "GraniteMoeShared", {**LOCAL, "shared_intermediate_size": 40}),
        ("granitemoe_swa", "GraniteMoeSWA", {**LOCAL, **SLIDING}),
        ("hyperclovax", "HyperCLOVAX", {"residual_multiplier": 0.6}),
        (
            "ministral3",
            "Ministral3",
            {
                "rope_theta": None,
                "rope_parameters": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "llama_4_scaling_beta": 0.2,
                },
            },
        ),
        ("vaultgemma", "VaultGemma", {**SLIDING, "hidden_act": None}),
        ("olmo", "Olmo", {"rms_norm_eps": None, "clip_qkv": 2.0}),
        ("olmoe", "Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
        ("flex_olmo", "FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 2}),
        ("minimax_m2", "MiniMaxM2", {**LOCAL, "rotary_dim": 8}),
        ("glm4_moe", "Glm4Moe", {**GROUPED, "use_qk_norm": True}),
        ("solar_open", "SolarOpen", {**GROUPED, "first_k_dense_replace": None}),
        ("dots1", "Dots1", {**GROUPED, **SLIDING, "n_shared_experts": 1, "max_window_layers": 1}),
        ("exaone_moe", "ExaoneMoe", {**EXPERTS, **SLIDING, "sliding_window_pattern": 2}),
        ("mellum", "Mellum", {**EXPERTS, **SLIDING, "rope_theta": None}),
        ("kolibri1", "Kolibri1", {**EXPERTS, **SLIDING, **SHARED}),
        ("flint", "Flint", {**EXPERTS, **SLIDING, **SHARED}),
        ("afmoe", "Afmoe", {**EXPERTS, **SLIDING, "global_attn_every_n_layers": 2}),
        ("phimoe", "Phimoe", LOCAL),
        ("aria_text", "AriaText", {"moe_num_experts": 6, "moe_topk": 2}),
        (
            "cohere2_moe",
            "Cohere2Moe",
            {
                **SLIDING,
                "rms_norm_eps": None,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "num_shared_experts": 1,
                "sliding_window_pattern": 2,
            },
        ),
        (
            "llama4_text",
            "Llama4",
            {
                **LOCAL,
                "intermediate_size_mlp": 96,
                "interleave_moe_layer_step": 2,
                "no_rope_layer_interval": 2,
                "attention_chunk_size": 24,
                "floor_scale": 20,
            },
        ),
        ("glm4_moe_lite", "Glm4MoeLite", {**MLA, **GROUPED}),
        ("axk1", "AXK1", {**MLA, **GROUPED}),
        ("youtu", "Youtu", MLA),
        ("minicpm3", "MiniCPM3", MLA),
        (
            "gemma4_text",
            "Gemma4",
            {
                **SLIDING,
                "num_global_key_value_heads": 1,
                "global_head_dim": 24,
                "attention_k_eq_v": True,
                "hidden_act": None,
                "rope_theta": None,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "hidden_size_per_layer_input": 12,
                "vocab_size_per_layer_input": VOCAB_SIZE,
                "num_kv_shared_layers": 1,
                "enable_moe_block": True,
                "num_experts": 6,
                "top_k_experts": 2,
                "moe_intermediate_size": 32,
            },
        ),
        (
            "gemma3n_text",
            "Gemma3n",
            {
                **SLIDING,
                "hidden_act": None,
                "rope_theta": None,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "hidden_size_per_layer_input": 12,
                "vocab_size_per_layer_input": VOCAB_SIZE - 9,
                "num_kv_shared_layers": 0,
                "altup_num_inputs": 3,
                "laurel_rank": 8,
                "activation_sparsity_pattern": [0.5, 0.0, 0.8],
            },
        ),
        (
            "mimo_v2_flash",
            "MiMoV2Flash",
            {
                **SLIDING,
                "head_dim": 24,
                "v_head_dim": 16,
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
        ),
        (
            "laguna",
            "Laguna",
            {
                **EXPERTS,
                **SLIDING,
                **SHARED,
                "rope_theta": None,
                "num_attention_heads_per_layer": [2, 4, 6],
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
        ),
        (
            "nemotron-nas",
            "DeciLM",
            {
                "intermediate_size": None,
                "num_key_value_heads": None,
                "block_configs": [
                    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
                    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 9.0}},
                    {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
                ],
            },
        ),
        ("codegen", "CodeGen", {**GPT, "rotary_dim": 6}),
        ("gpt_bigcode", "GPTBigCode", {**GPT, "multi_query": True}),
        (
            "gpt_neo",
            "GPTNeo",
            {
                **BARE,
                "num_hidden_layers": None,
                "num_attention_heads": None,
                "num_layers": 3,
                "num_heads": 4,
                "window_size": 24,
                "attention_types": [[["global", "local", "global"], 1]],
            },
        ),
        (
            "xglm",
            "XGLM",
            {
                **BARE,
                "hidden_size": None,
                "num_hidden_layers": None,
                "num_attention_heads": None,
                "d_model": 48,
                "num_layers": 3,
                "attention_heads": 4,
                "ffn_dim": 96,
            },
        ),
        ("biogpt", "BioGpt", {**BARE, "intermediate_size": 96}),
        (
            "mpt",
            "Mpt",
            {
                **BARE,
                **dict.fromkeys(
                    ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
                ),
                "d_model": 48,
                "n_layers": 3,
                "n_heads": 4,
                "max_seq_len": 512,
            },
        ),
        ("persimmon", "Persimmon", {**BARE, "intermediate_size": 96}),
    )
}
OTHERS |= {
    "openai-gpt": {**GPT, "n_inner": None, "architectures": ["OpenAIGPTLMHeadModel"]},
    "ctrl": {**GPT, "n_inner": None, "dff": 96, "architectures": ["CTRLLMHeadModel"]},
}
# Families with latent attention that chooses its keys.
CHOSEN = {
    **MLA,
    **GROUPED,
    "num_hidden_layers": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "index_topk": 9,
    "index_head_dim": 12,
    "index_n_heads": 6,
}
INDEXED: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**CHOSEN, "architectures": ["DeepseekV32ForCausalLM"]},
    "glm_moe_dsa": {
        **CHOSEN,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "hy_v4": {
        **CHOSEN,
        "architectures": ["HYV4ForCausalLM"],
        "n_group": 1,
        "topk_group": 1,
        "hc_mult": 2,
        "hc_magnitude": 1.4,
        "hc_eps": 1e-6,
        "swiglu_limit": 1.2,
    },
    "mistral_large4_text": {
        **CHOSEN,
        "architectures": ["MistralLarge4ForCausalLM"],
        "q_lora_rank": None,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "final_logit_softcapping": 30.0,
    },
}
TABLES = ("embed", "wte", "wpe", "lm_head")
DENSE = ("llama", "mistral", "qwen2", "qwen3")


def write_tokenizer(path: Path) -> None:
    """One token a byte, then the specials, then fillers up to the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([f"<filler{i}>" for i in range(VOCAB_SIZE - len(alphabet) - len(SPECIALS))])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def _tensors(family: str, full: dict[str, Any], rng: np.random.Generator, kind: Any) -> dict[str, Any]:
    """Whatever the family's config asks for."""
    tensors = {}
    for name, tensor in wanted_tensors(*read_model(full)).items():
        if tensor.numbers:
            experts = name.endswith("tid2eid")
            least, most = (0, full["num_experts_per_tok"] + 1) if experts else (1, 1 << 40)
            tensors[name] = rng.integers(least, most, tensor.shape)
            continue
        if any(part in name for part in ("norm", "ln_")):
            values = rng.standard_normal(tensor.shape) * 0.1 + name.endswith("weight")
        else:
            values = rng.standard_normal(tensor.shape) * (
                1.0 if any(part in name for part in TABLES) else 0.25
            )
        tensors[name] = values.astype(kind)
    return tensors


def _dense_tensors(family: str, full: dict[str, Any], rng: np.random.Generator, kind: Any) -> dict[str, Any]:
    """Llama's tensors, with what Qwen2 and Qwen3 add."""

    def random(*shape: int, scale: float = 0.25) -> Any:
        return (rng.standard_normal(shape) * scale).astype(kind)

    hidden, inner, head_dim = full["hidden_size"], full["intermediate_size"], full["head_dim"]
    q_dim, kv_dim = full["num_attention_heads"] * head_dim, full["num_key_value_heads"] * head_dim
    tensors = {"model.embed_tokens.weight": random(full["vocab_size"], hidden, scale=1.0)}
    for i in range(full["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", q_dim, hidden),
            ("self_attn.k_proj", kv_dim, hidden),
            ("self_attn.v_proj", kv_dim, hidden),
            ("self_attn.o_proj", hidden, q_dim),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{layer}.{name}.weight"] = random(rows, columns)
            if family == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{layer}.{name}.bias"] = random(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = 1 + random(hidden, scale=0.1)
        if family == "qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"{layer}.self_attn.{name}.weight"] = 1 + random(head_dim, scale=0.1)
    tensors["model.norm.weight"] = 1 + random(hidden, scale=0.1)
    if not full["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random(full["vocab_size"], hidden, scale=1.0)
    return tensors


def write_checkpoint(
    path: Path, family: str = "llama", dtype: str = "float32", seed: int = 0, **config: Any
) -> Path:
    """A random model of one family. Weights are wide enough that tokens differ and greedy text is not a loop of one."""
    path.mkdir(parents=True, exist_ok=True)
    known = FAMILIES | OTHERS | RECURRENT | CHOOSING | STREAMS | INDEXED
    full = {**CONFIG, **known[family], "torch_dtype": dtype, **config}
    full = {key: value for key, value in full.items() if value is not None}
    (path / "config.json").write_text(json.dumps(full))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    make = _dense_tensors if family in DENSE else _tensors
    tensors = make(family, full, np.random.default_rng(seed), kind)
    save_file({k: np.require(v, requirements="C") for k, v in tensors.items()}, path / "model.safetensors")
    write_tokenizer(path)
    return path
