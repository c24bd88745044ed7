"""Drafters' configs and tensors of other types and shapes: each is a ModelError that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.config import ModelConfig, SpeculativeOptions
from quire.devices.reference.backend import ReferenceBackend
from quire.engine.directory import model_directory, verifier_of
from quire.errors import ModelError, QuireError
from quire.spec_decode.make import detect, find_drafter
from tests.drafter_files import write_eagle3
from tests.fuzz.mutate import mutate_json
from tests.models import load_model
from tests.tiny import write_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(
        write_checkpoint(tmp_path_factory.mktemp("target"), "llama", "float32"), ReferenceBackend()
    )


def read(folder: Path, target: Any) -> Any:
    drafter = find_drafter(SpeculativeOptions(model=str(folder)))
    assert drafter is not None
    return drafter.head(ReferenceBackend(), target, outline=False)


@pytest.mark.parametrize("key", ["eagle_aux_hidden_state_layer_ids", "architectures", "model_type", "fc_norm",
                                 "speculators_model_type", "speculators_config", "eagle_config",
                                 "transformer_layer_config"])  # fmt: skip
@pytest.mark.parametrize("value", [5, "x", [], [[1]], [5.5], {}, {"a": 1}, True, None, -3, 1 << 70, ["x"]])
def test_keys_of_other_types_are_refused(key: str, value: Any, target: Any, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, target.spec)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    for attempt in (lambda: detect(folder), lambda: verifier_of(folder), lambda: read(folder, target)):
        try:
            attempt()
        except QuireError as error:
            assert str(folder) in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "value",
    [5, {"proposal_methods": 5}, {"proposal_methods": ["x"]}, {"verifier": 5}, {"verifier": {"name_or_path": 5}},
     {"proposal_methods": [{"speculative_tokens": "4"}]}],
)  # fmt: skip
def test_the_library_s_section_is_typed(value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"speculators_config": value}))
    for attempt in (lambda: verifier_of(tmp_path), lambda: model_directory(ModelConfig(model=str(tmp_path)))):
        with pytest.raises(ModelError, match=r"config\.json: Expected"):
            attempt()


def test_a_sound_drafter_is_read_and_each_missing_tensor_is_named(target: Any, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, target.spec)
    read(folder, target)
    path = folder / "model.safetensors"
    whole = load_file(path)
    for name, values in whole.items():
        for changed in (None, np.float32(1), values[:-1], values[None], values[..., :0]):
            save_file({**whole, name: np.array(changed)} if changed is not None else
                      {k: v for k, v in whole.items() if k != name}, path)  # fmt: skip
            with pytest.raises(ModelError) as error:
                read(folder, target)
            assert name in str(error.value) or (name == "lm_head.weight" and "d2t" in str(error.value))


def test_mutated_configs_never_end_in_another_error(target: Any, tmp_path: Path) -> None:
    folder, rng = write_eagle3(tmp_path, target.spec), Random(0)
    path = folder / "config.json"
    sound = json.loads(path.read_text())
    for _ in range(300):
        path.write_text(json.dumps(mutate_json(rng, sound)))
        try:
            detect(folder)
            read(folder, target)
        except QuireError:
            pass
