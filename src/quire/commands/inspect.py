"""`quire inspect`: what an engine directory holds, for which machine, and whether its bytes are whole."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from quire.cli import Command
from quire.config import check_options, option
from quire.errors import ConfigError
from quire.model import engine_dir
from quire.model.engine_dir import Manifest
from quire.runtime.memory import GIB
from quire.weights.schemes import weights_name


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """Options of `quire inspect`."""

    directory: str = option("", "An engine directory.")
    json: bool = option(False, "Print JSON instead of a table.")
    verify: bool = option(True, "Compare every byte of the weights with its checksum.")

    def __post_init__(self) -> None:
        check_options(self)


def run(options: InspectOptions) -> None:
    directory = Path(options.directory)
    if not options.directory or not engine_dir.is_engine(directory):
        raise ConfigError(
            f"{options.directory or 'no directory'}: not an engine; make one with `quire build`"
        )
    manifest = engine_dir.read_manifest(directory)
    if options.verify:
        data = engine_dir.map_weights(directory, manifest.size)
        engine_dir.Checksums(data, len(manifest.checksums)).check(directory, manifest)
    if options.json:
        print(json.dumps(figures(manifest), indent=1))
    else:
        show(options.directory, manifest)


def figures(manifest: Manifest) -> dict[str, Any]:
    """The manifest without its tables of tensors and checksums."""
    layouts: Counter[str] = Counter()
    for tensor in manifest.tensors:
        layout = tensor.about.get("layout", "vectors")
        layouts[f"{layout}, screened" if tensor.about.get("screened") else layout] += tensor.nbytes
    return {
        "architecture": manifest.spec.architecture,
        "fingerprint": manifest.fingerprint,
        "parameters": manifest.num_parameters,
        "dtype": manifest.dtype,
        "quantization": weights_name(manifest.quantized, "none"),
        "bytes": manifest.size,
        "bytes_by_layout": dict(layouts),
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
    table.add_row("file", f"{manifest.size / GIB:.3f} GiB")
    for limit, value in found["limits"].items():
        if value is not None:
            table.add_row(limit, f"{value:,}")
    Console().print(table)


COMMAND = Command(run, InspectOptions, arguments=("directory",), engine=False)
