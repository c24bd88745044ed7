"""Writes a transformers model as llama.cpp's converter does: names of the gguf package's table, keys of the spec."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.embedding import HeadConfig
from quire.model.parts.latent import LatentConfig
from quire.model.parts.layer import LayerConfig
from quire.model.parts.rope import RopeSpec
from quire.model.parts.scores import ScoresConfig
from tests.gguf_files import add_tensor, finish, turned

TURNED = (
    "llama",
    "granite",
    "smollm3",
    "granitemoe",
    "arcee",
    "mistral3",
    "olmo",
    "deci",
    "bailingmoe",
    "internlm2",
)
SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron")
GROUPED = ("gptneox", "bloom", "falcon")
SPLIT = ("deepseek2", "deepseek32", "glm-dsa")  # keys of latent attention lie apart from values


def each_expert(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors with stacks of experts taken apart, under the names of a file that never had stacks."""
    for name, data in tensors.items():
        head, found, kind = name.rpartition(".experts.")
        if "input_linear" in name or "output_linear" in name:
            yield from _granite_experts(name, data)
        elif found and not kind[0].isdecimal():
            yield from _stacked_experts(f"{head}.experts.", kind, data)
        else:
            yield name, data


def _granite_experts(name: str, data: Any) -> Iterator[tuple[str, Any]]:
    prefix, kind = name.removesuffix(".weight").rsplit(".", 1)
    experts = [("", data)] if data.ndim == 2 else [(f"{e}.", data[e]) for e in range(len(data))]
    for e, matrix in experts:
        if kind == "output_linear":
            yield f"{prefix}.{e}down_proj.weight", matrix
        else:
            gate, up = np.split(matrix, 2)
            yield f"{prefix}.{e}gate_proj.weight", gate
            yield f"{prefix}.{e}up_proj.weight", up


def _stacked_experts(prefix: str, kind: str, data: Any) -> Iterator[tuple[str, Any]]:
    """gpt-oss' (gate and up alternate), Llama 4's (they are halves) and Gemma 4's (outputs are rows, too)."""
    rows = not prefix.endswith(("mlp.experts.", "feed_forward.experts."))
    bias, alternate = kind.endswith("_bias"), not rows and "feed_forward" not in prefix
    suffix = "bias" if bias else "weight"
    for e in range(len(data)):
        matrix = data[e] if bias or rows else data[e].T
        if kind.startswith("down"):
            yield f"{prefix}{e}.down_proj.{suffix}", matrix
            continue
        half = len(matrix) // 2
        gate, up = (matrix[::2], matrix[1::2]) if alternate else (matrix[:half], matrix[half:])
        yield f"{prefix}{e}.gate_proj.{suffix}", gate
        yield f"{prefix}{e}.up_proj.{suffix}", up


