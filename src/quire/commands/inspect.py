"""`quire inspect`: describes a model, or what a built engine holds.

Of an engine it also says for which machine it was built, and whether its bytes are whole.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from quire.cli import Command, Options
from quire.config import EngineConfig, option
from quire.engine import preview
from quire.engine.directory import SHIPPED_MODEL, own_path
from quire.files import read_json
from quire.flags.uses import INSPECTING
from quire.model import engine_dir
from quire.model.describe import describe
from quire.model.engine_dir import Manifest
from quire.model.families import read_model
from quire.model.info import Asked, ModelInfo, Reading
from quire.model.load import is_built, open_files
from quire.model.parts.decoder import DecoderConfig
from quire.runtime.memory import GIB
from quire.weights.schemes import weights_name


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions(Options):
    """Options of `quire inspect`."""

    json: bool = option(False, "Print JSON instead of a table.")
    verify: bool = option(True, "Compare every byte of an engine's weights with its checksum.")


def run(config: EngineConfig, options: InspectOptions) -> None:
    name, architecture = config.model.model or SHIPPED_MODEL, config.model.architecture
    if Path(name).name.endswith(".json"):
        spec, _ = read_model(read_json(Path(name)), name, architecture)
        return _show_model(name, {**_states(spec), "spec": describe(spec)}, options)
    with preview.unfetched(config.model) as seen:
        directory = own_path(seen)
        if not is_built(directory):
            files = open_files(directory, Asked(reading=Reading(architecture)))
            return _show_model(name, model_figures(files.info), options)
    manifest = engine_dir.read_manifest(directory)
    shares = [manifest, *(engine_dir.read_manifest(directory, rank) for rank in range(1, manifest.ranks))]
    for share in shares if options.verify else ():
        data = engine_dir.map_weights(directory / share.weights_file, share.size)
        engine_dir.Checksums(data, len(share.checksums)).check(directory, share)
    if options.json:
        print(json.dumps(figures(manifest), indent=1))
    else:
        show(name, manifest)


def model_figures(info: ModelInfo) -> dict[str, Any]:
    """Collect what the headers of a model say, and its description."""
    assert isinstance(info.spec, DecoderConfig)
    return {
        "parameters": info.num_parameters,
        "dtype": info.dtype,
        "weight_bytes": info.weight_bytes,
        "eos_token_ids": list(info.eos_token_ids),
        **_states(info.spec),
        "spec": describe(info.spec),
    }


def _states(spec: DecoderConfig) -> dict[str, Any]:
    """Say what a model with recurrent layers keeps of a sequence, whatever its length."""
    kept = spec.kv_spec("float32").bytes_per_state(0)
    return {"state_bytes_per_sequence": kept} if kept else {}


def _show_model(name: str, found: dict[str, Any], options: InspectOptions) -> None:
    if options.json:
        print(json.dumps(found, indent=1))
        return
    spec = found.pop("spec")
    table = Table("", "", title=name, title_justify="left", show_header=False)
    for field, value in {**found, **spec}.items():
        table.add_row(field.replace("_", " "), _text(value))
    Console().print(table)


def _text(value: Any) -> str:
    """Format a value of a description, with nested fields one per line."""
    if isinstance(value, dict):
        return "\n".join(f"{name.replace('_', ' ')}: {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if value is None:
        return "none"
    return f"{value:,}" if type(value) is int else str(value)


def figures(manifest: Manifest) -> dict[str, Any]:
    """Give the manifest without its tables of tensors and checksums. Bytes count the first rank."""
    layouts: Counter[str] = Counter()
    places = {tensor.offset: tensor for tensor in manifest.tensors.values()}
    for tensor in places.values():
        layout = tensor.about.get("layout", "vectors")
        layouts[f"{layout}, screened" if tensor.about.get("screened") else layout] += tensor.nbytes
    return {
        "architecture": manifest.spec.architecture,
        "fingerprint": manifest.fingerprint,
        "parameters": manifest.num_parameters,
        "dtype": manifest.dtype,
        "quantization": weights_name(manifest.quantized, "none"),
        "ranks": manifest.ranks,
        "bytes": manifest.size,
        "bytes_by_layout": dict(layouts),
        **_states(manifest.spec),
        "limits": msgspec.to_builtins(manifest.limits),
        "spec": msgspec.to_builtins(manifest.spec),
    }


def show(name: str, manifest: Manifest) -> None:
    found = figures(manifest)
    table = Table("", "", title=name, title_justify="left", show_header=False)
    table.add_row("architecture", found["architecture"])
    table.add_row("built for", found["fingerprint"])
    table.add_row("weights", weights_name(manifest.quantized, manifest.dtype))
    table.add_row("parameters", f"{found['parameters']:,}")
    for layout, count in found["bytes_by_layout"].items():
        table.add_row(layout, f"{count / GIB:.3f} GiB")
    for field, count in _states(manifest.spec).items():
        table.add_row(field.replace("_", " "), f"{count:,}")
    if manifest.ranks > 1:
        table.add_row("ranks", f"{manifest.ranks}; bytes are those of the first")
    table.add_row("file", f"{manifest.size / GIB:.3f} GiB")
    for limit, value in found["limits"].items():
        if value is not None:
            table.add_row(limit, f"{value:,}")
    Console().print(table)


COMMAND = Command(run, InspectOptions, arguments=("model",), uses=INSPECTING)
