"""Files of models with scans as llama.cpp's converter writes them give the logits of the same weights elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from quire.devices.protocol import Backend
from quire.errors import ModelError
from quire.model.families import SUPPORTED
from quire.model.gguf.architectures import ARCHITECTURES
from quire.model.info import Reading
from tests.gguf_files import add_tensor, finish, turned
from tests.model.tiny_models import Session, make_model
from tests.models import inspect_model, load_model

# By GGUF's name and, behind a colon, a form of it: a variant of tiny_models and changes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {}),
    "mamba:apart": ("mamba-bias", {}),
    "mamba:falcon": ("falcon_mamba", {"mixer_rms_eps": 1e-5}),
    "mamba2": ("mamba2", {}),
    "jamba": ("jamba", {}),
    "jamba:dense": ("jamba-dense", {}),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1:norm": ("falcon_h1-norm", {"projectors_bias": False}),
    "granitehybrid": ("granitemoehybrid", {"position_embedding_type": "nope"}),
    "granitehybrid:dense": (
        "granitemoehybrid-dense",
        {"position_embedding_type": "nope", "shared_intermediate_size": 24},
    ),
    "nemotron_h": ("nemotron_h", {"hybrid_override_pattern": "M-M*-", "time_step_min": 1e-9}),
    "nemotron_h_moe": ("nemotron_h", {"time_step_min": 1e-9}),
    "nemotron_h_moe:latent": ("nemotron_h-latent", {"time_step_min": 1e-9, "use_bias": False}),
    "kimi-linear": ("kimi_linear", {"linear_head_dim": 14, "linear_num_heads": 4}),
}
MODULES = {
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "in_proj": "ssm_in",
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "dt_layernorm": "ssm_dt_norm",
    "b_layernorm": "ssm_b_norm",
    "c_layernorm": "ssm_c_norm",
}
KDA = {
    "f_a_proj": "ssm_f_a",
    "f_b_proj": "ssm_f_b",
    "g_a_proj": "ssm_g_a",
    "g_b_proj": "ssm_g_b",
    "b_proj": "ssm_beta",
    "o_norm": "ssm_norm",
    "q_conv1d": "ssm_conv1d_q",
    "k_conv1d": "ssm_conv1d_k",
    "v_conv1d": "ssm_conv1d_v",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
}
OTHERS = {
    "attn": {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"},
    "mlp": {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"},
}
NORMS = {
    "input_layernorm": "attn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "post_attention_layernorm": "ffn_norm",
}
ENDS = {
    "embed_tokens.weight": "token_embd.weight",
    "embeddings.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "norm_f.weight": "output_norm.weight",
    "model.norm.weight": "output_norm.weight",
    "final_layernorm.weight": "output_norm.weight",
}


def scan_tensor(called: str, config: Any, kind: str, name: str, data: Any) -> tuple[str, Any]:
    """A tensor of Mamba's mixer, by its module and what follows."""
    own = MODULES[kind] + (f".{name}" if name else "")
    wide = called not in ("mamba", "jamba")  # Mamba-2
    groups = getattr(config, "n_groups", None) or getattr(config, "mamba_n_groups", None) or 1
    if kind == "A_log":
        data = -np.exp(data.astype(np.float64)).astype(np.float32)
    if kind in ("A_log", "D") and wide:
        data = data[:, None]
    if kind == "conv1d" and name == "weight":
        data = data[:, 0]
    if kind == "norm":
        data = data.reshape(groups, -1)
    return own, data


