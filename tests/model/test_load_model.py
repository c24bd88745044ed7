"""Model directories that are incomplete or contradict themselves are refused with the tensor or file at fault."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from quire.devices.cpu.backend import NativeBackend
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import ModelError, UnknownArchitectureError
from quire.model.info import Reading
from tests.model.tiny_models import Session, make_model
from tests.models import inspect_model, load_model

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    make_model("llama-mha-tied").save_pretrained(directory)
    return directory


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit_tensors(directory: Path, change: Callable[[State], Any]) -> None:
    path = directory / "model.safetensors"
    state = safetensors.torch.load(path.read_bytes())
    change(state)
    safetensors.torch.save_file(state, path)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(directory: Path) -> Any:
    return load_model(directory, ReferenceBackend())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.norm.weight"), r"missing tensor model\.norm\.weight"),
        (
            lambda s: [s.pop(name) for name in list(s) if ".2." in name],
            r"missing tensors model\.layers\.2\..* and 4 more",
        ),
        (lambda s: s.update({"extra.weight": torch.ones(1)}), r"unexpected tensor extra\.weight"),
        (
            lambda s: s.update({"model.layers.3.mlp.up_proj.weight": torch.ones(1)}),
            r"unexpected tensor model\.layers\.3",
        ),
        (
            lambda s: s.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}),
            r"unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias",
        ),
        (lambda s: s.update({"model.norm.weight": torch.ones(47)}), r"model\.norm\.weight is \[47\].*\[48\]"),
        (lambda s: s.update({"model.norm.weight": torch.ones(1, 48)}), r"is \[1, 48\].*\[48\]"),
        (lambda s: s.update({"model.norm.weight": torch.ones(48).int()}), "is int32; supported are float32"),
        (
            lambda s: s.update({"lm_head.weight": torch.ones(97, 48)}),
            "tie_word_embeddings is true but lm_head",
        ),
        (lambda s: s.update({"lm_head.weight": torch.ones(96, 48)}), r"lm_head\.weight is \[96, 48\]"),
    ],
)
def test_tensors_must_match_the_config(directory: Path, change: Any, message: str) -> None:
    edit_tensors(directory, change)
    with pytest.raises(ModelError, match=message):
        load(directory)


def test_untied_config_needs_its_head(directory: Path) -> None:
    edit_json(directory / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"missing tensor lm_head\.weight"):
        load(directory)


def test_computed_buffers_and_an_equal_tied_head_are_ignored(directory: Path) -> None:
    before = Session(load(directory), ReferenceBackend()).feed([1, 5, 9])

    def add(state: State) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
        state["model.rotary_emb.inv_freq"] = torch.ones(6)

    edit_tensors(directory, add)
    np.testing.assert_array_equal(Session(load(directory), ReferenceBackend()).feed([1, 5, 9]), before)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "config.json").unlink(), r"no config\.json"),
        (lambda d: (d / "config.json").write_text("{"), r"config\.json: cannot be read as JSON"),
        (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), r"config\.json: cannot be read as JSON"),
        (lambda d: (d / "config.json").write_text("[]"), r"config\.json: not a JSON object"),
        (
            lambda d: (d / "generation_config.json").write_text("no"),
            r"generation_config\.json: cannot be read",
        ),
        (lambda d: (d / "model.safetensors").unlink(), "no weights found; looked for model.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "too few"),
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
            "truncated",
        ),
        (lambda d: edit_json(d / "config.json", eos_token_id="x"), "eos_token_id must be a token id"),
    ],
)
def test_missing_and_damaged_files(directory: Path, damage: Any, message: str) -> None:
    if "eos" in message:
        (directory / "generation_config.json").unlink()
    damage(directory)
    for attempt in (load, inspect_model):
        with pytest.raises(ModelError, match=message):
            attempt(directory)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    return tmp_path / "sharded"


def test_shards_must_match_their_index(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    weight_map = whole["weight_map"]
    files = sorted(set(weight_map.values()))
    norm = weight_map["model.norm.weight"]

    def refuse(message: str, **changes: Any) -> None:
        index.write_text(json.dumps(whole | changes))
        with pytest.raises(ModelError, match=message):
            load(sharded)

    wrong = next(file for file in files if file != norm)
    refuse("should be in", weight_map=weight_map | {"model.norm.weight": wrong})
    refuse("name files beside it", weight_map=weight_map | {"model.norm.weight": "../x.safetensors"})
    refuse("name files beside it", weight_map=weight_map | {"model.norm.weight": 3})
    refuse("has no weight_map", weight_map={})
    refuse("cannot be read: No such file", weight_map=weight_map | {"model.norm.weight": "absent"})
    index.write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load(sharded)
    index.write_text(json.dumps(whole))
    (sharded / files[1]).unlink()
    with pytest.raises(ModelError, match=files[1]):
        load(sharded)


def test_the_index_decides_which_copy_of_a_tensor_counts(sharded: Path) -> None:
    tokens, index = [1, 5, 9], sharded / "model.safetensors.index.json"
    before = Session(load(sharded), ReferenceBackend()).feed(tokens)
    weight_map = json.loads(index.read_text())["weight_map"]
    norm = "model.norm.weight"
    other = sharded / next(file for file in weight_map.values() if file != weight_map[norm])
    safetensors.torch.save_file(safetensors.torch.load_file(other) | {norm: torch.full((48,), 7.0)}, other)
    np.testing.assert_array_equal(Session(load(sharded), ReferenceBackend()).feed(tokens), before)
    index.unlink()
    with pytest.raises(ModelError, match=r"model\.norm\.weight is also in"):
        load(sharded)


def test_shards_without_an_index_are_found_by_their_numbers(sharded: Path) -> None:
    before = Session(load(sharded), ReferenceBackend()).feed([1, 5, 9])
    (sharded / "model.safetensors.index.json").unlink()
    np.testing.assert_array_equal(Session(load(sharded), ReferenceBackend()).feed([1, 5, 9]), before)
    sorted(sharded.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ModelError, match="and number 2 is not"):
        load(sharded)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.bias", "lm_head.bias", "model.unused"])
def test_tensors_that_hold_nothing_are_no_surplus(directory: Path, name: str) -> None:
    """Biases of zeros, as GPTQ's tools wrote them for all modules, and empty tensors."""
    before = Session(load(directory), ReferenceBackend()).feed([1, 5, 9])
    edit_tensors(directory, lambda s: s.update({name: torch.zeros(3 if name.endswith("bias") else 0)}))
    np.testing.assert_array_equal(Session(load(directory), ReferenceBackend()).feed([1, 5, 9]), before)


