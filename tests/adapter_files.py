"""Random adapters of any model with float weights, in PEFT's layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from quire.model.families import read_model

PREFIX = "base_model.model."
LINEAR = re.compile(r".*\.(layers|h|blocks)\.\d+\..*")


def write_adapter(
    folder: Path,
    model: str | Path,
    seed: int,
    rank: int = 4,
    only: str = "",
    dora: bool = False,
    tables: bool = False,
    **config: Any,
) -> str:
    """An adapter of every matrix in the layers whose name `only` matches; returns its directory.

    `dora` adds magnitudes, `tables` changes embedding, head and first norm too.
    """
    rng, tensors = np.random.default_rng(seed), {}
    _, names = read_model(json.loads((Path(model) / "config.json").read_text()))
    with safe_open(Path(model) / "model.safetensors", "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or not LINEAR.fullmatch(name) or not re.search(only, name):
            continue
        out, width = reversed(shape) if names.transposed else shape
        add(tensors, f"{PREFIX}{module}", rng, out, width, rank)
        if dora:
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = normal(rng, out) * 0.1 + 1
    if tables:
        rows, width = shapes[f"{names['embedding']}.weight"]
        tensors[f"{PREFIX}{names['embedding']}.lora_embedding_A"] = normal(rng, rank, rows) * 0.3
        tensors[f"{PREFIX}{names['embedding']}.lora_embedding_B"] = normal(rng, width, rank) * 0.3
        add(tensors, f"{PREFIX}{names['head']}", rng, rows, width, rank)
        tensors[f"{PREFIX}{names['norm']}.weight"] = normal(rng, width) * 0.2 + 1
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "use_dora": dora, **config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def change_tensors(folder: Path, change: Callable[[str, np.ndarray], tuple[str, np.ndarray]]) -> None:
    """Rewrite an adapter's tensors by other names or with other values."""
    path = folder / "adapter_model.safetensors"
    changed = dict(change(*item) for item in load_file(path).items())
    save_file({name: np.ascontiguousarray(values) for name, values in changed.items()}, path)


def add(
    tensors: dict[str, np.ndarray], module: str, rng: np.random.Generator, out: int, width: int, rank: int
) -> None:
    tensors[f"{module}.lora_A.weight"] = normal(rng, rank, width) * np.float32(width**-0.5)
    tensors[f"{module}.lora_B.weight"] = normal(rng, out, rank) * np.float32(0.3)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)
