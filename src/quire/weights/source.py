"""A model's files: config, generation defaults and tensors, and its tokenizer. Knows no family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError
from quire.files import read_json
from quire.lazy import Lazy
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.gguf import is_gguf
from quire.weights.hub import open_tokenizer as open_tokenizer
from quire.weights.readers import find_quantization

if TYPE_CHECKING:
    from quire.weights.checkpoint import tasks
else:
    tasks = Lazy("quire.weights.checkpoint.tasks")

TASKS = "lora_adaptations"
"""TASKS is the key of the config that names tasks: see `quire.weights.checkpoint.tasks`."""
Change = Callable[[Checkpoint], Checkpoint]


@dataclass(frozen=True, slots=True)
class Source:
    """`config` and `generation` are config.json and generation_config.json; a GGUF file has no config.

    `where` names the config in messages. `tensors` opens the weights, quantized ones through their reader; what it is
    given changes how they lie in the files before that. `stored` opens quantized ones as they are in the files.
    """

    path: Path
    where: str
    config: dict[str, Any]
    generation: dict[str, Any]
    tensors: Callable[..., Checkpoint]
    stored: Callable[[], Checkpoint] | None = None


def open_source(path: Path, changes: Mapping[str, Any] | None = None) -> Source:
    """Open a directory; reads headers only. `changes` replace keys of the config. Raises ModelError."""
    changes = changes or {}
    config_path, generation_path = path / "config.json", path / "generation_config.json"
    if not config_path.exists():
        raise ModelError(
            f"{path}: no config.json; give the directory of a Hugging Face model, or a GGUF file"
        )
    config = changed_config(read_json(config_path), changes)
    generation = read_json(generation_path) if generation_path.exists() else {}
    quantization, stored = find_quantization(config, str(config_path), path), partial(open_checkpoint, path)
    if quantization is None:
        where = str(config_path)

        def plain(change: Change = unchanged) -> Checkpoint:
            found = change(stored())
            return found if config.get(TASKS) is None else tasks.with_task(found, config, where)

        return Source(path, where, config, generation, plain)
    reader = quantization.reader()
    config = {**config, "quantization_config": quantization.section()}

    def read(change: Change = unchanged) -> Checkpoint:
        return reader(change(stored()))

    return Source(path, str(config_path), config, generation, read, stored)


def unchanged(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


def changed_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with keys replaced; an object under `text_config` is merged.

    A rope is described under rope_parameters or, in older files, under rope_scaling and rope_theta: what is given
    replaces the same thing under its other name.
    """
    changed, given = dict(config), dict(changes)
    if "rope_scaling" in given or "rope_theta" in given:
        inner = changed.pop("rope_parameters", None) or {}
        if "rope_theta" in inner:
            changed.setdefault("rope_theta", inner["rope_theta"])
        if "rope_scaling" not in given and len(inner) > 1:
            given["rope_scaling"] = {key: value for key, value in inner.items() if key != "rope_theta"}
        elif "rope_scaling" not in given and "rope_theta" in (changed.get("rope_scaling") or {}):
            given["rope_scaling"] = {**changed["rope_scaling"], "rope_theta": given["rope_theta"]}
    elif "rope_parameters" in given:
        changed.pop("rope_scaling", None)
        if "rope_theta" in (given["rope_parameters"] or {}):
            changed.pop("rope_theta", None)
    for key, value in given.items():
        whole = changed.get(key)
        if key == "text_config" and isinstance(whole, Mapping) and isinstance(value, Mapping):
            value = changed_config(whole, value)
        changed[key] = value
    return changed


def quantization_method(path: Path) -> str | None:
    """The method by which a directory, a GGUF file or a config.json quantizes weights, or None. Raises ModelError."""
    if is_gguf(path):
        return "gguf"
    config, path = (path, path.parent) if path.is_file() else (path / "config.json", path)
    found = find_quantization(read_json(config), str(config), path) if config.exists() else None
    return None if found is None else found.method
