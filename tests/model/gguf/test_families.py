"""Every architecture: a transformers model written as a GGUF file gives the same spec and the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from quire.devices.cpu.backend import NativeBackend
from quire.errors import ModelError
from quire.files import read_json
from quire.model.families import read_model
from quire.model.families.names import TensorNames
from quire.model.load import open_checkpoint_files
from quire.model.packing import wanted_tensors
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.parts.source import Piece, Use
from quire.model.tensors import Tensors
from quire.weights.checkpoint import Checkpoint
from quire.weights.checkpoint.protocol import Unquantized
from quire.weights.schemes import Kept
from tests.model.gguf.converter import write
from tests.model.tiny_models import SMALL, VARIANTS, YARN, Session, make_model
from tests.models import inspect_model, load_model

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
    "cohere-qk-norm": "command-r",
    "cohere2": "cohere2",
    "olmo": "olmo",
    "olmo-clip": "olmo",
    "olmo3-one-theta": "olmo2",
    "olmoe": "olmoe",
    "exaone4": "exaone4",
    "exaone4-full": "exaone4",
    "exaone_moe": "exaone-moe",
    "arcee": "arcee",
    "jais2": "jais2",
    "nemotron": "nemotron",
    "seed-oss-bias": "seed_oss",
    "ministral3": "mistral3",
    "glm-own-size": "chatglm",
    "glm4": "glm4",
    "glm4-moe-norms": "glm4moe",
    "dots1-full": "dots1",
    "ernie-bias": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax-rotary": "minimax-m2",
    "afmoe-pattern": "afmoe",
    "phimoe-head-bias": "phimoe",
    "gpt-oss-published": "gpt-oss",
    "llama4-published": "llama4",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "deepseek-v2": "deepseek2",
    "deepseek-v2-lite": "deepseek2",
    "deepseek-v3": "deepseek2",
    "deepseek-v3-one-group": "deepseek2",
    "youtu": "deepseek2",
    "deepseek-v3.2-scaled": "deepseek2",
    "deepseek_v32": "deepseek32",
    "glm-5": "glm-dsa",
    "glm-5.2": "glm-dsa",
    "minicpm3-published": "minicpm3",
    "bloom": "bloom",
    "falcon-7b": "falcon",
    "falcon-40b": "falcon",
    "falcon-11b": "falcon",
    "gpt_bigcode": "starcoder",
    "mpt-clipped": "mpt",
    "gemma3n": "gemma3n",
    "gemma3n-first": "gemma3n",
    "gemma4": "gemma4",
    "gemma4-moe": "gemma4",
    "gemma4-inputs-by-layer": "gemma4",
    "mimo-scaled": "mimo2",
    "bitnet-tied": "bitnet",
    "apertus": "apertus",
}
# Named by the config alone: what transformers has no class for, or one of other names.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deci": (
        "DeciLMForCausalLM",
        {
            "hidden_size": 192,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 4.0}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            ],
        },
    ),
    "exaone": ("ExaoneForCausalLM", {}),
    "bailingmoe": (
        "BailingMoeForCausalLM",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_shared_experts": 2},
    ),
    "bailingmoe2": (
        "BailingMoeV2ForCausalLM",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_shared_experts": 1,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "internlm2": ("LlamaForCausalLM", {}),
    "qwen2vl": ("Qwen2ForCausalLM", {}),
    "qwen3vl": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3vlmoe": (
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
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
    "olmo3-one-theta": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 100.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "glm-own-size": ("glm", {"head_dim": 12}),
    "dots1-full": ("dots1", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "afmoe-pattern": ("afmoe", {"mup_enabled": True}),
    "gpt-oss-published": (
        "gpt_oss",
        {"rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    ),
    "llama4-published": (
        "llama4",
        {
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "interleave_moe_layer_step": 2,
        },
    ),
    "minicpm3-published": (
        "minicpm3",
        {"v_head_dim": 12, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    ),
    "mpt-clipped": ("mpt", {"attn_config": {"clip_qkv": 0.8}}),
    "gemma3n-first": (
        "gemma3n",
        {"altup_active_idx": 2, "intermediate_size": 80, "vocab_size_per_layer_input": 97},
    ),
    "deepseek-v3.2-scaled": (
        "deepseek_v32",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "bitnet-tied": ("bitnet", {"tie_word_embeddings": True}),
    "mimo-scaled": ("mimo_v2_flash", {"attention_value_scale": 0.75, "moe_layer_freq": [0, 1, 1, 0]}),
}


class Values:
    """A `WeightSource` of plain values."""

    def __init__(self, tensors: Tensors, checkpoint: Checkpoint) -> None:
        self.tensors, self.checkpoint = tensors, checkpoint

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Any:
        return np.concatenate([self.tensors.part(piece).read(self.checkpoint) for piece in pieces])

    def gated(self, path: str, gate: Piece, up: Piece) -> Any:
        return self.matrix(path, [gate, up])

    def vector(self, path: str, pieces: Sequence[Piece]) -> Any:
        return np.array(self.matrix(path, pieces), np.float32)


def values(config: DecoderConfig, names: TensorNames, checkpoint: Checkpoint) -> dict[str, Any]:
    """The weights by path."""
    return dict(Decoder(config, Values(Tensors(config, names), checkpoint)).weights)


class Memory(Unquantized):
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def path(self, name: str) -> Path:
        return Path("model.safetensors")

    def get(self, name: str) -> Any:
        return self._tensors[name]


@pytest.mark.parametrize("variant", CASES)
def test_spec_and_weights_come_back(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, variant, VARIANTS.get(variant) or OWN[variant])
    model = make_model(variant)
    model.config.architectures = [type(model).__name__.replace("Gemma3Text", "Gemma3")]
    model.save_pretrained(tmp_path / "model")
    expected = open_checkpoint_files(tmp_path / "model").opened()
    spec, _ = read_model(read_json(tmp_path / "model" / "config.json"))
    original = load_file(tmp_path / "model" / "model.safetensors")
    model.config.xielu = original
    file = write(tmp_path / "m.gguf", CASES[variant], spec, original, model.config)
    check(file, spec, expected.names, expected.checkpoint)


def check(file: Path, spec: DecoderConfig, names: TensorNames, checkpoint: Checkpoint) -> None:
    """The file gives the spec and the weights of the checkpoint, and all its tensors are used."""
    model = open_checkpoint_files(file).opened()
    assert model.spec == spec
    found, wanted = values(spec, model.names, model.checkpoint), values(spec, names, checkpoint)
    assert found.keys() == wanted.keys()
    for path, theirs in wanted.items():
        assert np.array_equal(found[path], theirs), path


@pytest.mark.parametrize("called", CONFIGS)
def test_spec_and_weights_of_a_config_come_back(called: str, tmp_path: Path) -> None:
    architecture, changes = CONFIGS[called]
    config = {"architectures": [architecture], **SMALL, **changes}
    spec, names = read_model(config)
    rng = np.random.default_rng(4)
    original = {
        name: rng.standard_normal(wanted.shape).astype(np.float32)
        for name, wanted in wanted_tensors(spec, names).items()
    }
    file = write(tmp_path / "m.gguf", called, spec, original, SimpleNamespace(**config))
    check(file, spec, names, Memory(original))


WIDE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_inner": 128},
    "phi3": {"hidden_size": 64, "intermediate_size": 96},
    "gpt-oss-published": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32},
    "deepseek-v3": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "glm-5.2": {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
}


@pytest.mark.parametrize("variant", WIDE)
def test_quantized_matrices_keep_their_blocks(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks times floats are the products of their values.

    Fused projections, experts with biases, keys apart from values.
    """
    monkeypatch.setitem(VARIANTS, variant, VARIANTS.get(variant) or OWN[variant])
    model = make_model(variant, **WIDE[variant])
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(tmp_path / "model")
    spec, _ = read_model(read_json(tmp_path / "model" / "config.json"))
    original = load_file(tmp_path / "model" / "model.safetensors")
    file = write(tmp_path / "m.gguf", CASES[variant], spec, original, model.config, kind="Q8_0")
    backend, tokens = NativeBackend(1), [7 * i % 90 + 3 for i in range(30)]
    wanted = Session(load_model(file, backend, dtype="float32"), backend).feed(tokens)
    exact = load_model(file, backend, quantized=Kept("float"))
    assert isinstance(exact.info.quantized, Kept)
    assert exact.info.quantized.kinds == ("Q8_0",)
    assert np.abs(Session(exact, backend).feed(tokens) - wanted).max() < 1e-4
    rounded = Session(load_model(file, backend), backend).feed(tokens)
    assert 0 < np.abs(rounded - wanted).mean() < 0.3


