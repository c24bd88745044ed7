"""`quire bench startup`: time from process start to first token, with the model's files on disk or in memory.

Each iteration runs the real command line in a new process and waits for its first byte of new text.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from quire.cli import Command, Options
from quire.config import SECTIONS, EngineConfig, option
from quire.engine.directory import model_directory
from quire.errors import EngineError
from quire.flags.uses import ONE_TEXT
from quire.llm import LLM
from quire.progress import progress

PERCENTAGES = (10, 25, 50, 75, 90, 99)
PAGE = 4096
PROBES = 256
COLD_ENOUGH = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupOptions(Options):
    """Options of `quire bench startup`; names are vLLM's."""

    num_iters_cold: int = option(3, "Cold starts, with the model's files dropped from the page cache.", low=0)
    num_iters_warmup: int = option(1, "Warm-up starts before the warm ones.", low=0)
    num_iters_warm: int = option(3, "Warm starts, with the model's files in the page cache.", low=1)
    prompt: str = option("Once upon a time", "Prompt for the first token.")
    timeout: float = option(600.0, "Seconds after which a start counts as failed.", low=1)
    output_json: str | None = option(None, "Write the figures to this JSON file.", writes="file")


@dataclass(frozen=True, slots=True)
class Start:
    """One start, in seconds from process start: the engine ready (it prints the prompt), the first token."""

    ready: float
    first_token: float


def run(config: EngineConfig, options: StartupOptions) -> None:
    directory = model_directory(config.model)
    command = [sys.executable, "-m", "quire.cli", "generate", options.prompt, "--max-tokens", "1"]
    command += engine_flags(config)

    def start() -> Start:
        made = measure_start(command, len(options.prompt.encode()), options.timeout)
        told(1)
        return made

    notes: list[str] = []
    if sys.dont_write_bytecode:
        notes.append("Python may compile modules at every start, as PYTHONDONTWRITEBYTECODE asks for")
    count = options.num_iters_cold + options.num_iters_warmup + options.num_iters_warm
    with progress("startup", count, "starts") as told:
        cold = list(_cold_starts(directory, options.num_iters_cold, start, notes))
        for _ in range(options.num_iters_warmup):
            start()
        warm = [start() for _ in range(options.num_iters_warm)]
    phases = LLM.from_config(config).report.phases
    _show(str(config.model.model or directory.name), cold, warm, phases, notes)
    if options.output_json is not None:
        text = json.dumps(results(cold, warm, phases), indent=1) + "\n"
        Path(options.output_json).write_text(text)


def engine_flags(config: EngineConfig) -> list[str]:
    """Write `config` as a command line: a flag for each field that differs from its default."""
    flags = ["--seed", str(config.seed)] if config.seed is not None else []
    for name, section in SECTIONS.items():
        given = asdict(getattr(config, name))
        for f in fields(section):
            value, flag = given[f.name], f.name.replace("_", "-")
            if value == f.default:
                continue
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", str(value)]
    return flags


def measure_start(command: list[str], prompt_bytes: int, timeout: float) -> Start:
    """Run `command`, which prints the prompt once it is ready, then one token. Raises EngineError if it fails."""
    with tempfile.TemporaryFile() as stderr:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr)
        assert process.stdout is not None
        output, ready, first = process.stdout, 0.0, 0.0
        try:
            with output:
                seen = 0
                while data := _read(output.fileno(), begin + timeout):
                    now = time.perf_counter() - begin
                    seen += len(data)
                    if not ready:
                        ready = now
                    if not first and seen > prompt_bytes:
                        first = now
            status = process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if status != 0 or not first:
            stderr.seek(0)
            said = stderr.read().decode(errors="replace").strip()[-2000:]
            if status == 0:
                raise EngineError("the process ended well but printed no token")
            raise EngineError(f"the process ended with status {status} before the first token: {said}")
    return Start(ready, first)


def _read(descriptor: int, end: float) -> bytes:
    """Read the bytes written so far, at least one; empty at end of file. EngineError at the time `end`."""
    ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.perf_counter()))
    if not ready:
        raise EngineError("the start took longer than --timeout")
    return os.read(descriptor, 65536)


def _cold_starts(
    directory: Path, count: int, start: Callable[[], Start], notes: list[str]
) -> Iterator[Start]:
    """Measure cold starts: drop the model's files from the page cache before each, and note if that failed."""
    kept: list[float | None] = []
    for _ in range(count):
        drop_cached(directory)
        kept.append(cached_share(directory))
        yield start()
    if any(k is None for k in kept):
        notes.append("cold: this system does not report whether the model's files left the page cache")
    elif count and max(k or 0.0 for k in kept) > COLD_ENOUGH:
        most = max(k or 0.0 for k in kept)
        notes.append(f"cold is not cold: {most:.0%} of the model's files stayed in the page cache")
    elif count:
        notes.append("cold: the model's files were dropped from the page cache, but Python's were not")


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)


def drop_cached(directory: Path) -> None:
    """Ask the kernel to drop the pages of the files below `directory`; it keeps the pages of mapped files."""
    for path in _files(directory):
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(directory: Path) -> float | None:
    """Probe the share of the files' pages in memory; None if the system does not report it."""
    found = probes = 0
    for path in _files(directory):
        size = path.stat().st_size
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):  # a probe that misses must not read ahead for the next one
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for offset in np.linspace(0, max(0, size - 1), min(PROBES, size // PAGE + 1)).astype(int):
                probes += 1
                try:
                    found += bool(os.preadv(file.fileno(), [bytearray(1)], int(offset), os.RWF_NOWAIT))
                except BlockingIOError:
                    continue
                except (OSError, AttributeError):
                    return None
    return found / probes if probes else None


def results(cold: list[Start], warm: list[Start], phases: dict[str, float]) -> dict[str, Any]:
    """Make vLLM's keys. A start ends with its first token; `phases` are the engine's own, in seconds."""
    found: dict[str, Any] = {}
    for name, starts in (("cold", cold), ("warm", warm)):
        if not starts:
            continue
        times = [s.first_token for s in starts]
        found[f"avg_{name}_startup_time"] = statistics.mean(times)
        found[f"{name}_startup_times"] = times
        found[f"{name}_startup_percentiles"] = {str(p): float(np.percentile(times, p)) for p in PERCENTAGES}
        found[f"avg_{name}_ready_time"] = statistics.mean(s.ready for s in starts)
    found["phases"] = dict(phases)
    return found


def _show(
    model: str, cold: list[Start], warm: list[Start], phases: dict[str, float], notes: list[str]
) -> None:
    table = Table(
        "seconds",
        "median",
        "min",
        "max",
        title=f"{model}: process start to first token",
        title_justify="left",
    )
    for name, starts in (("cold", cold), ("warm", warm)):
        for label, times in (
            (f"{name}: engine ready", [s.ready for s in starts]),
            (f"{name}: first token", [s.first_token for s in starts]),
        ):
            if times:
                table.add_row(
                    label, *(f"{v:.3f}" for v in (statistics.median(times), min(times), max(times)))
                )
    table.add_section()
    for phase, seconds in phases.items():
        table.add_row(f"  engine: {phase}", f"{seconds:.3f}")
    ready, first = statistics.median(s.ready for s in warm), statistics.median(s.first_token for s in warm)
    table.add_row("  Python and imports", f"{max(0.0, ready - sum(phases.values())):.3f}")
    table.add_row("  prompt to first token", f"{first - ready:.3f}")
    out = Console()
    out.print(table)
    for note in notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)


COMMAND = Command(run, StartupOptions, arguments=("model",), uses=ONE_TEXT)
