"""The models of a visit: an 8B model's shape and a tiny one, and the forms in which an engine serves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 5e5,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "FP8, FP8 cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "bf16, any order": {"batch_invariant": False},
    "int8": {"quantization": "int8"},
    "bf16, FP8 cache": {"kv_cache_dtype": "fp8"},
}
"""FORMS by name, the most telling first, for a visit may end at any time."""


def write_model(folder: Path, shape: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def options_of(device: str, shape: dict[str, Any], **more: Any) -> dict[str, Any]:
    sizes = {"max_model_len": 24_000, "max_num_seqs": 512}
    if shape is TINY:
        sizes = {"max_model_len": 96, "num_gpu_blocks_override": 12}
    return {"load_format": "dummy", "device": device, "enable_prefix_caching": False, **sizes, **more}