def test_fused_tensors_are_read_like_separate_ones(tmp_path: Path) -> None:
    """Newer files may hold queries, keys and values in one tensor, and each expert's gate beside its up."""
    model = make_model("qwen3-moe")
    model.config.architectures = ["Qwen3MoeForCausalLM"]
    model.save_pretrained(tmp_path / "model")
    spec, _ = read_model(read_json(tmp_path / "model" / "config.json"))
    original = load_file(tmp_path / "model" / "model.safetensors")
    apart = write(tmp_path / "apart.gguf", "qwen3moe", spec, original, model.config)
    fused = write(tmp_path / "fused.gguf", "qwen3moe", spec, original, model.config, fuse=True)
    assert len(gguf.GGUFReader(fused).tensors) < len(gguf.GGUFReader(apart).tensors)
    assert inspect_model(fused).spec == inspect_model(apart).spec == spec
    tensors, separate = (open_checkpoint_files(file).opened().checkpoint for file in (fused, apart))
    assert set(tensors.names()) == set(separate.names())
    for name in separate.names():
        assert np.array_equal(tensors.get(name), separate.get(name)), name


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = make_model("glm4_moe")
    model.config.architectures = ["Glm4MoeForCausalLM"]
    model.save_pretrained(tmp_path / "model")
    spec, _ = read_model(read_json(tmp_path / "model" / "config.json"))
    original = load_file(tmp_path / "model" / "model.safetensors")
    more = {"blk.3.nextn.eh_proj.weight": np.zeros((48, 96), np.float32)}
    file = write(tmp_path / "m.gguf", "glm4moe", spec, original, model.config, more=more)
    assert inspect_model(file).spec == spec


def test_a_file_of_another_kind_of_expert_is_refused(tmp_path: Path) -> None:
    model = make_model("glm4_moe")
    model.config.architectures = ["Glm4MoeForCausalLM"]
    model.save_pretrained(tmp_path / "model")
    spec, _ = read_model(read_json(tmp_path / "model" / "config.json"))
    original = load_file(tmp_path / "model" / "model.safetensors")
    model.config.scoring_func = "softmax"
    file = write(tmp_path / "m.gguf", "glm4moe", spec, original, model.config)
    with pytest.raises(ModelError, match="expert_gating_func must be sigmoid"):
        inspect_model(file)