class Facts:
    """The facts of a model that its keys give: those of the layers that have them, or of each layer."""

    def __init__(self, model: DecoderConfig) -> None:
        self.architecture, self.num_layers = model.architecture, model.num_layers
        self.hidden_size, self.max_position = model.hidden_size, model.max_position
        self.embedding_scale, self.altup = model.embedding.scale, getattr(model.additions, "altup", None)
        head, first = model.head or HeadConfig(), model.layers[0]
        self.logit_scale, self.logit_cap = head.scale, head.cap
        self.norm, self.norm_eps, self.parallel = first.norm.kind, first.norm.eps, first.parallel
        self.residual_multiplier = first.multiplier
        mixers: list[Any] = [layer.mixer for layer in model.layers if layer.mixer is not None]
        self.latent = mixers[0] if isinstance(mixers[0], LatentConfig) else None
        shares = [getattr(mixer, "shares", False) for mixer in mixers]
        self.shares = shares if any(shares) else []
        self.head_dim, self.num_heads, self.num_kv_heads = model.head_dim, model.num_heads, model.num_kv_heads
        if self.latent is not None:
            self.head_dim = self.latent.nope_dim + self.latent.rope_dim
        self.windows = [None if one.mixer is None else _scores(one).window for one in model.layers]
        self.attention_cap, self.attention_scale = mixers[0].scores.cap, mixers[0].scores.scale
        self.value_dim, self.value_scale, self.clip_qkv = (
            getattr(mixers[0], name, None) for name in ("value_dim", "value_scale", "clip")
        )
        self.ropes = [None if layer.mixer is None else layer.mixer.rope for layer in model.layers]
        full = [rope for rope, window in zip(self.ropes, self.windows, strict=True) if rope and not window]
        self.rope = next(iter([*full, *(rope for rope in self.ropes if rope)]), None)
        self.mixtures = [layer.mixture for layer in model.layers]
        self.moe = next((mixture for mixture in self.mixtures if mixture is not None), None)
        dense = [one.mlp if one.mixture is None else one.mixture.dense for one in model.layers]
        self.inner = [getattr(mlp, "intermediate_size", 0) for mlp in dense]
        self.intermediate_size = max(self.inner) or getattr(self.moe, "intermediate_size", 0)
        self.heads = [(getattr(m, "num_heads", 0), getattr(m, "num_kv_heads", 0), getattr(m, "head_dim", 0))
                      for m in (layer.mixer for layer in model.layers)]  # fmt: skip
        sizes = {size for size in self.inner if size} if self.moe is not None else set(self.inner)
        self.unlike = len(set(self.heads)) > 1 or len(sizes) > 1


def _scores(layer: LayerConfig) -> ScoresConfig:
    assert layer.mixer is not None
    assert layer.mixer.scores is not None
    return layer.mixer.scores


def write(
    path: Path,
    called: str,
    model: DecoderConfig,
    tensors: dict[str, Any],
    config: Any,
    *,
    kind: str = "F32",
    fuse: bool = False,
    more: dict[str, Any] | None = None,
) -> Path:
    """The file, its matrices of `kind` if their rows divide into blocks.

    `fuse` puts queries, keys and values together, and experts' gates beside ups.

    `more` are tensors of a block after the last, which predicts a further token.
    """
    writer, spec = gguf.GGUFWriter(path, called), Facts(model)
    _add_sizes(writer, spec, 1 if more else 0)
    _add_experts(writer, spec, config)
    _add_own(writer, called, spec, config)
    _add_rope(writer, spec, config)
    known = "glm-dsa" if called in SPLIT else called  # the one that has names for indexers
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    table = gguf.get_tensor_name_map(arch, spec.num_layers)
    stacks: dict[str, list[Any]] = {}
    apart = tensors.items() if called == "gemma4" else each_expert(tensors)
    ordered = sorted(apart, key=lambda item: [_number(part) for part in item[0].split(".")])
    for name, data in ordered:
        for to, array in _converted(called, name, data, spec, table):
            stacks.setdefault(to, []).append(np.ascontiguousarray(array))
    found = {
        name: np.stack(parts) if _is_stacked(called, name, parts) else parts[0]
        for name, parts in stacks.items()
    }
    for name, data in (dict(_fused(found)) if fuse else found).items():
        wide = data.ndim > 1 and data.shape[-1] % 32 == 0
        add_tensor(writer, name, data, gguf.GGMLQuantizationType[kind if wide else "F32"])
    for name, data in (more or {}).items():
        writer.add_tensor(name, data)
    finish(writer)
    return path


def _is_stacked(called: str, name: str, parts: list[Any]) -> bool:
    if called == "gemma4":
        return False
    heads = "stablelm" in called and "_norm.weight" in name and len(parts) > 1
    return heads or "_exps" in name or ("altup_" in name and "proj" in name)


