"""Fuzzes converted checkpoints: descriptions and parts that do not fit each other, as far as the packed weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from safetensors.numpy import load_file, save_file

from quire.cli import main
from quire.config import EngineConfig
from quire.convert import convert_checkpoint
from quire.devices.cpu.backend import NativeBackend
from quire.model.converted import MANIFEST, rank_file
from quire.model.load import load_model
from tests.fuzz.mutate import mutate_json
from tests.fuzz.quantized import spoil
from tests.tiny import write_checkpoint

FAMILIES = ("llama", "qwen2_moe", "deepseek_v3", "bloom")


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
            manifest = json.loads((place / MANIFEST).read_text())
            part = rng.choice((manifest, manifest["spec"], manifest["names"], manifest["layouts"]))
            part.update(mutate_json(rng, part))
            (place / MANIFEST).write_text(json.dumps(manifest))
        else:
            tensors = load_file(place / rank_file(0))
            for _ in range(rng.randint(1, 2)):
                spoil(rng, tensors)
            arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
            save_file(arrays, place / rank_file(0))
        load_model(place, backend)

    return case
