"""Runs the tests as on machines that are not ours: `python -m tests.variants [NAME ...] [--whole] [--jobs 2]`.

Each variant is an older processor, a clone without ../shared, a taken port, a home that cannot be written or a busy
machine, over the tests for which that matters. `--whole` runs all tests in each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from quire import _native

ROOT = Path(__file__).parents[1]
READ_ONLY = "/sys"  # a directory in which nobody, not even root, can make a file

KERNELS = ("tests/devices", "tests/test_quantization.py", "tests/test_shipped_model.py")
MODELS = ("tests/model/test_parity.py", "tests/model/test_adapters.py", "tests/exactness/test_schedule.py")
COMMANDS = ("tests/test_terminal.py", "tests/test_cli.py", "tests/serve/test_failed_start.py")
STUDIES = ("tests/bench/test_article.py", "tests/bench/test_startup.py")
SERVERS = ("tests/serve/test_faults.py", "tests/serve/test_load.py", "tests/ranks/test_ranks.py")

# A test with one of these parameters is the same on any machine.
SAME = ("reference", "torch", *_native.available_isas())


@dataclass(frozen=True)
class Variant:
    """A machine: its best instruction set (None is this CPU's), whether ../shared is there, and its state."""

    tests: tuple[str, ...]
    isa: str | None = None
    shared: bool = False
    port_taken: bool = False
    home: str | None = None
    busy: int = 0  # processes that compute without end


VARIANTS = {
    "stranger": Variant((*KERNELS, *MODELS, *COMMANDS, *STUDIES), "avx2", port_taken=True, home=READ_ONLY),
    "avx2": Variant(("tests/weights", "tests/spec_decode", "tests/quantize"), "avx2", shared=True),
    "scalar": Variant((*KERNELS, *STUDIES), "scalar"),
    "avx512": Variant(KERNELS, "avx512"),
    "avx512_vnni": Variant(KERNELS, "avx512_vnni"),
    "avx512_bf16": Variant(KERNELS, "avx512_bf16"),
    "busy": Variant((*COMMANDS, *SERVERS), busy=2),
}


@contextmanager
def clone(shared: bool) -> Iterator[Path]:
    """A copy of the checkout, with a link to what lies beside it if `shared`."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "quire"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, copy, ignore=ignored)
        if shared and (ROOT.parent / "shared").is_dir():
            (copy.parent / "shared").symlink_to(ROOT.parent / "shared")
        yield copy


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Keep `count` cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def listening(port: int) -> Iterator[None]:
    """Take a port, unless another program has it already."""
    with socket.socket() as listener:
        if listener.connect_ex(("127.0.0.1", port)) == 0:
            yield
            return
    with socket.create_server(("127.0.0.1", port)):
        yield


def run(variant: Variant, jobs: int, whole: bool) -> int:
    """Run the variant's tests; returns pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["--numprocesses", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    command += [] if variant.isa is None else ["--isa", variant.isa]
    if not whole:
        same = " or ".join(before + name for name in SAME for before in "[-")
        command += [*variant.tests, "-k", f"not ({same})"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    if variant.home is not None:
        environment["HOME"] = variant.home
    with ExitStack() as stack:
        directory = stack.enter_context(clone(variant.shared))
        stack.enter_context(spinning(variant.busy))
        if variant.port_taken:
            stack.enter_context(listening(8000))
        return subprocess.run(command, cwd=directory, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *VARIANTS], metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--whole", action="store_true", help="all tests, not those for which it matters")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    found, sets = {}, _native.available_isas()
    for name in args.names or VARIANTS:
        variant = VARIANTS[name]
        print(f"\n{name}: {variant}", flush=True)
        if variant.isa is not None and variant.isa not in sets:
            found[name] = "skipped: this CPU lacks it"
        else:
            status = run(variant, args.jobs, args.whole)
            found[name] = "failed" if status else "passed"
    print("\n" + "\n".join(f"{name:12} {result}" for name, result in found.items()))
    return int("failed" in found.values())


if __name__ == "__main__":
    sys.exit(main())