def _fused(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, data in tensors.items():
        if "attn_q." in name:
            three = [tensors[name.replace("attn_q", f"attn_{part}")] for part in "qkv"]
            yield name.replace("attn_q", "attn_qkv"), np.concatenate(three)
        elif "gate_exps" in name:
            both = [data, tensors[name.replace("gate", "up")]]
            yield name.replace("gate", "gate_up"), np.concatenate(both, axis=1)
        elif not any(part in name for part in ("attn_k.", "attn_v.", "up_exps")):
            yield name, data


def _converted(
    called: str, name: str, data: Any, spec: Facts, table: gguf.TensorNameMap
) -> Iterator[tuple[str, Any]]:
    """What the file has of one tensor."""
    if called in TURNED and name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
        data = turned(data, len(data) // spec.head_dim)
    if called in GROUPED and "query_key_value" in name:
        data = _stacked_heads(data, spec)
    if called in SHIFTED and name.endswith("norm.weight"):
        data = data + np.float32(1)
    if called == "gpt2" and data.ndim == 2 and ".h." in name:
        data = data.T
    if "shared_expert_gate" in name:
        data = data[0]
    if ".act_fn." in name:
        return  # in keys
    if name.endswith((".router.scale", ".router.per_expert_scale")):
        module = "ffn_gate_inp" if name.endswith(".router.scale") else "ffn_down_exps"
        yield f"blk.{name.split('.layers.')[1].split('.')[0]}.{module}.scale", data
        return
    if called == "bailingmoe" and "query_key_value" in name:
        yield from _separate(name, data, spec, table)
        return
    if spec.latent is not None and "kv_b_proj" in name and called in SPLIT:
        both = data.reshape(spec.num_heads, -1, data.shape[-1])
        nope = spec.latent.nope_dim
        yield _name(table, name.replace("kv_b", "k_b")), both[:, :nope].swapaxes(1, 2)
        yield _name(table, name.replace("kv_b", "v_b")), both[:, nope:]
        return
    for part in (
        "experts.",
        "norms.",
        "block_sparse_moe.",
        "altup_projections.",
        "altup_unembed_projections.",
    ):
        head, found, tail = name.partition(part)
        if found and tail[0].isdecimal():
            kind = tail.partition(".")[2]
            name = head + ("weight" if part == "norms." else f"{part}{kind}")  # without the number
            if part == "block_sparse_moe.":  # Granite's, which the table knows by Mixtral's names
                name = name.replace("block_sparse_moe.", "mlp.experts.")
            break
    yield _name(table, name), data


def _name(table: gguf.TensorNameMap, name: str) -> str:
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        layer = name.split(".layers.")[1].split(".")[0]
        return f"blk.{layer}.exp_probs_b.bias"
    if "_sub_norm." in name:  # BitNet's, which the table has by older names
        layer, module = name.split(".layers.")[1].split(".")[0], name.split(".")[-2]
        return f"blk.{layer}.{module}.weight"
    if name.endswith(
        (".sinks", ".attention_sink_bias", "_scale", ".layer_scalar", ".gate_up_proj", ".down_proj")
    ):
        name += ".weight"
    if name.endswith("_proj.weight"):
        name = name.replace(".shared_mlp.", ".mlp.shared_expert.").replace("mlp.mlp", "mlp")
    suffixes = (".weight", ".bias")
    to = table.get_name(name, try_suffixes=suffixes)
    to = to or table.get_name(name.removeprefix("transformer."), try_suffixes=suffixes)
    assert to is not None, name
    return str(to)


def _separate(name: str, data: Any, spec: Facts, table: gguf.TensorNameMap) -> Iterator[tuple[str, Any]]:
    """Queries, keys and values that the checkpoint fuses, reordered as Llama's."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    parts = turned(data[:q], spec.num_heads), turned(data[q : q + kv], spec.num_kv_heads), data[q + kv :]
    for kind, part in zip("qkv", parts, strict=True):
        yield _name(table, name.replace("attention.query_key_value", f"self_attn.{kind}_proj")), part


def _stacked_heads(data: Any, spec: Facts) -> Any:
    """Each group's queries, key and value as all queries, all keys and all values."""
    groups = data.reshape(spec.num_kv_heads, -1, spec.head_dim, *data.shape[1:])
    rest = data.shape[1:]
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return np.concatenate([part.reshape(-1, *rest) for part in parts])


def _number(part: str) -> Any:
    return (0, int(part), "") if part.isdecimal() else (1, 0, part)


def _add_sizes(writer: gguf.GGUFWriter, spec: Facts, extra: int) -> None:
    writer.add_block_count(spec.num_layers + extra)
    if extra:
        writer.add_nextn_predict_layers(extra)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden_size)
    if not spec.unlike:
        writer.add_feed_forward_length(spec.intermediate_size)
        writer.add_head_count(spec.num_heads)
        writer.add_head_count_kv(1 if spec.latent else spec.num_kv_heads)
    else:
        writer.add_feed_forward_length(
            [size or (spec.intermediate_size if spec.moe else 0) for size in spec.inner]
        )
        writer.add_head_count([count for count, _, _ in spec.heads])
        writer.add_head_count_kv([count for _, count, _ in spec.heads])
    far = spec.head_dim * spec.num_heads != spec.hidden_size
    if (far or spec.unlike) and spec.latent is None:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.value_dim or spec.head_dim)
    rms = spec.norm == "rms" or spec.architecture == "PhimoeForCausalLM"
    (writer.add_layer_norm_rms_eps if rms else writer.add_layer_norm_eps)(spec.norm_eps)
    window = next((window for window in spec.windows if window), None)
    if window:
        writer.add_sliding_window(window)
    if spec.attention_cap:
        writer.add_attn_logit_softcapping(spec.attention_cap)
    if spec.logit_cap:
        writer.add_final_logit_softcapping(spec.logit_cap)


