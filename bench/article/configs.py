"""Shapes of the models that articles name, as configs. Facts from their published config.json."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from quire.config import DeviceConfig
from quire.engine.plan import make_backend
from quire.model.loaded import LoadedModel
from quire.model.outline import ConfigFiles

LLAMA_3_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_2_70B: dict[str, Any] = {
    **LLAMA_3_70B,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
MANY_KV_HEADS: dict[str, Any] = {**LLAMA_2_70B, "num_key_value_heads": 64}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def outline(config: dict[str, Any]) -> LoadedModel:
    """Sizes of the model that `config` describes, without weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return ConfigFiles(path).outline(make_backend(DeviceConfig(threads=1)).outline())
