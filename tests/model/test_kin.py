"""Families that transformers lacks, against a model of its that computes the same under other names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from quire.devices.reference.backend import ReferenceBackend
from tests.model.tiny_models import Session, make_model, randomized, torch_logits
from tests.models import load_model
from tests.near import assert_near

PROMPT = [int(t) for t in np.random.default_rng(7).integers(3, 97, 60)]
BAILING = (
    (r"model\.embed_tokens", "model.word_embeddings"),
    (r"self_attn\.o_proj", "attention.dense"),
    (r"self_attn\.q_norm", "attention.query_layernorm"),
    (r"self_attn\.k_norm", "attention.key_layernorm"),
    (r"gate\.e_score_correction_bias", "gate.expert_bias"),
)


def renamed(state: dict[str, Any], rules: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    found = {}
    for name, tensor in state.items():
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        found[name] = tensor.contiguous()
    return found


def fused_attention(state: dict[str, Any], layers: int) -> None:
    for i in range(layers):
        parts = [state.pop(f"model.layers.{i}.self_attn.{part}_proj.weight") for part in "qkv"]
        state[f"model.layers.{i}.attention.query_key_value.weight"] = torch.cat(parts)


def split_experts(state: dict[str, Any], columns: bool = False) -> None:
    """Tensors of all experts become those of each; `columns`: outputs are their columns."""
    for name in [n for n in state if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        prefix, _, kind = name.rpartition(".")
        for e, stored in enumerate(state.pop(name)):
            whole = stored.T if columns else stored
            halves = whole.chunk(2) if kind == "gate_up_proj" else (whole,)
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            state.update({f"{prefix}.{e}.{p}.weight": h.clone() for p, h in zip(parts, halves, strict=True)})


def check(directory: Path, config: dict[str, Any], state: dict[str, Any], expected: Any) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(state, directory / "model.safetensors")
    backend = ReferenceBackend()
    loaded = load_model(directory, backend)
    assert expected.std() > 0.5
    assert_near(Session(loaded, backend).feed(PROMPT), expected)


def test_mimo_is_qwen2_without_the_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    model = make_model("qwen2")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    further = {
        name.replace("layers.0.", "mtp_layers.0."): tensor.clone()
        for name, tensor in state.items()
        if ".layers.0." in name
    }
    theirs = model.config.to_dict()
    kept = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
        "max_position_embeddings rms_norm_eps tie_word_embeddings"
    )
    config = {key: theirs[key] for key in kept.split()} | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "rope_theta": theirs["rope_parameters"]["rope_theta"],
        "sliding_window": 32768,
        "max_window_layers": 32,
        "use_sliding_window": False,
        "use_mrope": False,
    }
    further["model.mtp_layers.0.input_proj.weight"] = torch.ones(64, 128)
    check(tmp_path, config, state | further, torch_logits(model, PROMPT))


def test_ling_2_is_glm4_moe_with_fused_projections(tmp_path: Path) -> None:
    turned = {"rope_type": "default", "rope_theta": 600.0, "partial_rotary_factor": 0.5}
    model = make_model("glm4_moe", use_qk_norm=True, norm_topk_prob=True, rope_parameters=turned)
    state = dict(model.state_dict())
    fused_attention(state, 3)
    split_experts(state)
    theirs = model.config.to_dict()
    kept = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps hidden_act first_k_dense_replace moe_intermediate_size n_group "
        "topk_group num_experts_per_tok routed_scaling_factor norm_topk_prob tie_word_embeddings"
    )
    config = {key: theirs[key] for key in kept.split()} | {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe_v2",
        "num_experts": theirs["n_routed_experts"],
        "num_shared_experts": theirs["n_shared_experts"],
        "rope_theta": 600.0,
        "partial_rotary_factor": 0.5,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_qk_norm": True,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
    }
    check(tmp_path, config, renamed(state, BAILING), torch_logits(model, PROMPT))


def test_ling_1_is_aria_with_fused_projections(tmp_path: Path) -> None:
    model = make_model("aria_text", moe_num_shared_experts=2)
    state = dict(model.state_dict())
    fused_attention(state, 3)
    split_experts(state, columns=True)
    theirs = model.config
    config = {
        "architectures": ["BailingMoeForCausalLM"],
        "model_type": "bailing_moe",
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": 80,
        "moe_intermediate_size": theirs.intermediate_size,
        "num_hidden_layers": theirs.num_hidden_layers,
        "num_attention_heads": theirs.num_attention_heads,
        "num_key_value_heads": theirs.num_key_value_heads,
        "max_position_embeddings": theirs.max_position_embeddings,
        "rms_norm_eps": theirs.rms_norm_eps,
        "rope_theta": theirs.rope_parameters["rope_theta"],
        "num_experts": theirs.moe_num_experts,
        "num_experts_per_tok": theirs.moe_topk,
        "num_shared_experts": 2,
        "norm_topk_prob": True,
        "norm_head": False,
        "norm_softmax": False,
        "first_k_dense_replace": 0,
    }
    rules = (*BAILING, (r"mlp\.router\.weight", "mlp.gate.weight"))
    check(tmp_path, config, renamed(state, rules), torch_logits(model, PROMPT))


@pytest.mark.parametrize("limits", [None, ([0.0, 0.6, 0.0, 0.4], [0.0, 0.0, 0.5, 0.7])])
def test_step_is_the_text_model_inside_step_3_7(limits: Any, tmp_path: Path) -> None:
    routed, shared = limits or (None, None)
    theirs = Step3p7TextConfig(
        swiglu_limits=routed,
        swiglu_limits_shared=shared,
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_sliding_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention"] * 2,
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        share_expert_dim=40,
        moe_router_scaling_factor=1.4,
        rms_norm_eps=2e-3,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = randomized(Step3p7TextModel(theirs).eval(), 3)
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for i in (1, 2):
        stacked = state.pop(f"model.layers.{i}.mlp.experts.gate_up_proj")
        gate, up = stacked.chunk(2, dim=1)
        state[f"model.layers.{i}.moe.gate_proj.weight"] = gate.clone()
        state[f"model.layers.{i}.moe.up_proj.weight"] = up.clone()
    rules = (
        (r"mlp\.experts\.down_proj", "moe.down_proj.weight"),
        (r"mlp\.gate\.weight", "moe.gate.weight"),
        (r"mlp\.gate\.e_score_correction_bias", "moe.router_bias"),
        (r"mlp\.shared_experts", "share_expert"),
        (r".*inv_freq", "rotary"),
    )
    state = renamed(state, rules)
    state.pop("rotary", None)
    config = {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        **{
            key: getattr(theirs, key)
            for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
        },
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
        },
        "max_position_embeddings": 128,
        "sliding_window": 7,
        "layer_types": [*theirs.layer_types, "full_attention"],
        "num_nextn_predict_layers": 1,
        "swiglu_limits": routed and [*routed, 0.0],
        "swiglu_limits_shared": shared and [*shared, None],
        "moe_layers_enum": "1,2",
        "moe_num_experts": 6,
        "moe_top_k": 3,
        "moe_intermediate_size": 24,
        "share_expert_dim": 40,
        "moe_router_scaling_factor": 1.4,
        "rms_norm_eps": 2e-3,
    }
    state["lm_head.weight"] = 0.2 * model.embed_tokens.weight.detach()
    with torch.no_grad():
        hidden = model(torch.tensor([PROMPT])).last_hidden_state[0]
        expected = (hidden @ state["lm_head.weight"].T).numpy()
    check(tmp_path, config, state, expected)