def test_numbers_of_64_bits_and_a_tied_head_of_another_type_are_read(directory: Path) -> None:
    edit_tensors(directory, lambda s: s.update({k: v.bfloat16().float() for k, v in s.items()}))
    before = Session(load(directory), ReferenceBackend()).feed([1, 5, 9])

    def widen(state: State) -> None:
        state.update({name: tensor.double() for name, tensor in state.items()})
        state["lm_head.weight"] = state["model.embed_tokens.weight"].bfloat16()

    edit_tensors(directory, widen)
    np.testing.assert_array_equal(Session(load(directory), ReferenceBackend()).feed([1, 5, 9]), before)
    edit_tensors(directory, lambda s: s["lm_head.weight"].__setitem__((5, 5), 9))
    with pytest.raises(ModelError, match="tie_word_embeddings is true but lm_head"):
        load(directory)


def test_a_greedy_step_reads_the_screen_of_a_tied_head(original: Path) -> None:
    model = load_model(original, NativeBackend(1))
    head = model.decoder.weights["head"]
    assert head is model.decoder.table
    assert 0 < head.greedy_nbytes < head.nbytes
    assert model.weight_bytes - model.cost.step_bytes() == head.nbytes - head.greedy_nbytes
    plain = load_model(original, NativeBackend(1, screened=False))
    assert plain.weight_bytes == plain.cost.step_bytes()


def test_generation_defaults_and_eos(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = directory / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [7, 8], "temperature": 0.6}))
    info = inspect_model(directory)
    assert info.eos_token_ids == (7, 8, 2)
    assert info.generation["temperature"] == 0.6
    path.write_text(json.dumps({"eos_token_id": [10**6, 7]}))
    assert inspect_model(directory).eos_token_ids == (7, 2)  # the first has no row in the model
    assert f"{path}: eos_token_id 1000000 is beyond" in caplog.text
    path.unlink()
    assert inspect_model(directory).eos_token_ids == (2,)
    assert inspect_model(directory).generation == {}


def test_unknown_dtype_is_refused(directory: Path) -> None:
    with pytest.raises(ModelError, match="dtype must be auto, float32, float16 or bfloat16, got 'int4'"):
        inspect_model(directory, "int4")  # type: ignore[arg-type]


def test_loading_a_directory_imports_no_torch_and_no_http_client(directory: Path) -> None:
    code = (
        "import sys; from tests.models import load_model;"
        "from quire.devices.reference.backend import ReferenceBackend;"
        f"load_model({str(directory)!r}, ReferenceBackend());"
        "print(*{'torch', 'transformers', 'httpx', 'requests', 'huggingface_hub.hf_api'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_a_class_of_its_own_name_is_offered_as_the_one_it_equals(directory: Path) -> None:
    edit_json(directory / "config.json", architectures=["OurTunedForCausalLM"])
    with pytest.raises(
        UnknownArchitectureError, match="look like those of llama: `--architecture llama` loads"
    ):
        load(directory)
    for name in ("llama", "LlamaForCausalLM"):
        loaded = load_model(directory, ReferenceBackend(), reading=Reading(architecture=name))
        assert loaded.spec.architecture == "LlamaForCausalLM"
    with pytest.raises(ModelError, match=r"--architecture lama is not a class.* did you mean llama"):
        load_model(directory, ReferenceBackend(), reading=Reading(architecture="lama"))


def test_what_equals_no_family_is_offered_as_none(directory: Path) -> None:
    edit_json(directory / "config.json", architectures=["OurTunedForCausalLM"], our_own_switch=True)
    with pytest.raises(UnknownArchitectureError) as refused:
        load(directory)
    assert "--architecture" not in str(refused.value)
