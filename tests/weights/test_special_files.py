"""A model directory may hold anything. Pipes, devices and files without end are refused at once, by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.errors import ModelError
from quire.files import map_file, open_regular, read_bytes, read_json, read_text
from quire.text.tokenizer import Tokenizer
from tests.models import inspect_model
from tests.tiny import write_checkpoint

FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_zeros, Path.mkdir])
@pytest.mark.parametrize("name", FILES)
def test_a_model_is_made_of_regular_files(name: str, make: object, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    if name.endswith(".index.json"):
        (directory / "model.safetensors").unlink()
    (directory / name).unlink(missing_ok=True)
    assert callable(make)
    make(directory / name)
    with pytest.raises(ModelError, match=f"{name}: cannot be read: .*(not a regular file|directory)"):
        inspect_model(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_so_is_a_tokenizer(name: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    (directory / name).unlink(missing_ok=True)
    make_pipe(directory / name)
    with pytest.raises(ModelError, match="not a regular file"):
        Tokenizer.load(directory)


def test_sizes_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert read_json(path, most=8) == {"a": 1}
    with pytest.raises(ModelError, match="larger than 7 bytes"):
        read_bytes(path, 7)
    with pytest.raises(ModelError, match="8 bytes are too few"):
        map_file(path, least=9)
    path.write_bytes(b"\xff")
    with pytest.raises(ModelError, match="not UTF-8"):
        read_text(path, 10)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", "a" * 5000])
def test_names_that_no_file_has(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        open_regular(tmp_path / name)
