"""No loader makes a weight up: a checkpoint of any kind that lacks one tensor is refused, and the tensor is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.build import build_engine
from quire.config import EngineConfig
from quire.devices.cpu.backend import NativeBackend
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import ModelError
from quire.model.engine_dir import MANIFEST
from quire.model.load import open_files
from quire.weights.adapter import open_adapter
from quire.weights.checkpoint import open_checkpoint
from quire.weights.readers import load_reader
from quire.weights.readers.packed_modules import BFLOAT16
from tests.adapter_files import write_adapter
from tests.engine_files import rewrite
from tests.fuzz.quantized import SOUND
from tests.gguf_files import write_gguf
from tests.models import load_model
from tests.tiny import FAMILIES, OTHERS, write_checkpoint

# Fields that a format leaves out where they say nothing.
OPTIONAL = {"g_idx", "weight_zero_point", "pre_quant_scale", "zero", "_weight_zero_point"}


def without_each(path: Path) -> Iterator[str]:
    """Take one tensor after another out of a file."""
    whole = load_file(path)
    for name in whole:
        save_file({k: v for k, v in whole.items() if k != name}, path)
        yield name
    save_file(whole, path)


@pytest.mark.parametrize("family", sorted(FAMILIES | OTHERS)[::3])
def test_models(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    for name in without_each(tmp_path / "model.safetensors"):
        with pytest.raises(ModelError) as error:
            load_model(tmp_path, ReferenceBackend())
        assert name in str(error.value)
    load_model(tmp_path, ReferenceBackend())


def test_gguf_files(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "llama")
    path = tmp_path / "model.gguf"
    for name in without_each(directory / "model.safetensors"):
        if name == "lm_head.weight":
            continue  # a GGUF file without a head has a tied one
        write_gguf(directory, path)
        with pytest.raises(ModelError, match=r"missing|no matrix"):
            load_model(path, ReferenceBackend())
    write_gguf(directory, path)
    load_model(path, ReferenceBackend())


@pytest.mark.parametrize("number", range(len(SOUND)))
def test_fields_of_quantized_weights(number: int, tmp_path: Path) -> None:
    method, settings, sound = SOUND[number]
    tensors = {name: np.array(value) for name, value in sound.items()}
    for name in tensors:
        if len(tensors) == 1 or name.partition(".")[2] in OPTIONAL:
            continue
        save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors")
        try:
            checkpoint = load_reader(method)(open_checkpoint(tmp_path), settings)
            found = [checkpoint.get(n) for n in checkpoint.names()]
        except ModelError as error:
            assert name.partition(".")[0] in str(error)  # noqa: PT017
            continue
        # What is left is no weight of a model: its type or its name has no place in one.
        kinds = {checkpoint.dtype(n) for n in checkpoint.names() if n in ("a", "a.weight")}
        assert not kinds & {np.dtype(k) for k in (np.float32, np.float16, BFLOAT16)}, name
        assert found or not tensors, name


@pytest.mark.parametrize("dora", [False, True])
def test_adapters(dora: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama")
    folder = Path(write_adapter(tmp_path / "adapter", model, 0, only=r"layers\.1", dora=dora))
    for name in without_each(folder / "adapter_model.safetensors"):
        with pytest.raises(ModelError) as error:
            open_adapter(folder, 8)
        module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        assert module in str(error.value)
        assert f"lora_{part.partition('.')[0]}" in str(error.value)
    open_adapter(folder, 8)


def test_heads_that_pool(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", architectures=["LlamaForSequenceClassification"], num_labels=3)
    path = tmp_path / "model.safetensors"
    tensors: dict[str, Any] = {k: v for k, v in load_file(path).items() if not k.startswith("lm_head")}
    tensors["score.weight"] = np.ones((3, tensors["model.norm.weight"].shape[0]), np.float32)
    save_file(tensors, path)
    for name in without_each(path):
        with pytest.raises(ModelError) as error:
            load_model(tmp_path, ReferenceBackend())
        assert name in str(error.value)
    load_model(tmp_path, ReferenceBackend())


def test_engine_directories(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama")
    engine = tmp_path / "engine"
    config = EngineConfig.from_options(model=str(model), backend="native", threads=1, max_model_len=64)
    build_engine(config, engine)
    whole = (engine / MANIFEST).read_text()
    for path in json.loads(whole)["engine"]["tensors"]:
        rewrite(engine, lambda about, path=path: about["tensors"].pop(path))  # type: ignore[misc]
        with pytest.raises(ModelError) as error:
            open_files(engine).load(NativeBackend(threads=1))
        assert path in str(error.value)
        (engine / MANIFEST).write_text(whole)
