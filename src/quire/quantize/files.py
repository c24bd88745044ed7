"""Writes a checkpoint shard by shard, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.files import read_json, replaced
from quire.weights.checkpoint.safetensors import write_safetensors
from quire.weights.tensor import Array, FloatArray

STATE, HIDDEN, INDEX = "quantize-state.json", "quantize-hidden.npy", "model.safetensors.index.json"
# Files of a model that are not its weights and not its config.
COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*", "README*")
NOT_COPIED = ("config.json", INDEX, "pytorch_model.bin.index.json")


@dataclass(slots=True)
class Output:
    """The output of a run. `settings` are all that the result depends on: a run resumes only with equal settings.

    `done` shards are written; `kept` are the modules in them that stay float.
    """

    directory: Path
    settings: Mapping[str, Any]
    shards: int
    done: int = 0
    kept: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, directory: Path, settings: Mapping[str, Any], shards: int) -> Output:
        """Open a directory. ConfigError if it holds anything but an unfinished run with these settings."""
        output = cls(directory, settings, shards)
        state = directory / STATE
        if state.exists():
            found = read_json(state)
            if found.get("settings") != json.loads(json.dumps(settings)):
                raise ConfigError(
                    f"{directory} holds an unfinished run with other options: remove it, or give the same ones"
                )
            output.done, output.kept = int(found["done"]), list(found["kept"])
        elif directory.exists() and any(directory.iterdir()):
            raise ConfigError(f"{directory} is not empty: choose an empty or a new directory")
        directory.mkdir(parents=True, exist_ok=True)
        return output

    def hidden(self) -> FloatArray | None:
        """Read the input of the next layer, if the run was interrupted after a layer."""
        path = self.directory / HIDDEN
        if not self.done or not path.exists():
            return None
        values: FloatArray = np.load(path, allow_pickle=False)
        return values

    def write(self, tensors: Mapping[str, Array], hidden: FloatArray | None) -> None:
        """Write the next shard, and the hidden states that the one after it needs."""
        write_safetensors(self.directory / self._shard(self.done), tensors)
        if hidden is not None:
            with replaced(self.directory / HIDDEN) as path, path.open("wb") as file:
                np.save(file, hidden, allow_pickle=False)
        self.done += 1
        with replaced(self.directory / STATE) as path:
            path.write_text(json.dumps({"settings": self.settings, "done": self.done, "kept": self.kept}))

    def finish(self, source: Path, config: Mapping[str, Any], beside: tuple[str, Any] | None) -> None:
        """Write the index and the config, copy what belongs to the model, and forget the state."""
        owners: dict[str, str] = {}
        total = 0
        for index in range(self.shards):
            header, size = _header(self.directory / self._shard(index))
            owners |= dict.fromkeys(header, self._shard(index))
            total += size
        index_file = {"metadata": {"total_size": total}, "weight_map": owners}
        (self.directory / INDEX).write_text(json.dumps(index_file, indent=1))
        for pattern in COPIED:
            for path in source.glob(pattern):
                if path.name not in NOT_COPIED and path.is_file():
                    shutil.copyfile(path, self.directory / path.name)
        if beside is not None:
            (self.directory / beside[0]).write_text(json.dumps(beside[1], indent=1))
        (self.directory / "config.json").write_text(json.dumps(config, indent=2))
        for name in (STATE, HIDDEN):
            (self.directory / name).unlink(missing_ok=True)

    def _shard(self, index: int) -> str:
        return f"model-{index + 1:05d}-of-{self.shards:05d}.safetensors"


def _header(path: Path) -> tuple[list[str], int]:
    """List the tensors of a file that was written here, and their size in bytes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return [name for name in header if name != "__metadata__"], path.stat().st_size - 8 - size
