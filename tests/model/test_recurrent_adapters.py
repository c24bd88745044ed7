"""Adapters of recurrent and sparse layers equal checkpoints with the change merged into their projections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.devices.protocol import Backend
from quire.devices.registry import make_backend
from quire.model.adapter import AdapterBase, build_adapter
from quire.weights.adapter import open_adapter
from tests.model.tiny_models import Session
from tests.models import load_model
from tests.near import assert_near
from tests.tiny import write_checkpoint

TARGETS = {
    "lfm2": ("conv.in_proj", "conv.out_proj"),
    "qwen3_next": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"),
    "qwen3_5": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "self_attn.q_proj"),
    "bailing_hybrid": ("attention.q_proj", "attention.f_proj", "attention.g_proj", "attention.dense"),
    "minimax": ("self_attn.qkv_proj", "self_attn.output_gate", "self_attn.out_proj"),
    "recurrent_gemma": ("temporal_block.linear_x", "temporal_block.linear_out", "temporal_block.q_proj"),
    "qwen4": (
        "ple.key_proj",
        "ple.value_proj",
        "input_mix_weight_down",
        "input_mix_weight_up",
        "in_proj_qkv",
    ),
    "minimax_m3": ("self_attn.q_proj", "shared_experts.up_proj", "self_attn.o_proj"),
    "deepseek_v32": (
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "shared_experts.down_proj",
        "indexer.wq_b",
    ),
    "glm_moe_dsa": ("indexer.wk", "indexer.weights_proj", "self_attn.o_proj", "shared_experts.up_proj"),
    "hy_v4": ("self_attn.linear_gate", "self_attn.o_proj", "shared_experts.down_proj"),
    "mistral_large4_text": ("attention.wq", "attention.wo", "shared_experts.w2", "indexer.wq_b"),
    "deepseek_v4": ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_b", "shared_experts.w2"),
    "glm5_next_text": ("self_attn.q_b_proj", "self_attn.o_proj", "shared_experts.down_proj"),
    "kimi_linear": ("self_attn.q_proj", "self_attn.f_b_proj", "self_attn.g_a_proj", "self_attn.o_proj"),
}
TOKENS = list(range(5, 35))


@pytest.mark.parametrize("name", ["reference", "native"])
@pytest.mark.parametrize("family", TARGETS)
def test_an_adapter_equals_the_merged_checkpoint(family: str, name: str, tmp_path: Path) -> None:
    backend: Backend = make_backend(name)
    base, rng = write_checkpoint(tmp_path / "base", family), np.random.default_rng(3)
    tensors, changes = load_file(base / "model.safetensors"), dict[str, Any]()
    merged = dict(tensors)
    for module in [key.removesuffix(".weight") for key in tensors]:
        if module.endswith(TARGETS[family]):
            out, width = tensors[f"{module}.weight"].shape
            down, up = (rng.standard_normal(s).astype(np.float32) * 0.2 for s in ((3, width), (out, 3)))
            changes[f"base_model.model.{module}.lora_A.weight"] = down
            changes[f"base_model.model.{module}.lora_B.weight"] = up
            merged[f"{module}.weight"] = tensors[f"{module}.weight"] + up @ down
    folder, whole = tmp_path / "adapter", write_checkpoint(tmp_path / "merged", family)
    folder.mkdir()
    targets = sorted({target.rpartition(".")[2] for target in TARGETS[family]})
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(changes, folder / "adapter_model.safetensors")
    save_file(merged, whole / "model.safetensors")
    model = load_model(base, backend)
    session = Session(model, backend, adapters=1)
    adapters = AdapterBase(model.decoder, model.names, backend, model.dtype, None)
    session.executable.adapt(0, build_adapter(adapters, open_adapter(folder, 8)))
    wanted = Session(load_model(whole, backend), backend).feed(TOKENS)
    plain = Session(model, backend).feed(TOKENS)
    assert np.abs(wanted - plain).max() > 0.1
    assert_near(session.feed(TOKENS), wanted, slack=4)
