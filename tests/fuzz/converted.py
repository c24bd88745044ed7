"""Fuzzes converted checkpoints: descriptions and parts that do not fit each other, as far as the packed weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from quire.cli import main
from quire.config import EngineConfig
from quire.convert import convert_checkpoint
from quire.devices.cpu.backend import NativeBackend
from tests.engine_files import rewrite, rewrite_weights
from tests.fuzz.mutate import mutate_json
from tests.models import load_model
from tests.tiny import write_checkpoint

FAMILIES = ("llama", "qwen2_moe", "deepseek_v3", "bloom")


def spoil_manifest(rng: Random, manifest: dict[str, Any]) -> None:
    """Change a part of the description, or that of one tensor."""
    tensor = rng.choice(list(manifest["tensors"].values()))
    parts = (manifest, manifest["spec"], manifest["names"], manifest["tensors"], tensor, tensor["about"])
    part = rng.choice(parts)
    part.update(mutate_json(rng, part))


def spoil_weights(rng: Random, data: bytearray, manifest: dict[str, Any]) -> None:
    """Overwrite some bytes of one tensor or of all, or cut the file off."""
    if rng.random() < 0.1:
        del data[rng.randrange(1, len(data)) :]
        return
    tensor = rng.choice(list(manifest["tensors"].values()))
    for _ in range(rng.randint(1, 3)):
        begin = tensor["offset"] + rng.randrange(max(tensor["nbytes"], 1))
        count = min(rng.choice((1, 4, 64, tensor["nbytes"])), tensor["offset"] + tensor["nbytes"] - begin)
        data[begin : begin + count] = (
            bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))]) * count
        )


def fuzz_converted(folder: Path) -> Callable[[Random], None]:
    models = [write_checkpoint(folder / f"{name}-model", name, num_hidden_layers=2) for name in FAMILIES]
    models.append(folder / "quantized-model")
    main(["quantize", str(models[0]), "-o", str(models[-1]), "--method", "rtn", "--group-size", "16"])
    for model in models:
        config = EngineConfig.from_options(model=str(model))
        convert_checkpoint(config, folder / model.name.removesuffix("-model"))
    sound = [folder / model.name.removesuffix("-model") for model in models]
    place, backend = folder / "converted", NativeBackend(threads=1)

    def case(rng: Random) -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(rng.choice(sound), place)
        if rng.random() < 0.6:
            rewrite(place, partial(spoil_manifest, rng))
        else:
            rewrite_weights(place, partial(spoil_weights, rng))
        load_model(place, backend)

    return case
