"""Many models in one server: how long a switch takes, what memory stays, how turns are shared.

    python bench/models.py switch --model DIR     # DIR is a built engine or a checkpoint
    python bench/models.py rounds --models 20 --rounds 10
    python bench/models.py share --seconds 60

`switch` alternates two models in a budget for one and a half, and starts a server of one model alone in between; times
are medians, from a request, or the start of a process, until an answer of one token.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from quire.engine.directory import SHIPPED_MODEL
from quire.weights.hub import ASSETS
from tests.serve.many.crowd import MB, Crowd, completion, entry, listed, rounds, turns
from tests.serve.running import start

SHIPPED = str(ASSETS / SHIPPED_MODEL)
OPTIONS = {"maker": "quire.client.start", "model": ""}
LENGTH = {"max_model_len": 1024, "kv_cache_memory_bytes": 256 * MB}


def switch(options: argparse.Namespace, folder: Path) -> None:
    for name in "ab":
        (folder / name).symlink_to(Path(options.model).resolve())
    models = [entry(name, str(folder / name), LENGTH) for name in "ab"]
    size = _size(folder, models)
    server = start(**OPTIONS, models_file=listed(folder, *models), models_memory=1.5 * size / 1e9)
    with httpx.Client(base_url=server.url, timeout=120) as client:

        def ask(name: str) -> float:
            began = time.perf_counter()
            body = completion(name, max_tokens=1).body
            assert client.post("/v1/completions", json=body).status_code == 200
            return time.perf_counter() - began

        for name in "abab":  # files are in memory, and both were loaded
            ask(name)
        alone, switches, again = [], [], []
        for number in range(options.times):
            alone.append(_alone(options.model))
            time.sleep(options.pause)
            switches.append(ask("ab"[number % 2]))
            again.append(ask("ab"[number % 2]))
        server.stop()
    shown = {"a server of it alone": alone, "a switch": switches, "no switch": again}
    for name, seconds in shown.items():
        print(f"{name:22} {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
    print(f"a switch / a server of it alone: {statistics.median(switches) / statistics.median(alone):.2f}")


def _size(folder: Path, models: list[dict[str, object]]) -> int:
    """The bytes that a model is said to take."""
    server = start(**OPTIONS, models_file=listed(folder, *models))
    with server.client as client:
        found: int = client.get("/v1/models").json()["data"][0]["bytes"]
    server.stop()
    return found


def _alone(model: str) -> float:
    began = time.perf_counter()
    command = [
        Path(sys.executable).with_name("quire"),
        "serve",
        model,
        "--port",
        "0",
        "--max-model-len",
        "1024",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = next(
        line.split(" at ")[1].strip() for line in process.stderr if "serving" in line and " at " in line
    )
    body = completion(model, max_tokens=1).body
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    took = time.perf_counter() - began
    process.terminate()
    process.communicate()
    return took


def in_turn(options: argparse.Namespace, folder: Path) -> None:
    names = [f"m{number}" for number in range(options.models)]
    models = [entry(name, SHIPPED) for name in names]
    server = start(**OPTIONS, models_file=listed(folder, *models), models_memory=1, models_max=2)
    for number, (api, engine) in enumerate(rounds(server, names, options.rounds), 1):
        print(
            f"round {number}: server {api / MB:.1f} MiB, largest engine {engine / MB:.1f} MiB, both private"
        )
    server.stop()


def share(options: argparse.Namespace, folder: Path) -> None:
    models = [entry("light", SHIPPED), entry("heavy", SHIPPED, weight=3)]
    server = start(
        **OPTIONS,
        models_file=listed(folder, *models),
        models_memory=1,
        models_max=1,
        models_turn=options.turn,
    )
    crowds = {
        name: Crowd(server, [completion(name, seed) for seed in range(8)]) for name in ("light", "heavy")
    }
    before = turns(server)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda crowd: crowd.run(4, options.seconds), crowds.values()))
    after = turns(server)
    for name, crowd in crowds.items():
        print(
            f"{name}: {crowd.done[name]} answers in {after[name] - before[name]} turns, {len(crowd.wrong)} wrong; "
            f"the longest wait was {crowd.longest[name]:.1f} s"
        )
    server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("switch", "rounds", "share"))
    parser.add_argument("--model", default=SHIPPED)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between switches")
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--turn", type=float, default=2.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        {"switch": switch, "rounds": in_turn, "share": share}[options.what](options, Path(folder))


if __name__ == "__main__":
    main()
