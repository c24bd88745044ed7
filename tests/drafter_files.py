"""A random drafter on disk, in the layout of EAGLE-3."""

from __future__ import annotations

import json
from pathlib import Path

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
