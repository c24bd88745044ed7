"""Experts stacked in one tensor and packed by a quantization, as published checkpoints have them, and by libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quire.devices.cpu.backend import NativeBackend
from quire.errors import ModelError
from quire.model.cost import matrices
from quire.model.outline import ConfigFiles
from quire.weights.checkpoint import open_checkpoint
from quire.weights.checkpoint.safetensors import write_safetensors
from quire.weights.layouts.blocks.make import round_fp8, round_nvfp4
from quire.weights.layouts.blocks.scaled import E2M1, in_pairs
from tests.models import inspect_model, load_model
from tests.tiny import write_checkpoint

E4M3 = ml_dtypes.float8_e4m3fn
Fields = tuple[dict[str, Any], Any]  # of a stack [E, O, K], and the values that they stand for


def by_row(stack: Any) -> Fields:
    codes, scales = zip(*(round_fp8(one) for one in stack), strict=True)
    held, scale = np.stack(codes).view(E4M3), np.stack(scales)
    return {"weight": held, "weight_scale": scale}, held.astype(np.float32) * scale


def of_all(stack: Any) -> Fields:
    scale = np.abs(stack).max() / np.float32(448)
    held = (stack / scale).astype(E4M3)
    fields = {"weight": held, "weight_scale": scale.reshape(()), "input_scale": np.float32(0.25).reshape(())}
    return fields, held.astype(np.float32) * scale


def of_expert(stack: Any) -> Fields:
    scale = np.abs(stack).max(axis=(1, 2), keepdims=True) / np.float32(448)
    held = (stack / scale).astype(E4M3)
    fields = {"weight": held, "weight_scale_inv": scale, "activation_scale": np.ones(len(stack), np.float32)}
    return fields, held.astype(np.float32) * scale


def by_block(stack: Any) -> Fields:
    count, out, width = stack.shape
    tiles = stack.reshape(count, out // 128, 128, width // 128, 128)
    scale = np.abs(tiles).max(axis=(2, 4)) / np.float32(448)
    spread = scale.repeat(128, 1).repeat(128, 2)
    held = (stack / spread).astype(E4M3)
    return {"weight": held, "weight_scale_inv": scale}, held.astype(np.float32) * spread


def nvfp4(stack: Any) -> Fields:
    count, out, width = stack.shape
    codes, inner, outer = round_nvfp4(stack.reshape(-1, width))
    scale = inner.view(E4M3).reshape(count, out, width // 16)
    values = E2M1[codes].reshape(stack.shape) * (scale.astype(np.float32) * outer).repeat(16, 2)
    packed = in_pairs(codes).reshape(count, out, width // 2)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": outer.reshape(())}, values


def int4_of_the_library(stack: Any) -> Fields:
    torch, helpers = (
        pytest.importorskip(name)
        for name in ("torch", "compressed_tensors.compressors.pack_quantized.helpers")
    )
    groups = stack.reshape(*stack.shape[:2], -1, 32)
    scale = np.abs(groups).max(axis=-1) / np.float32(7.5)
    codes = np.clip(np.rint(groups / scale[..., None]), -8, 7)
    packed = helpers.pack_to_int32(torch.from_numpy(codes.reshape(stack.shape).astype(np.int8)), 4)
    fields = {"weight_packed": packed.numpy(), "weight_scale": scale}
    return fields | {"weight_shape": np.array(stack.shape)}, (codes * scale[..., None]).reshape(stack.shape)


@dataclass(frozen=True)
class Case:
    """A family's stacks as a format packs them. `endings` are those of names that are not "_" and the field."""

    family: str
    pack: Callable[[Any], Fields]
    layout: str
    section: dict[str, Any]
    columns: bool = False
    endings: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    up: tuple[str, ...] = ("experts.gate_up_proj",)
    down: str = "experts.down_proj"


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INVERSE = {"weight_scale_inv": "_scale_inv", "activation_scale": "_activation_scale"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
ROW = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKEN = {**ROW, "strategy": "token", "dynamic": True}


def compressed(form: str, weights: Any, inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "format": form}


GRANITE = {"up": ("moe.input_linear.weight",), "down": "moe.output_linear.weight"}
LLAMA4 = {"intermediate_size_mlp": 64, "intermediate_size": 64, "hidden_size": 64}
BROAD = {"hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128}
STEP_CONFIG = {
    **{"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "hidden_size": 128},
    **{"num_attention_groups": 2, "num_key_value_heads": None, "layer_types": ["full_attention"] * 2},
    **{"moe_layers_enum": "1", "moe_num_experts": 6, "moe_top_k": 2, "moe_intermediate_size": 256},
    **{"share_expert_dim": 64, "num_experts": None, "num_experts_per_tok": None, "decoder_sparse_step": None},
    "norm_topk_prob": None,
}
STEP = {"up": ("moe.gate_proj.weight", "moe.up_proj.weight"), "down": "moe.down_proj.weight"}
CASES = {
    "granite": Case(
        "granitemoeshared", by_row, "FP8 E4M3", compressed("float-quantized", ROW, TOKEN), **GRANITE
    ),
    "granite-int4": Case(
        "granitemoeshared", int4_of_the_library, "int4", compressed("pack-quantized", GROUP), **GRANITE
    ),
    "llama4-fp8": Case("llama4_text", of_all, "FP8 E4M3", MODELOPT, True, config=LLAMA4),
    "llama4-nvfp4": Case(
        "llama4_text", nvfp4, "NVFP4", {**MODELOPT, "quant_algo": "NVFP4"}, True, config=LLAMA4
    ),
    "qwen3-vl": Case("qwen3_moe", by_block, "FP8 E4M3 by block", FP8, True, INVERSE, BROAD),
    "qwen3": Case("qwen3_moe", by_block, "FP8 E4M3 by block", FP8, False, INVERSE, BROAD),
    "qwen3-expert": Case("qwen3_moe", of_expert, "FP8 E4M3", {"quant_method": "fp8"}, False, INVERSE),
    "gpt-oss": Case(
        "gpt_oss", of_expert, "FP8 E4M3", {"quant_method": "fp8"}, True, INVERSE, {"hidden_size": 64}
    ),
    "step": Case("qwen3_moe", by_block, "FP8 E4M3 by block", FP8, config=STEP_CONFIG, **STEP),
}


def write(path: Path, case: Case) -> tuple[Path, Path]:
    """A model with packed stacks, and the same with the floats that they stand for in the family's own form."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, **case.config}
    source = write_checkpoint(path / "float", case.family, **sizes)
    stored = open_checkpoint(source)
    tensors = {name: np.array(stored.get(name)) for name in stored.names()}
    packed = dict(tensors)
    turned = case.family in ("llama4_text", "gpt_oss")  # floats with outputs as columns
    for name, members in stacks(case, tensors).items():
        own = [[np.float32(tensors[member]) for member in expert] for expert in members]
        if members == [[name]]:
            stack = own[0][0].swapaxes(1, 2) if turned else own[0][0]
        else:  # an expert's matrices of their own
            stack = np.stack([np.concatenate(parts) for parts in own])
        fields, values = case.pack(np.ascontiguousarray(stack))
        for member in {member for expert in members for member in expert}:
            del packed[member]
        for kind, array in fields.items():
            dot = name.endswith(".weight")
            mark = case.endings.get(kind, "" if kind == "weight" else f"_{kind}")
            held = array.swapaxes(1, 2) if case.columns and array.ndim == 3 else array
            key = f"{name.removesuffix('.weight')}.{kind}" if dot else name + mark
            packed[key] = np.ascontiguousarray(held).reshape(held.shape)
        for expert, value in zip(members, [values] if members == [[name]] else values, strict=True):
            parts = np.split(value, len(expert)) if members != [[name]] else [value]
            for member, part in zip(expert, parts, strict=True):
                tensors[member] = np.ascontiguousarray(part.swapaxes(1, 2) if turned else part, np.float32)
    write_safetensors(source / "model.safetensors", tensors)
    target = write_checkpoint(path / "packed", case.family, **sizes, quantization_config=case.section)
    write_safetensors(target / "model.safetensors", packed)
    return target, source


def stacks(case: Case, tensors: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The tensors that each stack is made of: itself, or those of each expert."""
    names = (*case.up, case.down)
    if found := [name for name in tensors if name.endswith(names)]:
        return {name: [[name]] for name in found}
    made: dict[str, list[list[str]]] = {}
    for name in sorted(tensors):
        if ".experts.0.gate_proj" in name:
            whole, count = name.partition("experts.")[0] + "experts.", 6
            experts = [f"{whole}{e}." for e in range(count)]
            both = [[f"{one}gate_proj.weight", f"{one}up_proj.weight"] for one in experts]
            made[f"{whole}gate_up_proj"] = both
            made[f"{whole}down_proj"] = [[f"{one}down_proj.weight"] for one in experts]
    return made


@pytest.mark.parametrize("name", CASES)
def test_stacked_experts_keep_their_values_and_their_size(name: str, tmp_path: Path) -> None:
    case, backend = CASES[name], NativeBackend(threads=1)
    packed, plain = write(tmp_path, case)
    right = list(matrices(load_model(plain, backend, "float32").decoder.weights).values())
    decoded, held = load_model(packed, backend, "float32"), load_model(packed, backend)
    for model in (decoded, held):
        for one, other in zip(matrices(model.decoder.weights).values(), right, strict=True):
            np.testing.assert_array_equal(one.dequantize(), other.dequantize())
    assert held.info.quantized is not None
    assert case.layout in held.info.quantized.kinds
    assert held.weight_bytes < 0.85 * decoded.weight_bytes
    assert inspect_model(packed).quantized == held.info.quantized
    planned = ConfigFiles(packed / "config.json").outline(backend.outline())
    assert planned.info.quantized is not None
    assert case.layout in planned.info.quantized.kinds


def test_stacks_of_floats_are_read_where_the_family_has_experts_apart(tmp_path: Path) -> None:
    for columns in (False, True):
        case = Case(
            "qwen3_moe", lambda stack: ({"weight": stack}, stack), "", {"quant_method": "fp8"}, columns
        )
        packed, plain = write(tmp_path / str(columns), case)
        config = json.loads((packed / "config.json").read_text())
        del config["quantization_config"]
        (packed / "config.json").write_text(json.dumps(config))
        backend = NativeBackend(threads=1)
        models = (load_model(path, backend, "float32").decoder.weights for path in (packed, plain))
        first, second = (matrices(weights).values() for weights in models)
        for one, other in zip(first, second, strict=True):
            assert one.dequantize().tobytes() == other.dequantize().tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_scale_inv": np.ones((6, 3, 1), np.float32)}, "gate_up_proj_scale_inv .* does not divide among 6"),
        ({"_scale_inv": np.ones((5, 1, 1), np.float32)}, "gate_up_proj_scale_inv .* does not divide among 6"),
        ({"_scale_inv": np.full((6, 1, 1), np.nan, np.float32)}, "gate_proj.weight_scale_inv"),
        ({"": np.zeros((6, 3, 7), E4M3)}, r"gate_up_proj must hold experts \[6, 64, 64\], got \[6, 3, 7\]"),
        ({"_lookup": np.ones(3, np.float32)}, "gate_up_proj_lookup"),
    ],
)
def test_stacks_that_do_not_fit_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    packed, _ = write(tmp_path, CASES["qwen3-expert"])
    stored = open_checkpoint(packed)
    tensors = {name: np.array(stored.get(name)) for name in stored.names()}
    whole = next(name for name in tensors if name.endswith("experts.gate_up_proj"))
    write_safetensors(packed / "model.safetensors", tensors | {whole + k: v for k, v in changes.items()})
    with pytest.raises(ModelError, match=message):
        load_model(packed, NativeBackend(threads=1))
