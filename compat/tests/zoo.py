"""Local models under the names that the articles give, made of the model inside Quire's package."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # NumPy knows bfloat16 once it is imported
import numpy as np
from safetensors.numpy import load_file, save_file

from quire.engine.directory import ASSETS, SHIPPED_MODEL

STORIES = ASSETS / SHIPPED_MODEL
DRAFT = ASSETS / "quire-stories-draft"
POSITIONS = 8192


def copied(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with another config."""
    shutil.copytree(source, target)
    config = target / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}, indent=2))
    return target


def long(target: Path) -> Path:
    """The stories model with room for 8192 positions."""
    return copied(STORIES, target, max_position_embeddings=POSITIONS)


def divisible(target: Path) -> Path:
    """The same with each KV head twice, so that four ranks can divide it. It computes the same."""
    long(target)
    config = json.loads((target / "config.json").read_text())
    heads, width = config["num_key_value_heads"], config["head_dim"]
    repeats = config["num_attention_heads"] // heads
    weights = load_file(target / "model.safetensors")
    for name, values in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            split = values.reshape(heads, width, -1)
            weights[name] = np.repeat(split, repeats, axis=0).reshape(heads * repeats * width, -1)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps({**config, "num_key_value_heads": heads * repeats}))
    return target


def draft(target: Path) -> Path:
    """The small model that drafts for the stories model."""
    return copied(DRAFT, target, max_position_embeddings=POSITIONS)


def quantized(method: str) -> Callable[[Path], Path]:
    """The draft of the stories model, which is small, as a checkpoint quantized by AWQ or GPTQ."""

    def make(target: Path) -> Path:
        command = [sys.executable, "-m", "quire.cli", "quantize", str(DRAFT), "-o", str(target)]
        quick = ["--method", method, "--samples", "2", "--group-size", "32"]
        subprocess.run([*command, *quick], check=True, capture_output=True)
        return target

    return make


KINDS: Mapping[str, Callable[[Path], Path]] = {
    "long": long,
    "divisible": divisible,
    "draft": draft,
    "awq": quantized("awq"),
    "gptq": quantized("gptq"),
}
# The kind of model that stands for each name.
STANDS_FOR = {
    "facebook/opt-125m": "long",
    "meta-llama/Llama-2-7b-chat-hf": "long",
    "meta-llama/Llama-2-7b-hf": "long",
    "meta-llama/Llama-3.1-8B-Instruct": "long",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "long",
    "meta-llama/Llama-3.1-70B-Instruct": "long",
    "meta-llama/Meta-Llama-3.1-70B-Instruct": "divisible",
    "meta-llama/Llama-3.2-1B-Instruct": "draft",
    "/path/to/Llama-3.1-8B-Instruct": "long",
    "/path/to/Llama-3.1-70B-Instruct": "divisible",
    "TheBloke/Llama-2-7B-AWQ": "awq",
    "TheBloke/Llama-2-7B-GPTQ": "gptq",
}


@contextmanager
def locked(directory: Path, name: str = "lock") -> Iterator[None]:
    """Inside, no other process holds the lock of that name in the directory."""
    with (directory / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Zoo:
    """Makes each kind of model once, in a directory that processes may share."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def model(self, name: str) -> Path:
        """The directory of the model that stands for a name. KeyError for a name that none stands for."""
        kind = STANDS_FOR[name]
        target = self._root / kind
        with locked(self._root):
            if not target.exists():
                KINDS[kind](self._root / f"{kind}.new").rename(target)
        return target