def _add_experts(writer: gguf.GGUFWriter, spec: Facts, config: Any) -> None:
    moe = spec.moe
    if moe is None:
        return
    routing = moe.routing
    writer.add_expert_count(routing.num_experts)
    writer.add_expert_used_count(routing.top_k)
    writer.add_expert_feed_forward_length(moe.intermediate_size)
    if routing.num_groups > 1:
        writer.add_expert_group_count(routing.num_groups)
        writer.add_expert_group_used_count(routing.top_groups)
    known = getattr(config, "n_shared_experts", None) or getattr(config, "num_shared_experts", None)
    known = known or getattr(config, "moe_num_shared_experts", None)
    if known:
        writer.add_expert_shared_count(known)
    elif moe.shared_intermediate_size:
        writer.add_expert_shared_feed_forward_length(moe.shared_intermediate_size)
    layers = [mixture is not None for mixture in spec.mixtures]
    dense = layers.index(True)
    if dense and all(layers[dense:]):
        writer.add_leading_dense_block_count(dense)
    if not all(layers[dense:]):
        writer.add_interleave_moe_layer_step(dense + 1)
    if routing.scale != 1:
        writer.add_expert_weights_scale(routing.scale)
    if routing.renormalize and "Qwen" not in spec.architecture and spec.architecture != "MixtralForCausalLM":
        writer.add_expert_weights_norm(True)
    if routing.scoring == "sigmoid":
        softmax = getattr(config, "scoring_func", None) == "softmax"
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SOFTMAX if softmax else kinds.SIGMOID)


