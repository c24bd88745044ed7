"""Files of recurrent models as llama.cpp's converter writes them: shifted norms, negative rates, tiled value heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from quire.files import read_json
from quire.model.families import read_model
from quire.model.gguf.architectures import ARCHITECTURES
from quire.model.load import open_checkpoint_files
from tests.gguf_files import add_tensor, finish
from tests.model.gguf import test_families, test_scans
from tests.model.tiny_models import make_model

PLAIN = {"layer_types": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("qwen3_5", PLAIN),
    "qwen35moe": ("qwen3_5_moe", PLAIN),
    "qwen3next": ("qwen3_next-dense-1", {**PLAIN, "mlp_only_layers": []}),
    "lfm2": ("lfm2", {}),
    "lfm2moe": ("lfm2_moe", {}),
}
RENAMED = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


def tiled(array: Any, heads: int, each: int, size: int) -> Any:
    """Value heads of `size` rows, by key head, as the file has them: by their number within its group."""
    return array.reshape(heads, each, size, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


def of_file(called: str, config: Any, name: str, data: Any) -> Iterator[tuple[str, Any]]:
    """The file's tensors of one of the hub's."""
    qwen = called.startswith("qwen")
    if qwen and name.endswith("norm.weight") and "linear_attn" not in name:
        data = data + np.float32(1)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        data = data[:, 0]
    if "linear_attn" in name:
        heads, k, v = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
        each, keys = config.linear_num_value_heads // heads, 2 * heads * k
        kind = name.split("linear_attn.")[1]
        data = -np.exp(data.astype(np.float64)).astype(np.float32) if kind == "A_log" else data
        if kind == "in_proj_qkvz.weight":
            groups = data.reshape(heads, -1, data.shape[1])
            parts = np.split(groups, np.cumsum([k, k, each * v]), axis=1)
            q, key, value, z = (part.reshape(-1, data.shape[1]) for part in parts)
            yield "attn_qkv.weight", np.concatenate([q, key, value])
            yield "attn_gate.weight", z
            return
        if called != "qwen3next":
            if kind in ("in_proj_qkv.weight", "conv1d.weight"):
                data = np.concatenate([data[:keys], tiled(data[keys:], heads, each, v)])
            elif kind == "out_proj.weight":
                data = tiled(data.T, heads, each, v).T
            elif kind != "norm.weight":
                data = tiled(data, heads, each, v if "in_proj_z" in kind else 1)
        if kind in ("A_log", "dt_bias"):
            yield {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}[kind], data
            return
    module, _, kind = name.rpartition(".")
    for theirs, own in RENAMED.items():
        if name.endswith(theirs):
            yield own, data
            return
        if module.endswith(theirs):
            yield f"{own}.{kind}", data[0] if own.endswith("inp_shexp") else data
            return
    yield "", data


def write(path: Path, called: str, config: Any, tensors: dict[str, Any]) -> None:
    writer, arch = (
        gguf.GGUFWriter(path, called),
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == called),
    )
    layers = config.num_hidden_layers
    attends = ["attention" in kind and "linear" not in kind for kind in config.layer_types]
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    qwen, theta = called.startswith("qwen"), config.rope_parameters["rope_theta"]
    kv = config.num_key_value_heads
    writer.add_head_count_kv(kv if qwen else [kv * own for own in attends])
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    writer.add_rope_freq_base(theta)
    writer.add_feed_forward_length(
        next(
            len(v)
            for n, v in tensors.items()
            if n.endswith(("mlp.gate_proj.weight", "feed_forward.w1.weight"))
        )
        if called not in ("qwen3next", "qwen35moe")
        else 80
    )
    if qwen:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim // 4)
        writer.add_rope_dimension_sections([1, 1, 0, 0])
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_uint32(f"{called}.full_attention_interval", 4)
        if called == "qwen35":  # newer converters say it by layer too
            writer.add_array(f"{called}.attention.recurrent_layers", [not own for own in attends])
    else:
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if "moe" in called or called == "qwen3next":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if qwen:
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        else:
            writer.add_leading_dense_block_count(config.num_dense_layers)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
    table, stacks = gguf.get_tensor_name_map(arch, layers), dict[str, Any]()
    for name, data in tensors.items():
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            number, _, kind = tail.partition(".")
            stacks.setdefault(f"{head}.experts.{kind}", {})[int(number)] = data
            continue
        for own, array in of_file(called, config, name, data):
            to = f"blk.{name.split('.')[2]}.{own}" if own else table.get_name(name, (".weight", ".bias"))
            assert to is not None, name
            add_tensor(writer, to, np.ascontiguousarray(array), gguf.GGMLQuantizationType.F32)
    for name, found in stacks.items():
        for plain, own in {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
            name = name.replace(f"experts.{plain}.", f"experts.{own}.")
        to = table.get_name(name, (".weight",))
        assert to is not None, name
        stack = np.stack([found[e] for e in sorted(found)])
        add_tensor(writer, to, stack, gguf.GGMLQuantizationType.F32)
    finish(writer)


@pytest.mark.parametrize("called", CASES)
def test_spec_and_weights_come_back(called: str, tmp_path: Path) -> None:
    variant, changes = CASES[called]
    model = make_model(variant, **changes)
    model.save_pretrained(tmp_path / "model")
    expected = open_checkpoint_files(tmp_path / "model").opened()
    spec, _ = read_model(read_json(tmp_path / "model" / "config.json"))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    write(tmp_path / "m.gguf", called, model.config, tensors)
    test_families.check(tmp_path / "m.gguf", spec, expected.names, expected.checkpoint)


def test_every_architecture_has_a_case() -> None:
    """Here, in test_scans or in test_families."""
    scans = {case.partition(":")[0] for case in test_scans.CASES}
    assert {*CASES, *scans, *test_families.CASES.values(), *test_families.CONFIGS} == set(ARCHITECTURES)
