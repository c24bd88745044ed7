"""Shapes of recurrent models, of one that chooses its keys, and of attention models beside them; random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.model.info import Asked, Reading
from quire.model.load import open_files

Config = dict[str, Any]

SHAPES: dict[str, Config] = {
    "Qwen3.5-0.8B": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": 24,
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "LFM2.5-1.2B": {
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 16,
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": ["full_attention" if kind == "a" else "conv" for kind in "ccaccacacaccacac"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "Nemotron-H-1B": {
        "architectures": ["NemotronHForCausalLM"],
        "num_hidden_layers": 18,
        "vocab_size": 131072,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hybrid_override_pattern": "M-M-M*-M-" * 2,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    "DSA-1B": {  # DeepSeek-V3.2's attention, in a small dense model
        "architectures": ["DeepseekV32ForCausalLM"],
        "num_hidden_layers": 24,
        "vocab_size": 65536,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "first_k_dense_replace": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}
PERIODS = {"Qwen3.5-0.8B": 6, "LFM2.5-1.2B": 2, "Nemotron-H-1B": 2}
"""PERIODS: how often a recurrent shape repeats its pattern of layers."""


def shape(name: str, parts: int = 1) -> Config:
    """Return a shape, or one `parts`-th of its layers."""
    full = {"torch_dtype": "bfloat16", "max_position_embeddings": 32768, **SHAPES[name]}
    layers = full["num_hidden_layers"] // parts
    by_layer = {key: full[key][:layers] for key in ("layer_types", "hybrid_override_pattern") if key in full}
    return {**full, **by_layer, "num_hidden_layers": layers}


def small(name: str) -> Config:
    """Return one period of a shape's layers, whose mixers keep what they keep, with small MLPs and tables."""
    config = shape(name, PERIODS[name])
    return {**config, "vocab_size": 4096, "intermediate_size": config["intermediate_size"] // 8}


def write(folder: Path, config: Config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parameters(path: Path) -> int:
    return open_files(path, Asked(reading=Reading(dummy=True))).info.num_parameters


def dense_beside(folder: Path, config: Config, hybrid: Path) -> Path:
    """Write an attention model with the hybrid's width, tables and number of parameters, so of multiply-adds."""
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    if "hybrid_override_pattern" in config:  # a mixer and an MLP are two layers there
        layers = -(-layers // 2)
    keys = (
        "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "torch_dtype",
        "tie_word_embeddings", "max_position_embeddings",
    )  # fmt: skip
    dense = {key: config[key] for key in keys} | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": layers,
        "head_dim": config.get("head_dim", width // config["num_attention_heads"]),
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
    }
    missing = parameters(hybrid) - parameters(write(folder, dense))
    dense["intermediate_size"] += max(0, round(missing / (3 * width * layers) / 64)) * 64
    return write(folder, dense)
