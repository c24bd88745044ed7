"""Measures GGUF files in Quire and in llama.cpp, taking turns, and writes bench/results/gguf-NAME.json.

    python bench/gguf.py --llama-cpp BUILD/bin --name zen5 model-Q8_0.gguf model-Q4_K_M.gguf
    python bench/gguf.py --llama-cpp BUILD-AVX2/bin --name zen5-avx2 --isa avx2 --tasks decode,prefill *.gguf

`--llama-cpp` is the directory with llama-bench, llama-batched-bench and llama-completion. Each round runs both engines,
one after the other, in a process of its own. `--append` adds to the rows of an earlier run. With `FILE=NAME`
(model.gguf=int8), Quire quantizes --checkpoint by that name instead of reading the file. Tasks:

    decode   tokens per second of one sequence       prefill   of a prompt of 1,024 tokens
    batch8   output tokens per second of 8 sequences batch32   of 32
    memory   resident memory while it generates, GB  start     seconds from a cold start to the first token
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.config import DeviceConfig
from quire.engine.plan import make_backend

HERE = Path(__file__).parent
UNITS = {"memory": "GB", "start": "s"}
TITLES = {
    "decode": "decode, one sequence",
    "prefill": "prompt of 1,024 tokens",
    "batch8": "8 sequences",
    "batch32": "32 sequences",
    "memory": "resident memory",
    "start": "cold start to the first token",
}
LATENCY = {
    "decode": ("decode_tok_s", 1, 16, 64),
    "prefill": ("prefill_tok_s", 1, 1024, 2),
    "batch8": ("decode_tok_s", 8, 32, 32),
    "batch32": ("decode_tok_s", 32, 32, 32),
}
PROMPT = "Once upon a time"


class Quire:
    """Figures of this package: a GGUF file, or a checkpoint that it quantizes itself."""

    def __init__(self, model: str, threads: int, options: list[str]) -> None:
        self.options = ["--model", model, "--threads", str(threads), *options]

    def measure(self, task: str) -> float:
        if task in LATENCY:
            return self._latency(*LATENCY[task])
        command = [sys.executable, "-m", "quire.cli", "generate", *self.options, "--max-model-len", "512"]
        command += ["--temperature", "0"]
        return _process(task, lambda count: [*command, "--max-tokens", str(count), PROMPT])

    def _latency(self, key: str, size: int, prompt: int, output: int) -> float:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, "-m", "quire.cli", "bench", "latency", *self.options]
            command += ["--batch-size", str(size), "--input-len", str(prompt), "--output-len", str(output)]
            command += ["--num-iters", "3", "--max-model-len", "1100", "--no-enable-prefix-caching"]
            _run([*command, "--output-json", file.name])
            return float(json.loads(Path(file.name).read_text())[key])


class LlamaCpp:
    """Figures of llama.cpp's own tools."""

    def __init__(self, tools: Path, model: str, threads: int) -> None:
        self.tools, self.common = tools, ["-m", model, "-t", str(threads)]

    def measure(self, task: str) -> float:
        if task in ("decode", "prefill"):
            counts = ("0", "64") if task == "decode" else ("1024", "0")
            options = ["-p", counts[0], "-n", counts[1], "-r", "3", "-o", "json"]
            (found,) = json.loads(_run([str(self.tools / "llama-bench"), *self.common, *options]))
            return float(statistics.median(found["samples_ts"]))
        if task in LATENCY:
            _, size, prompt, output = LATENCY[task]
            options = [
                "-npp",
                str(prompt),
                "-ntg",
                str(output),
                "-npl",
                str(size),
                "--output-format",
                "jsonl",
            ]
            options += ["-c", str(size * (prompt + output)), "-tb", self.common[-1]]
            output_text = _run([str(self.tools / "llama-batched-bench"), *self.common, *options])
            rows = [json.loads(line) for line in output_text.splitlines() if line.startswith("{")]
            return float(rows[-1]["speed_tg"])
        command = [str(self.tools / "llama-completion"), *self.common, "-c", "512", "-no-cnv", "--ignore-eos"]
        return _process(task, lambda count: [*command, "--temp", "0", "-n", str(count), "-p", PROMPT])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _process(task: str, command: Any) -> float:
    """Seconds until a process that generates one token ends, or the memory of one that generates many, in GB."""
    arguments = command(1 if task == "start" else 64)
    began, samples = time.perf_counter(), []
    process = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    if task == "memory":
        while process.poll() is None:
            samples.append(_resident(process.pid))
            time.sleep(0.02)
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{errors.decode()[-2000:]}")
    if task == "start":
        return time.perf_counter() - began
    return statistics.median(samples[len(samples) // 2 :])


def _resident(process: int) -> float:
    """GB that the process holds, the pages of files that it maps among them."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    lines = [line.split() for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(lines[0][1]) / 1e6 if lines else 0.0


def _forget(path: str) -> None:
    """Ask the system to drop the file from its cache, so that it is read from the disk again."""
    for file in [Path(path)] if Path(path).is_file() else Path(path).iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _row(model: str, weights: str, task: str, rounds: list[tuple[float, float]]) -> dict[str, Any]:
    """The medians of both engines, and the median of the rounds' own ratios."""
    smaller = task in UNITS
    ratios = [theirs / ours if smaller else ours / theirs for theirs, ours in rounds]
    engines = {
        name: {"median": statistics.median(values), "low": min(values), "high": max(values)}
        for name, values in zip(("llama.cpp", "Quire"), zip(*rounds, strict=True), strict=True)
    }
    return {
        "model": model,
        "weights": weights,
        "task": TITLES[task],
        "unit": UNITS.get(task, "tok/s"),
        "engines": engines,
        "times_as_fast": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
        "plotted": False,
    }


def measure(args: argparse.Namespace, name: str, tasks: list[str]) -> list[dict[str, Any]]:
    """The rows of one file. `name` may end in =METHOD: Quire then quantizes the checkpoint itself."""
    path, _, method = name.partition("=")
    model, _, kind = Path(path).stem.partition("-")
    options = ["--isa", args.isa] + (["--quantization", method] if method else [])
    ours = args.checkpoint if method else path
    engines = LlamaCpp(args.llama_cpp, path, args.threads), Quire(ours, args.threads, options)
    rows = []
    for task in tasks:
        rounds = []
        for turn in range(args.rounds):
            pair = [0.0, 0.0]
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                if task == "start":
                    _forget((path, ours)[side])
                pair[side] = engines[side].measure(task)
            rounds.append((pair[0], pair[1]))
        rows.append(_row(model, f"{kind}, Quire {method}" if method else kind, task, rounds))
        print(
            model,
            rows[-1]["weights"],
            task,
            rounds,
            f"{rows[-1]['times_as_fast']['median']:.2f} x",
            flush=True,
        )
    return rows


def _machine(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on; limits are measured now."""
    backend = make_backend(DeviceConfig(threads=args.threads, isa=args.isa))
    limits = [backend.measure_limits(kind) for kind in ("fp32", "bf16", "int8")]
    peaks = ", ".join(f"{limit.peak_gflops:,.0f} {limit.arithmetic}" for limit in limits)
    return {
        "name": args.machine or args.name,
        "cpu": args.machine or args.name,
        "instructions": backend.name,
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "limits": [f"{limits[0].read_gbs:.0f} GB/s read from memory", f"GFLOP/s: {peaks}"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--machine", default="")
    parser.add_argument("--tasks", default=",".join(TITLES))
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--append", action="store_true")
    args = parser.parse_args()
    path = HERE / "results" / f"gguf-{args.name}.json"
    run: dict[str, Any] = {
        "machine": _machine(args),
        "date": time.strftime("%Y-%m-%d"),
        "threads": args.threads,
        "commands": [],
        "rows": [],
    }
    if args.append and path.exists():
        run = json.loads(path.read_text())
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    run["commands"].append("python bench/gguf.py " + " ".join(words))
    for name in args.files:
        for row in measure(args, name, args.tasks.split(",")):
            keys = ("model", "weights", "task")
            run["rows"] = [old for old in run["rows"] if any(old[key] != row[key] for key in keys)] + [row]
            path.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
