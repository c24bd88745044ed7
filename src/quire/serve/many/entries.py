"""Reads the models of a server, from a YAML file or a directory, and finds what each takes. Loads none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from quire.config import SECTIONS, EngineConfig
from quire.engine.plan import plan_engine
from quire.errors import ConfigError, ModelError, QuireError
from quire.files import read_bytes
from quire.flags.config_file import converted
from quire.serve.many.presets import read_presets
from quire.serve.options import ServerConfig
from quire.serve.web_options import WebConfig
from quire.spelling import nearest

MOST_BYTES, MOST_MODELS = 1 << 20, 256
PRIVATE = 64 << 20  # bytes of an engine process beside weights, workspace and KV cache
SEQUENCES = 4  # of the greatest length, that a model's KV cache holds unless options size it
BOUNDLESS = 1 << 60
# Options of the server as a whole, beside those of WebConfig.
SERVER_WIDE = {"router_api_key", "router_api_key_file", "served_model_name", "root_path", "middleware", "check",
    "data_parallel_size", "model"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model as an operator lists it. A model that is pinned, or is to `start`, is loaded with the server."""

    name: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    pin: bool = False
    start: bool = False
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Sized:
    """A listed model with its options, the bytes that it takes while it is loaded, and its longest request."""

    entry: Entry
    engine: EngineConfig
    server: ServerConfig
    size: int
    max_model_len: int


def read_entries(config: ServerConfig) -> list[Entry]:
    """Read all models that options list. ConfigError: there are none, too many, or two of one name."""
    found = [] if config.models_file is None else _of_yaml(config.models_file)
    if config.models_dir is not None:
        found += _of_directory(Path(config.models_dir).expanduser())
    if config.models_preset is not None:
        presets = read_presets(config.models_preset, MOST_BYTES, model_options())
        paths = {entry.name: entry.path for entry in found}
        found = [entry for entry in found if entry.name not in presets]
        for name, values in presets.items():  # of a model above, of a file, or of an id of the hub
            found.append(_entry(f"--models-preset: [{name}]", {"path": paths.get(name, name), **values}))
    if not 1 <= len(found) <= MOST_MODELS:
        raise ConfigError(f"--models and the like list {len(found)} models: list 1 to {MOST_MODELS}")
    names: set[str] = set()
    for name in (name for entry in found for name in (entry.name, *entry.aliases)):
        if name in names:
            raise ConfigError(f"two models have the name {name!r}: give one of them another")
        names.add(name)
    return found


def _of_yaml(path: str) -> list[Entry]:
    called = f"--models {path!r}"
    try:
        text = read_bytes(Path(path).expanduser(), MOST_BYTES).decode()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ConfigError(f"{called}: write each model out, without *names")
        loaded = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, ModelError, yaml.YAMLError) as error:
        raise ConfigError(f"{called} cannot be read: {' '.join(str(error).split())}") from error
    if isinstance(loaded, dict) and set(loaded) == {"models"}:
        loaded = loaded["models"]
    if not isinstance(loaded, list):
        raise ConfigError(f"{called} must hold a list of models, each with a name and a path")
    return [_entry(f"{called}: model {place}", values) for place, values in enumerate(loaded, 1)]


def _entry(called: str, values: Any) -> Entry:
    if not isinstance(values, dict):
        raise ConfigError(f"{called} must be a map with a name and a path")
    hints = get_type_hints(Entry)
    for key in values:
        if key not in hints:
            raise ConfigError(f"{called}: unknown word {key!r}{nearest(str(key), hints)}")
    if missing := [key for key in ("name", "path") if not values.get(key)]:
        raise ConfigError(f"{called} needs a {missing[0]}")
    typed = {key: converted(value, hints[key], None, f"{called}: {key}") for key, value in values.items()}
    entry = Entry(**typed)
    if not entry.name.isprintable() or len(entry.name) > 256:
        raise ConfigError(f"{called}: a name is 1 to 256 printable characters")
    if not 0.01 <= entry.weight <= 100:
        raise ConfigError(f"{called}: weight must be from 0.01 to 100, got {entry.weight:g}")
    return entry


def _of_directory(path: Path) -> list[Entry]:
    """List the models that a directory holds: those with a config, built engines, and GGUF files."""
    try:
        inside = sorted(path.iterdir())
    except OSError as error:
        raise ConfigError(f"--models-dir {str(path)!r} cannot be read: {error.strerror}") from error
    built = ("config.json", "engine.json")
    paths = [one for one in inside if one.suffix == ".gguf" or any((one / file).is_file() for file in built)]
    return [Entry(name=one.stem if one.suffix == ".gguf" else one.name, path=str(one)) for one in paths]


@cache
def model_options() -> Mapping[str, Any]:
    """List the options that a model may have, with their types: the engine's, and what a server has for each model."""
    wide = SERVER_WIDE | {f.name for f in fields(WebConfig)}
    hints = {"seed": get_type_hints(EngineConfig)["seed"]}
    for kind in (*SECTIONS.values(), ServerConfig):
        hints |= get_type_hints(kind)
    return {n: hint for n, hint in hints.items() if n not in wide and not n.startswith("models")}


def configured(entry: Entry, engine: EngineConfig, server: ServerConfig) -> tuple[EngineConfig, ServerConfig]:
    """Put a model's options in the place of those that all have. ConfigError: one is unknown or wrong."""
    types, given = model_options(), dict[str, Any]()
    for key, value in entry.options.items():
        name = str(key).replace("-", "_")
        if name not in types:
            wide = "is an option of the whole server: give it on the command line"
            why = wide if hasattr(server, name) else f"is no option{nearest(name, types)}"
            raise ConfigError(f"{name} {why}")
        given[name] = converted(value, types[name], None, name)
    own = {name: given.pop(name) for name in list(given) if hasattr(server, name)}
    parts = [(getattr(engine, name), fields(kind)) for name, kind in SECTIONS.items()]
    shared = {f.name: getattr(part, f.name) for part, known in parts for f in known}
    made = EngineConfig.from_options(**{**shared, "seed": engine.seed, **given, "model": entry.path})
    return made, replace(server, **own, served_model_name=(entry.name, *entry.aliases))


def sized(entry: Entry, engine: EngineConfig, server: ServerConfig, budget: int) -> Sized:
    """Find what a model takes of the `budget`. Its KV cache has a size, given or found here. ConfigError: it cannot be.

    Without an option it holds SEQUENCES of the greatest length, in a quarter of the budget or what the longest needs.
    """
    try:
        engine, server = configured(entry, engine, server)
        cache, room = engine.cache, budget - PRIVATE
        if cache.num_gpu_blocks_override is None and cache.kv_cache_memory_bytes is None:
            whole = plan_engine(engine, BOUNDLESS)
            most, memory = whole.limits.max_seqs, whole.memory
            if whole.config.cache.num_gpu_blocks_override is None:  # else texts are computed as a whole
                longest = memory.kv_cache // most
                wanted = min(SEQUENCES * longest, max(budget // 4, longest))
                kv = min(wanted, room - memory.weights - memory.workspace)
                engine = replace(engine, cache=replace(cache, kv_cache_memory_bytes=max(1, kv)))
        memory = plan_engine(engine, max(1, room)).memory
    except QuireError as error:
        raise ConfigError(f"model {entry.name}: {error}") from error
    return Sized(entry, engine, server, memory.total + PRIVATE, memory.max_model_len)
