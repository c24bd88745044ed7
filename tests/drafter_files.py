"""Random drafters on disk, in the layouts of their methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from quire.model.parts.decoder import DecoderConfig


def write_eagle3(folder: Path, target: DecoderConfig, draft_vocab: int = 40) -> Path:
    """Write a head of one layer for the target; returns its directory."""
    rng, width, inner, dim = np.random.default_rng(0), target.hidden_size, 32, 8
    heads = width // dim

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) * 0.1

    layer = {"self_attn.q_proj": (heads * dim, 2 * width), "self_attn.k_proj": (dim, 2 * width),
             "self_attn.v_proj": (dim, 2 * width), "self_attn.o_proj": (width, heads * dim),
             "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
             "hidden_norm": (width,), "input_layernorm": (width,), "post_attention_layernorm": (width,)}  # fmt: skip
    tensors = {f"midlayer.{name}.weight": normal(*shape) for name, shape in layer.items()}
    tensors |= {"fc.weight": normal(width, 2 * width), "norm.weight": normal(width),
                "lm_head.weight": normal(draft_vocab, width)}  # fmt: skip
    tensors["d2t"] = np.arange(draft_vocab, dtype=np.int64)
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": width,
              "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": dim,
              "num_hidden_layers": 1, "vocab_size": target.vocab_size, "draft_vocab_size": draft_vocab,
              "rms_norm_eps": 1e-5, "hidden_act": "silu", "eagle_aux_hidden_state_layer_ids": [1, 2],
              "tie_word_embeddings": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_drafter(folder: Path, method: str, target: DecoderConfig) -> Path:
    """Write a random drafter of another method for the target; returns its directory."""
    rng, width, vocab = np.random.default_rng(1), target.hidden_size, target.vocab_size
    tensors: dict[str, np.ndarray] = {}

    def put(name: str, *shape: int) -> None:
        tensors[name] = rng.standard_normal(shape).astype(np.float32) * 0.3

    def put_layer(prefix: str) -> None:
        for name, *shape in (("self_attn.q_proj", width, width), ("self_attn.k_proj", 8, width),
                             ("self_attn.v_proj", 8, width), ("self_attn.o_proj", width, width),
                             ("mlp.gate_proj", 32, width), ("mlp.up_proj", 32, width), ("mlp.down_proj", width, 32),
                             ("input_layernorm", width), ("post_attention_layernorm", width)):  # fmt: skip
            if (method, name) != ("eagle", "input_layernorm"):
                put(f"{prefix}{name}.weight", *shape)

    layer = {"model_type": "llama", "hidden_size": width, "intermediate_size": 32, "num_attention_heads": width // 8,
             "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": vocab,
             "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}  # fmt: skip
    config: dict[str, Any] = {**layer, "architectures": ["LlamaForCausalLM"]}
    if method == "eagle":
        put("fc.weight", width, 2 * width)
        put_layer("layers.0.")
    elif method == "mtp":
        config = {"speculators_model_type": "mtp", "transformer_layer_config": layer}
        put("mtp_layers.0.input_proj.weight", width, 2 * width)
        put_layer("mtp_layers.0.")
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            put(f"mtp_layers.0.{name}.weight", width)
    elif method == "dflash":
        config |= {"block_size": 4, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1]}}
        put("fc.weight", width, 2 * width)
        put("hidden_norm.weight", width)
        put("norm.weight", width)
        put_layer("layers.0.")
    elif method == "mlp_speculator":
        config = {
            "model_type": method,
            "n_predict": 3,
            "emb_dim": width,
            "inner_dim": 24,
            "vocab_size": vocab,
        }
        for i in range(3):
            put(f"speculator.proj.{i}.weight", 24, 24 if i else width)
            put(f"speculator.emb.{i}.weight", vocab, 24)
            put(f"speculator.head.{i}.weight", vocab, 24)
            put(f"speculator.ln.{i}.weight", 24)
            put(f"speculator.ln.{i}.bias", 24)
    else:
        for i in range(3):
            put(f"{i}.0.linear.weight", width, width)
            put(f"{i}.0.linear.bias", width)
            put(f"{i}.1.weight", vocab, width)
    save_file(tensors, folder / ("medusa_lm_head.safetensors" if method == "medusa" else "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
