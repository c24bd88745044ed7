"""A file of an adapter lists no more tensors than its base can have."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from quire import LLM
from quire.client.adapters import LoRARequest
from quire.errors import ModelError, QuireError
from quire.lora.reader import most_tensors
from quire.model.families import read_model
from quire.weights.adapter import open_adapter
from quire.weights.checkpoint.safetensors import SafetensorsFile
from quire.weights.checkpoint.torch_pickle import TorchFile
from tests.adapter_files import write_adapter
from tests.tiny import write_checkpoint


def bound(model: Path) -> int:
    spec, names = read_model(json.loads((model / "config.json").read_text()))
    return most_tensors(cast(Any, SimpleNamespace(decoder=SimpleNamespace(config=spec), names=names)))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_the_largest_adapter_of_a_base_is_read(tmp_path: Path, family: str) -> None:
    """It changes every matrix with a magnitude, embedding, head and norm: the bound is twice that, and more."""
    model = write_checkpoint(tmp_path / "model", family)
    folder = Path(write_adapter(tmp_path / "adapter", model, 0, dora=True))
    tensors = len(load_file(folder / "adapter_model.safetensors"))
    assert 2 * tensors <= bound(model) <= 50 * tensors
    assert open_adapter(folder, 8, bound(model)).modules


def names(count: int) -> list[str]:
    return [f"base_model.model.model.layers.{i}.mlp.up_proj.lora_A.weight" for i in range(count)]


def test_more_tensors_are_refused_in_every_format(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    save_file({name: np.zeros(1, np.float32) for name in names(41)}, path)
    assert len(list(SafetensorsFile(path, 41).names())) == 41
    with pytest.raises(ModelError, match=r"many\.safetensors: the header lists 41 tensors .* at most 40"):
        SafetensorsFile(path, 40)
    for archive in (True, False):
        path = tmp_path / f"many-{archive}.bin"
        tensors = {name: torch.zeros(1) for name in names(41)}
        torch.save(tensors, path, _use_new_zipfile_serialization=archive)
        assert len(list(TorchFile(path, 41).names())) == 41
        with pytest.raises(ModelError, match="holds 41 tensors; at most 40"):
            TorchFile(path, 40)


def test_long_headers_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    """Keys that are written with escapes are not counted; nor are operations of a pickle that make no tensor."""
    path = tmp_path / "escaped.safetensors"
    entry = b'"%d":{"dtype":"F32","shape":[0],"data\\u005foffsets":[0,0]}'
    header = b"{" + b",".join(entry % i for i in range(30_000)) + b"}"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert len(list(SafetensorsFile(path).names())) == 30_000
    with pytest.raises(ModelError, match=rf"in {len(header)} bytes; at most 40$"):
        SafetensorsFile(path, 40)

    path = tmp_path / "busy.bin"
    torch.save({"a": torch.zeros(1), "b": [0] * 20_000}, path)
    with pytest.raises(ModelError, match="more than 10400 operations"):
        TorchFile(path, 40)

    path = tmp_path / "members.bin"
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(1_000):
            archive.writestr(f"archive/data/{i}", b"")
    with pytest.raises(ModelError, match="lists its members in"):
        TorchFile(path, 40)


def test_an_engine_asks_for_no_more_than_its_model_has(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    folder = Path(write_adapter(tmp_path / "adapter", model, 0))
    most = bound(model)
    tensors = {name: np.zeros((4, 4), np.float32) for name in names(most + 1)}
    save_file(tensors, folder / "adapter_model.safetensors")
    llm = LLM(str(model), enable_lora=True, threads=1, max_model_len=64)
    with pytest.raises(QuireError, match=f"at most {most}"):
        llm.generate(["Once"], lora_request=LoRARequest("many", 1, str(folder)), use_tqdm=False)
