"""Runs the fuzzer: `python -m tests.fuzz --minutes 1 --native build/fuzz/native/_native.abi3.so`.

Each case follows from the seed, its target and its number alone: `--only TARGET:NUMBER` repeats one. `make fuzz` runs
it with the native module built under sanitizers, which end the process at the first fault.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.util
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

SECONDS = 20  # that a case may take
HARD_SECONDS = 60  # after which the process ends, wherever it is
MAX_GROWTH = 1 << 31  # bytes of memory that one case may add


def use_native(path: Path) -> None:
    """Load this module as quire._native."""
    spec = importlib.util.spec_from_file_location("quire._native", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["quire._native"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


class TooSlowError(Exception):
    """A case took longer than it may."""


def too_slow(_: int, __: FrameType | None) -> None:
    raise TooSlowError(f"more than {SECONDS} s")


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_case(case: Any, label: str, rng: Random, expected: type[Exception]) -> str:
    """How a case ended: "read", "refused" or "FAULT"."""
    faulthandler.dump_traceback_later(HARD_SECONDS, exit=True)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    before = peak_memory()
    try:
        case(rng)
        result = "read"
    except expected:
        result = "refused"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        print(f"FAULT in {label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        result = "FAULT"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    if peak_memory() - before > MAX_GROWTH:
        print(f"FAULT in {label}: took {(peak_memory() - before) >> 20} MiB", flush=True)
        return "FAULT"
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--native", type=Path, default=None)
    parser.add_argument("--only", default="", help="a target, or one case of it: TARGET:NUMBER")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz/work"))
    options = parser.parse_args()
    if options.native is not None:
        use_native(options.native)
    expected: type[Exception] = importlib.import_module("quire.errors").QuireError
    targets = importlib.import_module("tests.fuzz.targets").TARGETS
    name, _, number = options.only.partition(":")
    chosen = [name] if name else list(targets)
    signal.signal(signal.SIGALRM, too_slow)
    shutil.rmtree(options.folder, ignore_errors=True)
    cases = {}
    for target in chosen:
        (options.folder / target).mkdir(parents=True)
        cases[target] = targets[target](options.folder / target)
    counts = {target: Counter[str]() for target in chosen}
    end, i = time.monotonic() + 60 * options.minutes, int(number or 0)
    while True:
        for target, case in cases.items():
            (options.folder / "case.txt").write_text(f"--seed {options.seed} --only {target}:{i}\n")
            label = f"{target}:{i} (--seed {options.seed})"
            result = run_case(case, label, Random(f"{options.seed} {target} {i}"), expected)
            counts[target][result] += 1
        i += 1
        if number or time.monotonic() > end:
            break
    for target, count in counts.items():
        print(f"{target:12} {', '.join(f'{n} {how}' for how, n in sorted(count.items()))}")
    return int(any(count["FAULT"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