def _add_own(writer: gguf.GGUFWriter, called: str, spec: Facts, config: Any) -> None:
    """What only some architectures have."""
    if called in ("granite", "granitemoe"):
        writer.add_attention_scale(spec.attention_scale)
        writer.add_embedding_scale(spec.embedding_scale)
        writer.add_residual_scale(spec.residual_multiplier)
        writer.add_logit_scale(1 / spec.logit_scale)
    if called in ("command-r", "cohere2"):
        writer.add_logit_scale(spec.logit_scale)
    if called in ("stablelm", "gptneox"):
        writer.add_parallel_residual(spec.parallel)
    if called in ("exaone4", "exaone-moe") and any(spec.windows):
        writer.add_sliding_window_pattern([window is not None for window in spec.windows])
    if spec.clip_qkv:
        writer.add_clamp_kqv(spec.clip_qkv)
    if called == "mistral3":
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    if called in ("gemma3n", "gemma4", "mimo2"):
        _add_unlike(writer, called, spec, config)
    if called == "apertus":
        tensors = config.xielu
        for name, add in (
            ("alpha_p", writer.add_xielu_alpha_p),
            ("alpha_n", writer.add_xielu_alpha_n),
            ("beta", writer.add_xielu_beta),
            ("eps", writer.add_xielu_eps),
        ):
            add([tensors[f"model.layers.{i}.mlp.act_fn.{name}"].item() for i in range(spec.num_layers)])
    if called.startswith("qwen3vl"):
        writer.add_num_deepstack_layers(3)
    if called.startswith(("qwen2vl", "qwen3vl")):
        writer.add_rope_dimension_sections([2, 3, 3, 0])
    if spec.latent is not None:
        latent = spec.latent
        size = latent.nope_dim + latent.rope_dim
        if latent.q_rank:
            writer.add_q_lora_rank(latent.q_rank)
        writer.add_kv_lora_rank(latent.kv_rank)
        if called == "minicpm3":
            writer.add_key_length(size)
        else:
            writer.add_key_length_mla(size)
            writer.add_value_length_mla(latent.value_dim)
            writer.add_key_length(latent.kv_rank + latent.rope_dim)
            writer.add_value_length(latent.kv_rank)
        _add_indexer(writer, called, spec, latent)
        if spec.moe is None and called == "deepseek2":
            writer.add_leading_dense_block_count(spec.num_layers)
        if spec.rope is not None and spec.rope.mscale_all_dim:
            writer.add_rope_scaling_yarn_log_mul(0.1 * spec.rope.mscale_all_dim)


def _add_indexer(writer: gguf.GGUFWriter, called: str, spec: Facts, latent: LatentConfig) -> None:
    if latent.indexer is None:
        return
    writer.add_indexer_head_count(latent.indexer.num_heads)
    writer.add_indexer_key_length(latent.indexer.keys.head_dim)
    writer.add_indexer_top_k(latent.indexer.top_k)
    if spec.shares:  # of newer converters
        writer.add_array(f"{called}.attention.indexer.types", [not shares for shares in spec.shares])


def _add_unlike(writer: gguf.GGUFWriter, called: str, spec: Facts, config: Any) -> None:
    """What architectures have whose layers differ."""
    slides = [window is not None for window in spec.windows]
    near = next(rope for rope, slide in zip(spec.ropes, slides, strict=True) if slide)
    assert near is not None
    writer.add_sliding_window_pattern(slides)
    writer.add_rope_freq_base_swa(near.theta)
    if called == "mimo2":
        writer.add_float32("mimo2.attention.value_scale", spec.value_scale)
        return
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if called == "gemma3n":
        assert spec.altup is not None
        writer.add_altup_active_idx(spec.altup.active)
        writer.add_altup_num_inputs(spec.altup.streams)
        shares = np.array(config.activation_sparsity_pattern)
        with np.errstate(divide="ignore"):
            writer.add_activation_sparsity_scale(
                [float(x) for x in torch.special.ndtri(torch.tensor(shares))]
            )
        return
    writer.add_key_length_swa(near.rotary_dim)
    writer.add_value_length_swa(near.rotary_dim)
    writer.add_rope_dimension_count_swa(near.rotary_dim)
    assert spec.rope is not None
    turned_pairs, pairs = spec.rope.rotated_pairs, spec.rope.rotary_dim // 2
    factors = np.array([1.0] * turned_pairs + [1e30] * (pairs - turned_pairs), np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def _add_rope(writer: gguf.GGUFWriter, spec: Facts, config: Any) -> None:
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
    if rope.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope).astype(np.float32))
    if rope.kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for name in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def _llama3_factors(rope: RopeSpec) -> Any:
    """By what each frequency is divided."""
    found = []
    for i in range(rope.rotary_dim // 2):
        turns = rope.original_max_position / (2 * np.pi * rope.theta ** (2 * i / rope.rotary_dim))
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(found)
