"""Sizes from a config alone: those of the checkpoint, or an error that names what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.devices.cpu.backend import NativeBackend
from quire.errors import ModelError
from quire.model.cost import matrices
from quire.model.load import open_files
from quire.model.outline import ConfigFiles
from quire.model.tensors import LayerTensors
from quire.weights.layouts import Blocks
from quire.weights.readers import planned
from quire.weights.readers.planned import PlannedCheckpoint, Rules
from tests.shared import DATA, cases_of, require
from tests.tiny import CONFIG, FAMILIES
from tests.weights.test_quantized_checkpoints import FOLDERS, QUANTIZED

# Methods that say nothing of sizes in their config, and a folder whose config and tensors differ.
UNPLANNED = ("torchao",)


@pytest.mark.parametrize("folder", cases_of(QUANTIZED, FOLDERS), ids=lambda path: path.name)
def test_a_config_gives_the_size_of_its_checkpoint(folder: Path) -> None:
    outline = NativeBackend(threads=1).outline()
    wanted = open_files(folder).outline(outline).weight_bytes
    if folder.name.startswith(UNPLANNED):
        with pytest.raises(ModelError, match="not planned from a config alone"):
            ConfigFiles(folder / "config.json").outline(outline)
        return
    if folder.name.startswith("autoround"):  # its config names bfloat16, and its tensors are float16
        return
    found = ConfigFiles(folder / "config.json").outline(outline).weight_bytes
    # Vectors of orders and factors, sparse parts, and rows of 64 columns, are known from the tensors alone.
    assert found == pytest.approx(wanted, rel=0.06 if "sparse" in folder.name else 0.03)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("Qwen--Qwen3-32B-FP8-Static-PerTensor", 8.0, 8.9),
        ("Qwen--Qwen3-30B-A3B-FP8", 8.2, 8.6),
        ("openai--gpt-oss-20b", 5.0, 5.6),
        ("nvidia--Gemma-4-31B-IT-NVFP4", 4.5, 9.0),
    ],
)
def test_published_configs_take_the_bits_of_their_format(name: str, least: float, most: float) -> None:
    path = require(DATA / "model-configs" / f"{name}_config.json")
    model = ConfigFiles(path).outline(NativeBackend(threads=1).outline())
    assert least < 8 * model.weight_bytes / model.info.num_parameters < most


def test_gpt_oss_takes_what_it_is_published_with() -> None:
    path = require(DATA / "model-configs" / "openai--gpt-oss-20b_config.json")
    assert ConfigFiles(path).outline(NativeBackend(threads=1).outline()).weight_bytes < 13 * 2**30


@pytest.mark.parametrize(
    ("module", "pattern", "right"),
    [
        ("model.layers.1.mlp.gate", "gate", True),
        ("model.layers.1.mlp.gate_proj", "gate", False),
        ("model.layers.10.mlp", "model.layers.1", False),
        ("model.layers.1.mlp.up_proj", "model.layers.1", True),
        ("model.layers.3.self_attn.q_proj", "model.layers.*.self_attn", True),
        ("model.layers.3.mlp.router", "re:.*router", True),
        ("lm_head", "head", False),
    ],
)
def test_rules_name_modules(module: str, pattern: str, right: bool) -> None:
    assert Rules([pattern]).match(module) == right


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("modelopt", {"quant_algo": "MIXED_PRECISION"}, "without quantized_layers"),
        ("modelopt", {"quant_algo": "NVFP4_SVD"}, "NVFP4_SVD"),
        ("fp8", {"expert_dtype": "fp3"}, "experts in 'fp3'"),
        ("fp8", {"moe_quant_algo": ["NVFP4"]}, "experts in ..NVFP4"),
        ("compressed-tensors", {}, "config_groups"),
        ("awq", {"bits": "four"}, "bits and group_size"),
        ("hqq", {}, "no nbits and group_size"),
        ("torchao", {}, "size of torchao weights"),
        ("bitsandbytes", {"bnb_4bit_quant_type": "fp3"}, "'fp3' is not planned"),
        ("quark", {"global_quant_config": {"weight": {"dtype": "int3"}}}, "dtype 'int3' are not planned"),
        ("fp8", {"ignored_layers": ["re:("]}, "not supported at"),
        ("fp8", {"ignored_layers": [7]}, "must be a list of texts"),
    ],
)
def test_what_is_not_planned_is_named(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        PlannedCheckpoint(Path("config.json"), method, settings, {"a.b.weight": (64, 128)})


def test_parents_and_modules_of_a_mixture_are_found() -> None:
    layers = {"m.0.experts": {"quant_algo": "NVFP4"}, "m.0.q_proj": {"quant_algo": "FP8"}}
    tensors = {f"m.0.{name}.weight": (64, 128) for name in ("experts.3.up_proj", "q_proj", "norm_proj")}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    planned = PlannedCheckpoint(Path("config.json"), "modelopt", settings, tensors)
    assert planned.layout("m.0.experts.3.up_proj.weight") == Blocks("nvfp4")
    assert planned.layout("m.0.q_proj.weight") == Blocks("e4m3")
    assert planned.layout("m.0.norm_proj.weight") is None


def test_hundreds_of_experts_are_outlined_once_and_those_in_other_layouts_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan takes the same time however many experts a layer has."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    skipped = [f"model.layers.1.block_sparse_moe.experts.{e}" for e in (3, 11)]
    config = {
        **sizes,
        **heads,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 300,
        "num_experts_per_tok": 2,
        "quantization_config": {"quant_method": "fp8", "ignored_layers": skipped},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    backend, made = NativeBackend(threads=1).outline(), []
    whole = type(backend).gated_matrix

    def counted(self: Any, *args: Any) -> Any:
        made.append(args)
        return whole(self, *args)

    monkeypatch.setattr(type(backend), "gated_matrix", counted)
    planned = ConfigFiles(tmp_path / "config.json").outline(backend)
    assert len(made) == 3
    path = "layers.{}.mixture.experts.{}.gate_up"
    first, second = (
        [matrices(planned.decoder.weights)[path.format(i, e)].nbytes for e in range(300)] for i in (0, 1)
    )
    assert len(set(first)) == 1
    assert [e for e, size in enumerate(second) if size != first[0]] == [3, 11]


def test_a_plan_finds_each_piece_and_each_group_s_layout_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mixture with tens of thousands of experts this is most of the work."""
    found: list[tuple[str, str]] = []
    layouts: list[int] = []
    part, scheme = LayerTensors.part, planned._scheme

    def counted(self: LayerTensors, path: str, shape: Any) -> Any:
        found.append((self.prefix, path))
        return part(self, path, shape)

    def counted_scheme(*given: Any) -> Any:
        layouts.append(given[2])
        return scheme(*given)

    monkeypatch.setattr(LayerTensors, "part", counted)
    monkeypatch.setattr(planned, "_scheme", counted_scheme)
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True, "strategy": "group"}
    config = {**CONFIG, **FAMILIES["qwen2_moe"], "num_experts": 40, "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }}  # fmt: skip
    config |= {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ConfigFiles(tmp_path / "config.json").outline(NativeBackend(1).outline())
    assert len(found) == len(set(found)) > 3 * 3 * 40
    assert len(layouts) == len(set(layouts))
