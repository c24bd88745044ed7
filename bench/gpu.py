"""A short visit to a GPU: one command that says whether the kernels are right there, and how fast.

    python bench/gpu.py [--only bits,kernels] [--seconds 540] [--out DIR] [--check]
    python bench/gpu.py --pack        before the visit, where a compiler and an index are

Stages run in order, each in processes of its own with a time limit, so that one which hangs or loses the GPU costs the
others nothing. They print as they go; DIR/gpu.json is written after every line, and a table is printed last. Without a
GPU the same stages run in the kernels' interpreter at tiny sizes, and list what compiled kernels take. docs/gpu.md
says more.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKED = ROOT / "build" / "gpu"  # git ignores it
SITE = PACKED / "site"
NEEDED = [
    "torch",
    "triton",
    "numpy",
    "msgspec",
    "fastapi",
    "uvicorn",
    "httptools",
    "llguidance",
    "prompt_toolkit",
]
WHEELS = " ".join(NEEDED[3:])  # what an image with torch usually lacks
PIP = [
    sys.executable,
    "-m",
    "pip",
    "install",
    "-q",
    "--no-index",
    "--no-deps",
    "--upgrade",
    "--target",
    str(SITE),
]


@dataclass(frozen=True)
class Stage:
    """A function of a module, the most seconds that it gets beside others, and its processes on a GPU.

    A process compiles kernels one after another, each at its first launch: several take less time.
    """

    module: str
    seconds: float
    processes: int = 1


STAGES = {
    "environment": Stage("kernels", 30),
    "cubins": Stage("pack", 30),
    "ceilings": Stage("kernels", 30),
    "bits": Stage("kernels", 120, 8),
    "routes": Stage("engine", 90),
    "memory": Stage("engine", 60),
    "engine": Stage("engine", 240),
    "kernels": Stage("kernels", 150),
    "table": Stage("pack", 200),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help=f"stages, separated by commas, of {', '.join(STAGES)}")
    parser.add_argument("--seconds", type=float, default=540, help="for all stages together (540)")
    parser.add_argument("--out", type=Path, default=PACKED / "out", help="where gpu.json goes")
    parser.add_argument("--check", action="store_true", help="measure no times")
    parser.add_argument("--device", choices=("auto", "cuda", "interpreter"), default="auto")
    parser.add_argument("--layers", type=int, default=32, help="of the 8B model; fewer load faster")
    parser.add_argument("--scale", type=float, default=1.0, help="times the requests of a run")
    parser.add_argument("--pack", action="store_true", help="make what a visit takes along, and stop")
    parser.add_argument("--target", default="sm_90", help="of packed cubins and of the table")
    parser.add_argument("--python", default="3.12", help="the version that packed wheels are for")
    parser.add_argument("--wheels", default=WHEELS, help="what --pack fetches")
    options = parser.parse_args()
    if unknown := set(filter(None, options.only.split(","))) - set(STAGES):
        parser.error(f"there is no stage {min(unknown)!r}; stages are {', '.join(STAGES)}")
    if problem := prepare():
        print(problem, file=sys.stderr)
        return 2
    if options.pack:
        packing: Any = importlib.import_module("bench.visit.pack")
        packing.pack(PACKED, options.target, options.wheels.split(), options.python)
        return 0
    return visit(options)


def prepare() -> str:
    """Make Quire importable: the one installed, or the tree's, built if need be. Return what fails."""
    sys.path[0], wheels = str(ROOT), sorted(map(str, (PACKED / "wheels").glob("*.whl")))
    source = ROOT / "src" / "quire"
    importing = [sys.executable, "-c", "import quire._native"]
    installed = subprocess.run(importing, capture_output=True, check=False).returncode == 0
    sys.path[1:] = [*([] if installed else [str(source.parent)]), *sys.path[1:], str(SITE)]
    compiled = installed or any((source / f"_native{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
    if wheels and (lacking() or not compiled):
        subprocess.run([*PIP, *wheels], check=False)
        importlib.invalidate_caches()
    if names := lacking():
        return (
            f"missing here: {', '.join(names)}; --pack --wheels '{' '.join(names)}' fetches wheels elsewhere"
        )
    if not compiled and not [*SITE.glob("quire/_native*.so")]:
        print("building Quire", flush=True)
        if subprocess.run([*PIP, "--no-build-isolation", str(ROOT)], check=False).returncode:
            return "Quire was not built: it needs scikit-build-core, nanobind, CMake and a compiler for C++20"
    for made in () if compiled else SITE.glob("quire/_native*.so"):
        shutil.copy(made, source)
    return ""


def lacking() -> list[str]:
    """Packages that cannot be imported."""
    return [name for name in NEEDED if find_spec(name) is None]


def visit(options: argparse.Namespace) -> int:
    """Run the stages that there is time for."""
    begin, device = time.monotonic(), chosen(options.device)
    stages: dict[str, Any] = {}
    options.out.mkdir(parents=True, exist_ok=True)
    known: dict[str, float] = {}
    for name in picked(options.only, device, options.check):
        left = options.seconds - (time.monotonic() - begin)
        stages[name] = stage = {"state": "left out: no time", "seconds": 0.0, "rows": []}
        if left >= 2:
            limit = left if options.only else min(left, STAGES[name].seconds)
            for _ in run_stage(name, device, limit, options, known, stage):
                write(options.out / "gpu.json", device, stages)
        write(options.out / "gpu.json", device, stages)
        for row in stage["rows"]:
            known |= {f"{row['name']} {unit}": row[unit] for unit in ("gbs", "tflops") if unit in row}
    print_table(stages)
    return int(any(stage["state"] == "failed" or wrong(stage) for stage in stages.values()))


def picked(only: str, device: str, check: bool) -> list[str]:
    """The stages to run, in order. Shares of a ceiling need the ceilings; the table is for machines without a GPU."""
    names = set(only.split(",")) if only else set(STAGES) - ({"table"} if device == "cuda" else set())
    if not check and names & {"kernels", "engine"}:
        names.add("ceilings")
    return [name for name in STAGES if name in names]


def chosen(device: str) -> str:
    """The device of a visit. Tells without opening a GPU, so that stages can be forked."""
    nodes = Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()
    return device if device != "auto" else "cuda" if nodes else "interpreter"


def run_stage(name: str, device: str, limit: float, options: Any, known: dict[str, float], stage: Any) -> Any:
    """Run a stage, and yield after each row that it reports, until it ends or its time is over."""
    print(f"\n== {name}, at most {limit:.0f} s", flush=True)
    importlib.import_module(f"bench.visit.{STAGES[name].module}")  # once, before processes are forked
    begin, context = time.monotonic(), multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    count = min(STAGES[name].processes, os.cpu_count() or 1) if device == "cuda" else 1
    about = device, sender.send, not options.check, limit, known
    more = {
        "engine": [options.layers, options.scale],
        "cubins": [PACKED],
        "routes": [PACKED],
        "table": [options.target],
    }.get(name, [])
    processes = [
        context.Process(target=work, args=(name, (*about, (index, count)), more)) for index in range(count)
    ]
    for process in processes:
        process.start()
    sender.close()
    stage["state"] = "cut at its limit"
    while (left := begin + limit - time.monotonic()) > 0 and receiver.poll(left):
        try:
            row = receiver.recv()
        except EOFError:  # all have ended
            for process in processes:
                process.join()
            stage["state"] = "failed" if any(process.exitcode for process in processes) else "done"
            break
        stage["rows"].append(row)
        print(line(row), flush=True)
        yield
    for process in processes:
        process.kill()
        process.join()
    stage["seconds"] = round(time.monotonic() - begin, 1)
    print(f"== {name}: {stage['state']}, {stage['seconds']} s", flush=True)


def work(name: str, about: tuple[Any, ...], more: list[Any]) -> None:
    """Do a stage or a share of it, in its process."""
    place: Any = importlib.import_module("bench.visit.place").open_place(*about)
    place.attempt(
        name, getattr(importlib.import_module(f"bench.visit.{STAGES[name].module}"), name), place, *more
    )


def write(path: Path, device: str, stages: dict[str, Any]) -> None:
    """Replace a file by what was found so far."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"device": device, "stages": stages}, indent=1))
    new.replace(path)


def line(row: dict[str, Any]) -> str:
    verdict = {True: "ok", False: "WRONG", None: ""}[row["ok"]]
    figures = (f"{key} {value}" for key, value in row.items() if key not in ("name", "ok") and value != [])
    return f"  {row['name']:52} {verdict:6} {', '.join(figures)}".rstrip()


def wrong(stage: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in stage["rows"] if row["ok"] is False]


def print_table(stages: dict[str, Any]) -> None:
    """Print what was found, in one screen: verdicts by stage, what is wrong, and figures."""
    print(f"\n{'stage':14} {'state':20} {'seconds':>8} {'right':>6} {'wrong':>6}")
    for name, stage in stages.items():
        right = sum(row["ok"] is True for row in stage["rows"])
        print(f"{name:14} {stage['state']:20} {stage['seconds']:>8} {right:>6} {len(wrong(stage)):>6}")
    rows = {name: [row for row in stage["rows"] if "ran" not in row] for name, stage in stages.items()}
    by_share = sorted(
        (row for row in rows.get("kernels", []) if "share" in row), key=lambda row: row["share"]
    )
    parts = {
        "wrong": [row for stage in stages.values() for row in wrong(stage)][:20],
        "ceilings": rows.get("ceilings"),
        "kernels farthest from their ceilings": by_share[:10],
        "nearest": by_share[-5:],
        "engine": rows.get("engine"),
    }
    for title, some in parts.items():
        if some:
            print(f"\n{title}\n" + "\n".join(map(line, some)))


if __name__ == "__main__":
    sys.exit(main())
