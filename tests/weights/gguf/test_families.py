"""Every architecture: a transformers model written as a GGUF file gives the same spec and the same tensors back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from quire.model.load import inspect_model
from quire.model.spec import ArchSpec
from quire.weights.gguf.architectures import ARCHITECTURES
from quire.weights.source import open_source
from tests.gguf_files import finish, turned
from tests.model.tiny_models import VARIANTS, make_model

# GGUF's name for a variant of tiny_models.
CASES = {
    "llama": "llama",
    "llama-mha-tied": "llama",
    "llama-biases": "llama",
    "llama-rope-linear": "llama",
    "llama-rope-yarn": "llama",
    "mistral-window": "llama",
    "mixtral": "llama",
    "smollm3": "smollm3",
    "granite": "granite",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-bias": "qwen3",
    "qwen2-moe-all-layers": "qwen2moe",
    "qwen3-moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2-own-scale": "gemma2",
    "gemma3-own-scale": "gemma3",
    "phi": "phi2",
    "phi3": "phi3",
    "phi3-longrope": "phi3",
    "phi3-partial": "phi3",
    "gpt2": "gpt2",
    "gpt-neox": "gptneox",
    "gpt-neox-sequential": "gptneox",
    "starcoder2-no-window": "starcoder2",
    "stablelm": "stablelm",
    "stablelm-parallel": "stablelm",
    "olmo2": "olmo2",
    "cohere": "command-r",
}
# What GGUF cannot say is at the value that is taken for granted.
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-moe-all-layers": ("qwen2_moe", {}),
    "gemma2-own-scale": (
        "gemma2",
        {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3-own-scale": ("gemma3", {"query_pre_attn_scalar": 16, "num_hidden_layers": 7}),
    "starcoder2-no-window": ("starcoder2", {}),
}
TURNED = ("llama", "granite", "smollm3")


def test_every_architecture_has_a_case() -> None:
    assert set(CASES.values()) == set(ARCHITECTURES)


@pytest.mark.parametrize("variant", CASES)
def test_spec_and_tensors_come_back(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, variant, VARIANTS.get(variant) or OWN[variant])
    model = make_model(variant)
    model.config.architectures = [type(model).__name__.replace("Gemma3Text", "Gemma3")]
    model.save_pretrained(tmp_path / "model")
    expected = inspect_model(tmp_path / "model")
    assert isinstance(expected.spec, ArchSpec)
    original = load_file(tmp_path / "model" / "model.safetensors")
    file = write(tmp_path / "m.gguf", CASES[variant], expected.spec, original, model.config)
    assert inspect_model(file).spec == expected.spec
    tensors = open_source(file).tensors()
    names = {n for n in tensors.names() if n not in ("lm_head.weight", "embed_out.weight")}
    assert names == original.keys() - {"lm_head.weight", "embed_out.weight"}
    for name in names:
        found, wanted = tensors.get(name), original[name]
        if CASES[variant].startswith("gemma") and name.endswith("norm.weight"):
            found, wanted = found + np.float32(1), wanted + np.float32(1)  # as they are used
        assert np.array_equal(found, wanted), name


def write(path: Path, called: str, spec: ArchSpec, tensors: dict[str, Any], config: Any) -> Path:
    """What llama.cpp's converter writes of such a model."""
    writer = gguf.GGUFWriter(path, called)
    _add_sizes(writer, spec)
    _add_rope(writer, spec, config)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == called)
    table = gguf.get_tensor_name_map(arch, spec.num_layers)
    stacks: dict[str, list[Any]] = {}
    for name, data in sorted(tensors.items(), key=lambda item: [_number(p) for p in item[0].split(".")]):
        if called in TURNED and ("q_proj" in name or "k_proj" in name):
            data = turned(data, spec.num_heads if "q_proj" in name else spec.num_kv_heads)
        if called == "gptneox" and "query_key_value" in name:
            data = data.reshape(spec.num_heads, 3, spec.head_dim, *data.shape[1:]).swapaxes(0, 1)
            data = data.reshape(-1, *data.shape[3:])
        if called.startswith("gemma") and name.endswith("norm.weight"):
            data = data + np.float32(1)
        if called == "gpt2" and data.ndim == 2 and ".h." in name:
            data = data.T
        if "shared_expert_gate" in name:
            data = data[0]
        for part in ("experts.", "norms."):
            head, found, tail = name.partition(part)
            if found:
                name = head + (part + tail.partition(".")[2] if part == "experts." else "weight")
                break
        to = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert to is not None, name
        stacks.setdefault(to, []).append(np.ascontiguousarray(data))
    for name, parts in stacks.items():
        stacked = "_exps" in name or ("stablelm" in called and "_norm.weight" in name and len(parts) > 1)
        writer.add_tensor(name, np.stack(parts) if stacked else parts[0])
    finish(writer)
    return path


def _number(part: str) -> Any:
    return (0, int(part), "") if part.isdecimal() else (1, 0, part)


def _add_sizes(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    if spec.head_dim * spec.num_heads != spec.hidden_size:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    (writer.add_layer_norm_rms_eps if spec.norm == "rms" else writer.add_layer_norm_eps)(spec.norm_eps)
    window = next((window for window in spec.windows if window), None)
    if window:
        writer.add_sliding_window(window)
    if spec.attention_cap:
        writer.add_attn_logit_softcapping(spec.attention_cap)
    if spec.logit_cap:
        writer.add_final_logit_softcapping(spec.logit_cap)
    if spec.moe is not None:
        writer.add_expert_count(spec.moe.routing.num_experts)
        writer.add_expert_used_count(spec.moe.routing.top_k)
        writer.add_expert_feed_forward_length(spec.moe.intermediate_size)
        if spec.moe.shared_intermediate_size:
            writer.add_expert_shared_feed_forward_length(spec.moe.shared_intermediate_size)
    if spec.architecture == "GraniteForCausalLM":
        writer.add_attention_scale(spec.attention_scale)
        writer.add_embedding_scale(spec.embedding_scale)
        writer.add_residual_scale(spec.residual_multiplier)
        writer.add_logit_scale(1 / spec.logit_scale)
    if spec.architecture == "CohereForCausalLM":
        writer.add_logit_scale(spec.logit_scale)
    if spec.architecture in ("StableLmForCausalLM", "GPTNeoXForCausalLM"):
        writer.add_parallel_residual(spec.parallel)


def _add_rope(writer: gguf.GGUFWriter, spec: ArchSpec, config: Any) -> None:
    if spec.rope is None:
        return
    rope = spec.rope
    writer.add_rope_dimension_count(rope.rotary_dim)
    writer.add_rope_freq_base(rope.theta)
    if rope.kind in ("linear", "yarn"):
        kind = gguf.RopeScalingType.LINEAR if rope.kind == "linear" else gguf.RopeScalingType.YARN
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position)
    if rope.kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for name in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