def layer_tensor(called: str, config: Any, path: list[str], data: Any) -> list[tuple[str, Any]]:
    """What a block of the file has of a layer's tensor."""
    *modules, name = path
    kind = modules[-1] if modules else name
    if kind in NORMS:
        return [(f"{NORMS[kind]}.weight", data)]
    if modules == ["norm"]:
        return [("attn_norm.weight", data)]
    if called == "kimi-linear" and modules[0] == "self_attn":
        if kind in KDA or name in KDA:
            if name in ("A_log", "dt_bias"):
                data = -np.exp(data.astype(np.float64)).astype(np.float32) if name == "A_log" else data
                return [(KDA[name], data.reshape(1, 1, -1, 1) if name == "A_log" else data)]
            if "conv1d" in kind:
                data = data.reshape(1, len(data), 1, -1)
            return [(f"{KDA[kind]}.weight", data)]
        if kind == "kv_b_proj":
            both = data.reshape(config.num_attention_heads, -1, data.shape[-1])
            nope = config.qk_nope_head_dim
            keys, values = both[:, :nope].swapaxes(1, 2), both[:, nope:]
            return [("attn_k_b.weight", keys), ("attn_v_b.weight", values)]
        latent = {"kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_a_layernorm": "attn_kv_a_norm"}
        return [(f"{(latent | OTHERS['attn'])[kind]}.{name}", data)]
    if kind in OTHERS["attn"]:
        if called == "granitehybrid" and kind in ("q_proj", "k_proj"):
            data = turned(data, len(data) // (config.hidden_size // config.num_attention_heads))
        return [(f"{OTHERS['attn'][kind]}.{name}", data)]
    if name == "e_score_correction_bias":
        return [("exp_probs_b.bias", data)]
    if kind in ("router", "gate") or modules[-2:] == ["router", "layer"]:
        return [("ffn_gate_inp.weight", data)]
    if kind in ("fc1_latent_proj", "fc2_latent_proj"):
        return [(f"ffn_latent_{'down' if '1' in kind else 'up'}.weight", data)]
    if kind in ("input_linear", "output_linear"):  # Granite's shared MLP, or its experts in one tensor
        stacked, half = "block_sparse_moe" in modules, "ffn_down"
        end = "_exps" if stacked else "_shexp" if config.num_local_experts else ""
        if kind == "output_linear":
            return [(f"{half}{end}.weight", data)]
        gate, up = np.split(data, 2, axis=-2)
        return [(f"ffn_gate{end}.weight", gate), (f"ffn_up{end}.weight", up)]
    if kind in OTHERS["mlp"]:
        shared = "shared_experts" in modules
        return [(f"{OTHERS['mlp'][kind]}{'_shexp' if shared else ''}.{name}", data)]
    scan = name if name in ("A_log", "D", "dt_bias") else kind
    return [scan_tensor(called, config, scan, "" if scan == name else name, data)]


def scaled(config: Any, name: str, data: Any) -> Any:
    """Falcon-H1's multipliers, which the converter puts into the weights."""
    inner, groups = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    parts = np.repeat(config.ssm_multipliers, [inner, inner, groups, groups, config.mamba_n_heads])
    into = config.attention_in_multiplier
    factors = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "q_proj": into,
        "k_proj": into * config.key_multiplier,
        "v_proj": into,
        "o_proj": config.attention_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "in_proj": config.ssm_in_multiplier * parts[:, None],
        "out_proj": config.ssm_out_multiplier,
    }
    kind = name.removesuffix(".weight").rpartition(".")[2]
    return (data * factors.get(kind, 1)).astype(np.float32)


def sizes(writer: gguf.GGUFWriter, called: str, config: Any, tensors: dict[str, Any]) -> None:
    layers = config.num_hidden_layers
    writer.add_block_count(layers)
    writer.add_context_length(getattr(config, "max_position_embeddings", None) or 1 << 20)
    writer.add_embedding_length(config.hidden_size)
    eps = [getattr(config, key, None) for key in ("rms_norm_eps", "layer_norm_epsilon")]
    writer.add_layer_norm_rms_eps(next(one for one in eps if one))
    alone = called.startswith("mamba")
    writer.add_head_count(0 if alone else config.num_attention_heads)
    attends = [any(f"layers.{i}." in n and "k_proj" in n for n in tensors) for i in range(layers)]
    if called == "kimi-linear":
        attends = [any(f"layers.{i}." in n and "kv_b_proj" in n for n in tensors) for i in range(layers)]
    kv = 0 if alone else config.num_key_value_heads
    if called == "falcon-h1":
        writer.add_head_count_kv(kv)
    elif not alone:
        writer.add_head_count_kv([kv * own for own in attends])
    if called == "nemotron_h":
        has = [any(f"layers.{i}.mixer.up_proj" in n for n in tensors) for i in range(layers)]
        writer.add_feed_forward_length([config.intermediate_size * own for own in has])
    elif called == "nemotron_h_moe":
        experts = [any(f"layers.{i}.mixer.gate." in n for n in tensors) for i in range(layers)]
        plain = [any(f"layers.{i}.mixer.up_proj" in n for n in tensors) for i in range(layers)]
        each = zip(experts, plain, strict=True)
        found = [config.moe_intermediate_size if e else config.intermediate_size * p for e, p in each]
        writer.add_feed_forward_length(found)
    else:
        writer.add_feed_forward_length(0 if alone else config.intermediate_size)


def scans(writer: gguf.GGUFWriter, called: str, config: Any, tensors: dict[str, Any]) -> None:
    taps = next(data for name, data in tensors.items() if "conv1d.weight" in name)
    writer.add_ssm_conv_kernel(taps.shape[-1])
    if called == "kimi-linear":
        writer.add_kda_head_dim(config.linear_head_dim)
        return
    out = next(data for name, data in tensors.items() if name.endswith("out_proj.weight"))
    writer.add_ssm_inner_size(out.shape[1])
    if called in ("mamba", "jamba"):
        steps = next(data for name, data in tensors.items() if name.endswith("dt_proj.weight"))
        rates = next(data for name, data in tensors.items() if name.endswith("A_log"))
        writer.add_ssm_time_step_rank(steps.shape[1])
        writer.add_ssm_state_size(rates.shape[1])
    else:
        names = ("ssm_state_size", "state_size", "mamba_d_state"), ("n_groups", "mamba_n_groups")
        state, groups = (next(v for k in n if (v := getattr(config, k, None))) for n in names)
        heads = next(len(data) for name, data in tensors.items() if name.endswith("A_log"))
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_state_size(state)
        writer.add_ssm_group_count(groups)


