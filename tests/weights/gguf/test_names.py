"""Names of tensors, against the gguf package's table and transformers' models."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from quire.weights.gguf.architectures import ARCHITECTURES
from quire.weights.gguf.container import TensorEntry
from quire.weights.gguf.kinds import KINDS
from quire.weights.gguf.names import _grouped, _unturned, places
from tests.gguf_files import turned

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL | {"attention_bias": True}),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", SMALL | {"head_dim": 8}),
    "gemma": ("Gemma", SMALL | {"head_dim": 8}),
    "gemma2": ("Gemma2", SMALL | {"head_dim": 8}),
    "gemma3": ("Gemma3Text", SMALL | {"head_dim": 8}),
    "phi2": ("Phi", SMALL | {"num_key_value_heads": 4}),
    "phi3": ("Phi3", SMALL),
    "gpt2": ("GPT2", GPT2),
    "gptneox": ("GPTNeoX", SMALL),
    "starcoder2": ("Starcoder2", SMALL),
    "stablelm": ("StableLm", SMALL),
    "olmo2": ("Olmo2", SMALL),
    "granite": ("Granite", SMALL),
    "smollm3": ("SmolLM3", SMALL),
    "command-r": ("Cohere", SMALL | {"use_qk_norm": False}),
}


@pytest.mark.parametrize("architecture", MODELS)
def test_names_lead_back_to_the_original(architecture: str) -> None:
    """Each parameter of a transformers model, called as the converter calls it, gets its own name and shape back."""
    name, options = MODELS[architecture]
    config = getattr(transformers, f"{name}Config")(**options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    original = {n: tuple(p.shape) for n, p in model.named_parameters()}
    if architecture == "gptneox":  # the name in checkpoints on disk
        original["embed_out.weight"] = original.pop("lm_head.weight")
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture)
    table = gguf.get_tensor_name_map(arch, 2)
    naming = ARCHITECTURES[architecture].naming
    entries = {}
    for parameter, shape in original.items():
        called = table.get_name(parameter, try_suffixes=(".weight", ".bias"))
        assert called is not None, parameter
        module = called.split(".")[-2]
        entries[called] = _entry(tuple(reversed(shape)) if module in naming.transposed else shape)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert {n: p.shape for n, p in places(entries, naming, heads).items()} == original


def _entry(shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(KINDS[0], shape, 0, 0)


def test_experts_that_the_file_stacks_are_tensors_of_their_own() -> None:
    naming = ARCHITECTURES["qwen2moe"].naming
    entries = {
        "blk.1.ffn_up_exps.weight": _entry((3, 48, 32)),
        "blk.1.ffn_gate_inp.weight": _entry((3, 32)),
        "blk.1.ffn_gate_inp_shexp.weight": _entry((32,)),
        "blk.1.something_new.weight": _entry((32,)),
        "rope_freqs.weight": _entry((4,)),
    }
    found = places(entries, naming, {})
    assert {name: (place.shape, place.index) for name, place in found.items()} == {
        **{f"model.layers.1.mlp.experts.{e}.up_proj.weight": ((48, 32), e) for e in range(3)},
        "model.layers.1.mlp.gate.weight": ((3, 32), None),
        "model.layers.1.mlp.shared_expert_gate.weight": ((1, 32), None),
        "blk.1.something_new.weight": ((32,), None),
    }


def test_reordered_rows_come_back() -> None:
    weight = torch.arange(4 * 8 * 3).reshape(32, 3).numpy()
    assert (_unturned(4)(turned(weight, 4)) == weight).all()
    heads = weight[:24].reshape(2, 3, 4, 3)  # each head's query, key and value
    stacked = heads.swapaxes(0, 1).reshape(24, 3)
    assert (_grouped(2, 2)(stacked) == weight[:24]).all()
    groups = weight.reshape(2, 4, 4, 3)  # two heads of queries, a key and a value each
    flat = [groups[:, :2], groups[:, 2], groups[:, 3]]
    stacked = np.concatenate([part.reshape(-1, 3) for part in flat])
    assert (_grouped(4, 2)(stacked) == weight).all()
