"""Configs and files of recurrent models that do not fit together are refused in one line that names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.devices.reference.backend import ReferenceBackend
from quire.errors import ModelError
from tests.model.tiny_models import Session
from tests.models import inspect_model, load_model
from tests.tiny import RECURRENT, write_checkpoint

KDA: dict[str, Any] = RECURRENT["kimi_linear"]["linear_attn_config"]
LINEAR = "linear_attention"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "kimi_linear",
            {"linear_attn_config": {**KDA, "kda_layers": [1, 4]}},
            "kda_layers must be .* 1 to 3 once",
        ),
        ("kimi_linear", {"linear_attn_config": {**KDA, "kda_layers": [1, 2, 3]}}, "kda_layers must be"),
        ("kimi_linear", {"linear_attn_config": {**KDA, "kda_layers": [0, 1]}}, "kda_layers must be"),
        ("kimi_linear", {"linear_attn_config": {**KDA, "kda_layers": "all"}}, "kda_layers must be"),
        ("kimi_linear", {"linear_attn_config": {**KDA, "kda_layers": [1, [3]]}}, "kda_layers must be"),
        (
            "kimi_linear",
            {"linear_attn_config": {**KDA, "short_conv_kernel_size": 1}},
            "short_conv_kernel_size",
        ),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope must be True"),
        ("qwen3_5", {"linear_num_value_heads": 5}, "linear_num_value_heads must be a multiple of .*2"),
        ("qwen3_5", {"layer_types": [LINEAR]}, "layer_types must be 4 entries"),
        ("qwen3_5", {"layer_types": [LINEAR, "conv"] * 2}, "layer_types must be 4 entries"),
        ("qwen3_5", {"full_attention_interval": 0}, "full_attention_interval must be an integer from 1"),
        ("qwen3_5", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be an integer from 2"),
        ("qwen3_5", {"output_gate_type": "relu"}, "output_gate_type must be one of"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate must be True"),
        ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype must be 'float32'"),
        (
            "lfm2",
            {"layer_types": None, "full_attn_idxs": [9]},
            "full_attn_idxs must be a list of layers from 0 to 3",
        ),
        ("bailing_hybrid", {"kda_lower_bound": 5.0}, "kda_lower_bound must be a number from -10000 to 0"),
        ("bailing_hybrid", {"kda_lower_bound": "low"}, "kda_lower_bound must be a number"),
        ("bailing_hybrid", {"layer_group_size": 0}, "layer_group_size must be an integer from 1"),
        ("bailing_hybrid", {"layer_types": [LINEAR, "conv", LINEAR]}, "layer_types must be 3 entries"),
        ("bailing_hybrid", {"no_kda_lora": False}, "no_kda_lora must be True"),
        ("bailing_hybrid", {"short_conv_kernel_size": 1}, "short_conv_kernel_size must be an integer from 2"),
        (
            "bailing_hybrid",
            {"gated_attention_proj_granularity_type": "element_wise"},
            "gated_attention_proj_granularity_type must be 'head_wise'",
        ),
        ("zamba2", {"layers_block_type": ["hybrid"]}, "layers_block_type must be 5 entries"),
        ("zamba2", {"layers_block_type": None}, "layers_block_type must be a list"),
        ("zamba2", {"num_attention_heads": 5}, "num_attention_heads must be a divisor of 48"),
        ("zamba2", {"num_key_value_heads": 2}, "num_key_value_heads must be 4"),
        ("zamba2", {"hybrid_layer_ids": [1]}, "hybrid_layer_ids must be"),
        ("zamba2", {"use_long_context": True}, "use_long_context must be False"),
        ("zamba2", {"n_mamba_heads": 5}, "n_mamba_heads must be heads of"),
        ("zamba2", {"num_mem_blocks": 0}, "num_mem_blocks must be an integer from 1"),
        ("minimax", {"layer_types": [LINEAR, "conv", LINEAR]}, "layer_types must be 3 entries"),
        ("minimax", {"layer_types": None, "attn_type_list": [0, 1]}, "attn_type_list must be 3 entries"),
        ("minimax", {"layer_types": None, "attn_type_list": [0, 1, [2]]}, "attn_type_list must be 3 entries"),
        ("minimax", {"attn_type_list": [0, 1, 0]}, "layer_types must be None"),
        ("minimax", {"rotary_dim": 18}, "rotary_dim must be an integer from 1 to 16"),
        ("minimax", {"rotary_dim": 7}, "rotary_dim must be even"),
        ("minimax", {"mlp_beta_factor": 0}, "mlp_beta_factor must be greater than 0"),
        ("minimax", {"linear_attn_alpha_factor": "1"}, "linear_attn_alpha_factor must be a number"),
        ("minimax", {"postnorm": False}, "postnorm must be True"),
        ("minimax", {"shared_intermediate_size": 40}, "shared_intermediate_size must be 0"),
        ("recurrent_gemma", {"block_types": ["recurrent", "mlp"]}, "block_types must be a list of recurrent"),
        ("recurrent_gemma", {"block_types": [["recurrent"]]}, "block_types must be a list of recurrent"),
        ("recurrent_gemma", {"block_types": []}, "block_types must be a list of recurrent"),
        ("recurrent_gemma", {"lru_width": 50}, "lru_width must be a multiple of 4"),
        ("recurrent_gemma", {"head_dim": 16}, "head_dim must be 12"),
        ("recurrent_gemma", {"intermediate_size": 97}, "intermediate_size must be a multiple of 2"),
        ("recurrent_gemma", {"conv1d_width": 1}, "conv1d_width must be an integer from 2 to 64"),
        ("recurrent_gemma", {"attention_window_size": 0}, "attention_window_size must be an integer from 1"),
        ("recurrent_gemma", {"embeddings_scale_by_sqrt_dim": False}, "embeddings_scale_by_sqrt_dim must be"),
        ("recurrent_gemma", {"logits_soft_cap": 0.0}, "logits_soft_cap must be greater than 0"),
        ("recurrent_gemma", {"partial_rotary_factor": 2.0}, "partial_rotary_factor must be such"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be an integer from 2 to 64"),
        ("lfm2", {"block_ffn_dim_multiplier": 0.0}, "block_ffn_dim_multiplier must be"),
    ],
)
def test_fields_that_disagree_are_named(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "model", family)
    config = directory / "config.json"
    config.write_text(config_of(config.read_text(), changes))
    with pytest.raises(ModelError, match=message) as caught:
        inspect_model(directory)
    assert "\n" not in str(caught.value)


def config_of(text: str, changes: dict[str, Any]) -> str:
    found = {**json.loads(text), **changes}
    return json.dumps({key: value for key, value in found.items() if value is not None})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4])
def test_rates_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path / "model", "qwen3_5") / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.linear_attn.A_log"
    save_file({**tensors, name: np.full_like(tensors[name], value)}, file)
    with pytest.raises(ModelError, match=f"{name} must hold finite numbers"):
        load_model(file.parent, ReferenceBackend())
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(ModelError, match=f"missing tensor {name}"):
        load_model(file.parent, ReferenceBackend())


def test_heads_of_further_tokens_and_towers_are_left_out(tmp_path: Path) -> None:
    """The text of a model that also sees, with a head that predicts further tokens, is that of the text alone."""
    directory, backend = write_checkpoint(tmp_path / "model", "qwen3_5"), ReferenceBackend()
    plain = load_model(directory, backend)
    whole = tmp_path / "whole"
    whole.mkdir()
    text = json.loads((directory / "config.json").read_text())
    del text["architectures"]
    text |= {
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": text.pop("rope_theta"),
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    }
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (whole / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(directory / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    more = {"mtp.fc.weight": np.ones(3, np.float32), "model.visual.patch.weight": np.ones(3, np.float32)}
    save_file({**renamed, **more}, whole / "model.safetensors")
    inner = load_model(whole, backend)
    assert inner.spec == plain.spec
    tokens = list(range(7, 40))
    np.testing.assert_array_equal(Session(inner, backend).feed(tokens), Session(plain, backend).feed(tokens))


def test_minimax_is_read_by_its_first_keys_too(tmp_path: Path) -> None:
    """MiniMax-Text-01's own config, whose tensors have the same names; half of a head turns."""
    directory = write_checkpoint(tmp_path / "model", "minimax")
    text = json.loads((directory / "config.json").read_text())
    plain = inspect_model(directory).spec
    older = {
        **text,
        "architectures": ["MiniMaxText01ForCausalLM"],
        "model_type": "minimax_text_01",
        "layer_types": None,
        "attn_type_list": [0, 1, 0],
        "linear_attn_alpha_factor": None,
        "layernorm_linear_attention_alpha": 1.3,
        "postnorm": True,
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
    }
    (directory / "config.json").write_text(config_of("{}", older))
    assert inspect_model(directory).spec == plain
    (directory / "config.json").write_text(config_of("{}", {**older, "rotary_dim": 8}))
    ropes = [layer.mixer.rope for layer in inspect_model(directory).spec.layers if layer.mixer is not None]
    assert [None if rope is None else rope.rotary_dim for rope in ropes] == [None, 8, None]