def experts(writer: gguf.GGUFWriter, called: str, config: Any) -> None:
    if called == "jamba" and config.num_experts > 1:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if called == "granitehybrid" and getattr(config, "num_local_experts", 0):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if called == "nemotron_h_moe":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        if config.moe_latent_size:
            writer.add_uint32(f"{called}.moe_latent_size", config.moe_latent_size)
    if called == "kimi-linear":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
    if called in ("nemotron_h_moe", "kimi-linear"):
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_weights_scale(config.routed_scaling_factor)


def own_keys(writer: gguf.GGUFWriter, called: str, config: Any) -> None:
    if called == "mamba":
        writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")
    if called == "granitehybrid":
        writer.add_rope_scaling_finetuned(False)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if called == "falcon-h1":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if "nemotron" in called:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if called == "kimi-linear":
        rotated, nope = config.qk_rope_head_dim, config.qk_nope_head_dim
        if config.q_lora_rank:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length(config.kv_lora_rank + rotated)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(nope + rotated)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(rotated)


def write(path: Path, called: str, config: Any, tensors: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, called)
    sizes(writer, called, config, tensors)
    scans(writer, called, config, tensors)
    experts(writer, called, config)
    own_keys(writer, called, config)
    stacks: dict[str, dict[int, Any]] = {}
    for name, data in tensors.items():
        data = scaled(config, name, data) if called == "falcon-h1" else data
        end = next((own for theirs, own in ENDS.items() if name.endswith(theirs)), None)
        if end is not None and ".layers." not in name:
            add_tensor(writer, end, data, gguf.GGMLQuantizationType.F32)
            continue
        number, *path_ = name.split(".layers.")[1].split(".")
        if "experts" in path_ and path_[path_.index("experts") + 1].isdecimal():
            e, kind = path_[path_.index("experts") + 1 :][:2]
            plain = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(kind, kind)
            stacks.setdefault(f"blk.{number}.{OTHERS['mlp'][plain]}_exps.weight", {})[int(e)] = data
            continue
        for own, array in layer_tensor(called, config, path_, data):
            to = f"blk.{number}.{own}"
            add_tensor(writer, to, np.ascontiguousarray(array), gguf.GGMLQuantizationType.F32)
    for to, found in stacks.items():
        stack = np.stack([found[e] for e in sorted(found)])
        add_tensor(writer, to, stack, gguf.GGMLQuantizationType.F32)
    finish(writer)
    return path


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_hub_form(case: str, backend: Backend, tmp_path: Path) -> None:
    called, (variant, changes) = case.partition(":")[0], CASES[case]
    model = make_model(variant, **changes)
    model.save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    file = write(tmp_path / "m.gguf", called, model.config, tensors)
    plain, found = load_model(tmp_path / "model", backend), load_model(file, backend)
    assert found.spec.architecture == plain.spec.architecture
    assert found.spec.architecture in SUPPORTED
    assert found.info.num_parameters == plain.info.num_parameters
    prompt = [int(t) for t in np.random.default_rng(7).integers(3, 97, 50)]
    wanted, got = Session(plain, backend).feed(prompt), Session(found, backend).feed(prompt)
    assert wanted.std() > 0.3
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())


def test_every_scan_has_a_case() -> None:
    scanning = {
        name for name, one in ARCHITECTURES.items() if any(key.startswith("scan.") for key in one.names)
    }
    assert scanning < {case.partition(":")[0] for case in CASES}


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        ("mamba2", "ssm.time_step_rank", 7, "ssm.time_step_rank must be a divisor"),
        ("mamba2", "ssm.group_count", 3, "do not divide into 3 groups"),
        ("mamba2", "attention.head_count", 4, "attention.head_count must be 0"),
        ("jamba", "attention.head_count_kv", [1, 0], "attention.head_count_kv must be an integer from 0"),
        ("granitehybrid", "rope.scaling.finetuned", True, "rope.scaling.finetuned must be False"),
        ("mamba", "ssm.state_size", 0, "ssm.state_size must be an integer above 0"),
        ("nemotron_h_moe", "expert_shared_count", 2, "expert_shared_count must be 1"),
        ("kimi-linear", "kda.head_dim", 0, "kda.head_dim must be an integer above 0"),
    ],
)
def test_keys_that_do_not_fit_are_named(
    case: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    variant, changes = CASES[case]
    model = make_model(variant, **changes)
    model.save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    file = write(tmp_path / "m.gguf", case, model.config, tensors)
    with pytest.raises(ModelError, match=message) as caught:
        inspect_model(file, reading=Reading(config={f"{case}.{key}": value}))
    assert "\n" not in str(caught.value)
