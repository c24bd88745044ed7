"""`quire doctor`: says what this machine offers, what is installed, and what to change."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire import __version__
from quire.cli import COMMANDS, Command, Program, all_options, load_command
from quire.config import option
from quire.devices import registry
from quire.errors import ConfigError
from quire.files import read_json
from quire.flags.config_file import OptionsFile, user_file
from quire.lazy import Lazy

if TYPE_CHECKING:
    import quire._native as native
else:
    native = Lazy("quire._native")

EXTRAS = ("torch", "transformers", "triton", "ray", "matplotlib")
CPU_FLAGS = ("avx", "fma", "amx", "asimd", "bf16", "i8mm", "sve")  # what names of useful abilities begin with
LITTLE_DISK = 10 << 30
MAX_VERDICTS = 1 << 20  # bytes
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of `quire doctor`."""

    json: bool = option(False, "Print JSON, for reports of bugs.")


def run(options: DoctorOptions) -> None:
    found = diagnose(Path("/"))
    if options.json:
        print(json.dumps(found, indent=1))
        return
    table = Table("", "", show_header=False)
    for name, value in found.items():
        if name != "advice":
            table.add_row(name.replace("_", " "), Text(_shown(value)))
    console = Console()
    console.print(table)
    for line in found["advice"] or ["nothing to change"]:
        console.print(f"- {line}", soft_wrap=True, highlight=False, markup=False)


def diagnose(root: Path) -> dict[str, Any]:
    """Collect what is known of the machine under `root`; each part that cannot be read says why. Holds no secret."""
    parts: dict[str, Callable[[], Any]] = {
        "quire": lambda: __version__,
        "python": lambda: f"{platform.python_version()} at {sys.executable}",
        "system": platform.platform,
        "native_module": lambda: f"loaded, for {', '.join(native.available_isas())}",
        "cpu": lambda: _cpu(root),
        "instruction_set": lambda: native.resolve_isa("auto"),
        "threads": lambda: _threads(root),
        "cgroup": lambda: _cgroup(root),
        "memory": lambda: _memory(root),
        "huge_pages": lambda: _read(root / HUGE_PAGES),
        "packages": lambda: {name: _version(name) for name in EXTRAS},
        "cache": _cache,
        "config_file": _config_file,
        "gpu_kernels": lambda: _kernels(Path.home() / registry.selection.VERDICTS),
    }
    found = {name: _tried(part) for name, part in parts.items()}
    return {**found, "advice": _advice(found)}


def _tried(part: Callable[[], Any]) -> Any:
    """Call `part`; what is broken here is what the user wants to know."""
    try:
        return part()
    except Exception as error:
        return f"unknown: {type(error).__name__}: {error}"


def _read(path: Path) -> str | None:
    """Read a file of the system; None if it is not there."""
    return path.read_text().strip() if path.exists() else None


def _cpu(root: Path) -> dict[str, Any]:
    lines = [line.partition(":") for line in (_read(root / "proc/cpuinfo") or "").splitlines()]
    about = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    flags = about.get("flags", about.get("Features", "")).split()
    return {
        "model": about.get("model name", platform.machine()),
        "has": [flag for flag in flags if flag.startswith(CPU_FLAGS)],
    }


def _threads(root: Path) -> dict[str, Any]:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return {
        "used": _tried(registry.usable_threads),
        "cores": os.cpu_count(),
        "affinity": sorted(affinity(0)) if affinity else None,
    }


def _cgroup(root: Path) -> dict[str, Any]:
    folder = root / "sys/fs/cgroup"
    files = (
        "cpu.max",
        "memory.max",
        "memory.current",
        "cpu/cpu.cfs_quota_us",
        "memory/memory.limit_in_bytes",
    )
    found = {name: _tried(partial(_read, folder / name)) for name in files}
    return {name: value for name, value in found.items() if value is not None}


def _memory(root: Path) -> dict[str, int]:
    lines = [line.split() for line in (_read(root / "proc/meminfo") or "").splitlines()]
    names = {"MemTotal:": "total", "MemAvailable:": "available", "SwapTotal:": "swap"}
    return {names[line[0]]: int(line[1]) * 1024 for line in lines if line[0] in names}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cache() -> dict[str, Any]:
    place = Path(constants.HF_HUB_CACHE)
    there = next(path for path in (place, *place.parents) if path.exists())
    free = shutil.disk_usage(there).free
    return {"place": str(place), "free": free, "can_be_written": os.access(there, os.W_OK)}


def _kernels(path: Path) -> dict[str, str]:
    """Sum up what first starts found out about kernels, and about libraries, by GPU."""
    told = {}
    for gpu, found in (read_json(path, dict, MAX_VERDICTS) if path.exists() else {}).items():
        serving = [name for name, one in found.items() if one.get("sizes")]
        failed = [name for name, one in found.items() if not all(one.values())]
        if any("sizes" in one for one in found.values()):
            told[gpu] = f"{len(found)} tried, serving: {'; '.join(serving) or 'none'}"
        else:
            told[gpu] = f"{len(found)} checked, {'; '.join(failed) or 'none'} failed"
    return told


def _config_file() -> str:
    path = user_file()
    if path is None:
        return "none"
    try:
        file, program = OptionsFile.read(path, True, COMMANDS), Program()
    except ConfigError as error:
        return f"broken: {error}"
    unknown = sorted(file.plain.keys() - all_options(program))
    for name, values in file.sections.items():
        command = load_command(name, program)
        known = command.own_names | command.uses | command.foreign_flags().keys()
        unknown += [f"{name}: {option}" for option in sorted(values.keys() - known)]
    return f"broken: {path}: unknown option {', '.join(unknown)}" if unknown else str(path)


def _shown(value: Any) -> str:
    """Write a value on one line, large numbers as bytes."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value / 1e9:.1f} GB" if isinstance(value, int) and value >= 1 << 20 else str(value)


def _advice(found: dict[str, Any]) -> list[str]:
    """Say what to change, each with the command or option for it."""
    lines = []
    threads, memory, cache = found["threads"], found["memory"], found["cache"]
    if str(found["native_module"]).startswith("unknown"):
        lines.append("the native module does not load: install again, `pip install --force-reinstall .`")
    used, cores = (threads["used"], threads["cores"]) if isinstance(threads, dict) else (None, None)
    if isinstance(used, int) and isinstance(cores, int) and used < cores:
        lines.append(
            f"{used} of {cores} cores may be used, by affinity or the cgroup: raise the limit (`taskset`, "
            "`docker run --cpus`)"
        )
    if isinstance(memory, dict) and 0 < memory.get("available", 0) < memory.get("total", 0) / 4:
        lines.append(
            "little memory is free: end other programs, or `--quantization int4`; `quire plan MODEL` says more"
        )
    if isinstance(found["huge_pages"], str) and "[never]" in found["huge_pages"]:
        lines.append(f"huge pages are off: `echo madvise | sudo tee /{HUGE_PAGES}` makes large models faster")
    if isinstance(cache, dict) and not cache["can_be_written"]:
        lines.append(f"{cache['place']} cannot be written: set HF_HOME or `--download-dir`")
    elif isinstance(cache, dict) and cache["free"] < LITTLE_DISK:
        lines.append(
            f"{_shown(cache['free'])} of disk are free: `quire models rm`, HF_HOME or `--download-dir`"
        )
    if str(found["config_file"]).startswith("broken"):
        lines.append("the config file is broken: mend it, or move it away")
    return lines


COMMAND = Command(run, DoctorOptions, uses=frozenset(), reads_user_file=False)
