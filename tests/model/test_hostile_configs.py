"""Configs made to hang or crash a reader: each is a ModelError that names the field, at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from quire.devices.cpu.backend import NativeBackend
from quire.errors import ModelError
from quire.model.families import read_model
from quire.model.outline import ConfigFiles
from quire.text.tokenizer import Tokenizer
from tests.models import inspect_model
from tests.tiny import CHOOSING, CONFIG, FAMILIES, INDEXED, OTHERS, RECURRENT, STREAMS, write_checkpoint

BIG, HUGE = 2**31 - 1, 1e400
YARN = {"type": "yarn", "original_max_position_embeddings": 64}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"num_experts": BIG}, "num_experts must be"),
    ("qwen3_moe", {"num_experts": 2**14, "moe_intermediate_size": 2**12}, "num_experts x their width"),
    ("qwen3_moe", {"num_experts": 2**16, "decoder_sparse_step": 1}, "experts in all layers"),
    ("llama", {"num_attention_heads": 2**10, "head_dim": 2**14}, "num_heads x head_dim"),
    ("llama", {"num_hidden_layers": 1024, "intermediate_size": 2**20}, "1024 layers x their width"),
    ("qwen3_moe", {"num_experts": 2**40}, "num_experts must be"),
    ("qwen3_moe", {"moe_intermediate_size": BIG}, "intermediate_size must be"),
    ("llama", {"architectures": [[0]]}, "architectures"),
    ("llama", {"architectures": [{}]}, "architectures"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
    ("llama", {"hidden_act": {"silu": 1}}, "hidden_act"),
    ("gpt2", {"activation_function": [[0]]}, "activation_function"),
    ("gemma2", {"hidden_activation": {}}, "hidden_act"),
    ("deepseek_v3", {"routed_scaling_factor": HUGE}, "routed_scaling_factor"),
    ("deepseek_v3", {"q_lora_rank": BIG}, "q_rank"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "rope_dim must be even"),
    ("stablelm", {"partial_rotary_factor": float("nan")}, "partial_rotary_factor"),
    ("stablelm", {"partial_rotary_factor": 1e308}, "partial_rotary_factor"),
    ("stablelm", {"partial_rotary_factor": 1e29}, "partial_rotary_factor"),
    ("llama", {"rope_scaling": YARN | {"factor": 1e308}}, "factor"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 1e-308}}, "factor"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 1e-9}}, "factor"),
    ("llama", {"rope_scaling": YARN | {"factor": 2.0, "beta_fast": 1e308}}, "beta_fast"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be greater than 0"),
    ("llama", {"hidden_size": BIG}, "hidden_size must be"),
    ("llama", {"vocab_size": BIG}, "vocab_size must be"),
    ("llama", {"num_attention_heads": 2**28 + 4, "num_key_value_heads": 4}, "num_heads must be"),
    ("llama", {"intermediate_size": BIG}, "intermediate_size must be"),
    ("llama", {"head_dim": BIG - 1}, "head_dim must be"),
    ("opt", {"max_position_embeddings": BIG}, "positions"),
    ("gpt_neo", {"attention_types": 7}, "attention_types"),
    ("gpt_neo", {"attention_types": [[["global"], [1]]]}, "attention_types"),
    ("gpt_neo", {"attention_types": [[["global"] * 3, 2**40]]}, "attention_types"),
]

SCANS: dict[str, dict[str, Any]] = {
    "Mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 10},
    "Mamba": {"hidden_size": 64, "state_size": 10},
    "NemotronH": {"hidden_size": 64, "num_attention_heads": 4, "mamba_num_heads": 8, "intermediate_size": 64},
}


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("Mamba2", {"state_size": BIG}, "state_dim must be"),
        (
            "Mamba2",
            {"n_groups": 2**15, "num_heads": 2**15, "head_dim": 1, "expand": 2**9},
            "num_heads must be",
        ),
        (
            "Mamba2",
            {"n_groups": 64, "num_heads": 64, "head_dim": 1, "expand": 1, "state_size": 2**16},
            "groups' states must",
        ),
        (
            "Mamba2",
            {"hidden_size": 2**20, "expand": 2**4, "num_heads": 2**10, "head_dim": 2**14},
            "num_heads x",
        ),
        ("Mamba2", {"state_size": 2**14, "head_dim": 2**14, "expand": 2**11}, "states of .* elements"),
        ("Mamba", {"state_size": BIG}, "state_dim must be"),
        ("Mamba", {"expand": 2**20}, "inner must be"),
        ("Mamba", {"expand": 2**10, "state_size": 2**8}, "channels x state_dim"),
        ("NemotronH", {"hybrid_override_pattern": ["M", [1]]}, "hybrid_override_pattern must be"),
        ("NemotronH", {"layers_block_type": ["mamba", {}, "mamba"]}, "layers_block_type must be"),
        ("Mamba", {"num_hidden_layers": 1024, "expand": 2**10, "state_size": 2**6}, "states of .* elements"),
    ],
)
def test_scans_and_patterns_have_bounds(
    name: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    common = {"architectures": [f"{name}ForCausalLM"], "vocab_size": 64, "num_hidden_layers": 2}
    path.write_text(json.dumps({**common, **SCANS[name], **changes}))
    with pytest.raises(ModelError, match=f"config.json.*{field}"):
        ConfigFiles(path).outline(NativeBackend(threads=1).outline())


def test_a_plan_without_groups_is_refused_by_name() -> None:
    """As an engine directory could have it."""
    common = {"architectures": ["Mamba2ForCausalLM"], "vocab_size": 64, "num_hidden_layers": 1}
    spec, _ = read_model({**common, **SCANS["Mamba2"]})
    mixer = msgspec.structs.replace(cast(Any, spec.layers[0].mixer), groups=0)
    layer = msgspec.structs.replace(spec.layers[0], mixer=mixer)
    with pytest.raises(ModelError, match="groups must be"):
        msgspec.structs.replace(spec, layers=(layer,)).check("here")


@pytest.mark.parametrize(("family", "changes", "field"), CASES)
def test_hostile_values_are_refused_by_name(
    family: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    values = {**CONFIG, **(FAMILIES | OTHERS)[family], **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    with pytest.raises(ModelError, match=f"config.json.*{field}"):
        ConfigFiles(path).outline(NativeBackend(threads=1).outline())


OWN = {**INDEXED, **STREAMS, **CHOOSING, **RECURRENT}


def broken(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same fields, each whole number or list in turn of another size or kind; sections too."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ({**values, key: inner} for inner in broken(value))
        elif isinstance(value, list):
            count = len(value)
            for bad in ([], value[:-1], value * 2, [-1] * count, ["x"] * count, [10**9] * count, 3):
                yield {**values, key: bad}
        elif type(value) is int:
            yield from ({**values, key: bad} for bad in (0, -1, 1 << 70, "x", [value]))


@pytest.mark.parametrize("family", OWN)
def test_counts_and_lists_that_disagree_are_read_or_refused(family: str, tmp_path: Path) -> None:
    """Fields of recurrences and indexers: a reader never ends in another way, and its refusal is one line."""
    path, outline, said = tmp_path / "config.json", NativeBackend(threads=1).outline(), list[str]()
    for own in broken({key: value for key, value in OWN[family].items() if key != "architectures"}):
        values = {**CONFIG, "architectures": OWN[family]["architectures"], **own}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
        try:
            ConfigFiles(path).outline(outline)
        except ModelError as error:
            said.append(str(error))
    assert len(said) > 10
    assert all(len(text) < 400 and "\n" not in text for text in said)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800", "../x", "a/b", "..", ""])
def test_an_index_names_files_beside_it(name: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ModelError, match="weight_map must name files beside it"):
        inspect_model(directory)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("tokenizer_config.json", {"additional_special_tokens": 5}, "additional_special_tokens"),
        ("tokenizer_config.json", {"additional_special_tokens": "abc"}, "additional_special_tokens"),
        ("tokenizer_config.json", {"extra_special_tokens": {"a": 5}}, "additional_special_tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": "x"}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"\u00b2": {"content": "x"}}}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"bos_token": [1]}, "bos_token"),
        ("tokenizer_config.json", {"bos_token": "\ud800"}, "bos_token"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "\ud800"}}}, "added_tokens_decoder"),
        ("tokenizer.json", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "tokenizer.json"),
        # This table is found broken only when a text is normalized.
        (
            "tokenizer.json",
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9hYg=="}},
            "tokenizer.json",
        ),
    ],
)  # fmt: skip
def test_tokenizers_too(name: str, changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    path = directory / name
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **changes}))
    with pytest.raises(ModelError, match=field):
        Tokenizer.load(directory)
