"""Sums between two ranks beside their limits, in turns: `python bench/ranks.py [MODEL]`.

For each size of a message: the sum through shared memory, over TCP and through gloo, between two processes, and a copy
within one process. With MODEL its speed with two ranks of one thread beside one rank of two threads, in place of sums.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.devices.exchanges import make_exchange, make_peers, peers_bytes, peers_over

SIZES = [4 << 10 << (2 * i) for i in range(6)]  # 4 KiB to 4 MiB
ROUNDS = 9
SECONDS = 0.15  # of one measurement
PATIENCE = 30.0


def repeated(run: Callable[[], object]) -> float:
    """Seconds of one run, of as many as fit in SECONDS."""
    run()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        run()
        count += 1
    return (time.perf_counter() - began) / count


def connect(rank: int, memory: int, links: list[socket.socket]) -> dict[str, Any]:
    """The connections of a rank, by name. Links: of TCP, and of gloo."""
    found = {"shared memory": make_peers(memory, rank, 2, PATIENCE)}
    for kind, link in zip(("tcp", "gloo"), links, strict=True):
        exchange = make_exchange(kind, rank, 2, PATIENCE)  # type: ignore[arg-type]
        exchange.connect({1 - rank: link}, PATIENCE)
        found[kind] = peers_over(exchange, rank, 2)
    return found


def other(memory: int, links: list[socket.socket], orders: Any) -> None:
    """The second rank: adds as often as it is told to."""
    peers = connect(1, memory, links)
    while (order := orders.recv()) is not None:
        name, size, count = order
        x = np.zeros(size // 4, np.float32)
        orders.send(None)
        for _ in range(count):
            peers[name].all_reduce(x)


def measure(peers: dict[str, Any], orders: Any, name: str, size: int) -> float:
    """Seconds of one sum."""
    x = np.zeros(size // 4, np.float32)

    def run(count: int) -> float:
        orders.send((name, size, count))
        orders.recv()
        began = time.perf_counter()
        for _ in range(count):
            peers[name].all_reduce(x)
        return (time.perf_counter() - began) / count

    return run(max(3, min(20_000, int(SECONDS / run(5)))))


def sums() -> None:
    memory = os.memfd_create("bench-ranks")
    os.truncate(memory, peers_bytes(2))
    pairs = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            mine = socket.create_connection(listener.getsockname())
            pairs.append((mine, listener.accept()[0]))
    fork = multiprocessing.get_context("fork")
    orders, theirs = fork.Pipe()
    process = fork.Process(target=other, args=(memory, [pair[1] for pair in pairs], theirs), daemon=True)
    process.start()
    peers = connect(0, memory, [pair[0] for pair in pairs])
    print(
        "| message | shared memory | TCP | gloo | copy | gloo beside shared memory |\n|---|---:|---:|---:|---:|---:|"
    )
    for size in SIZES:
        source, target = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)
        rounds: dict[str, list[float]] = {name: [] for name in (*peers, "copy")}
        for _ in range(ROUNDS):
            for name in peers:
                rounds[name].append(measure(peers, orders, name, size))
            rounds["copy"].append(repeated(lambda a=target, b=source: np.copyto(a, b)))  # type: ignore[misc]
        found = {name: statistics.median(seconds) * 1e6 for name, seconds in rounds.items()}
        ratio = statistics.median(
            gloo / own for gloo, own in zip(rounds["gloo"], rounds["shared memory"], strict=True)
        )
        cells = " | ".join(f"{found[name]:.1f} µs" for name in ("shared memory", "tcp", "gloo", "copy"))
        print(f"| {size >> 10} KiB | {cells} | {ratio:.0f} x |", flush=True)
    orders.send(None)
    process.join()


def speed(llm: LLM) -> tuple[float, float, float]:
    """Tokens per second of one sequence that generates, of eight, and of a prompt."""
    prompt = {"prompt_token_ids": [7 + i % 900 for i in range(512)]}
    began = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    first = time.perf_counter() - began
    began = time.perf_counter()
    llm.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=33, ignore_eos=True), use_tqdm=False)
    one = 32 / (time.perf_counter() - began)
    began, several = time.perf_counter(), [{"prompt_token_ids": [5 + i]} for i in range(8)]
    llm.generate(several, SamplingParams(max_tokens=17, ignore_eos=True), use_tqdm=False)
    return one, 8 * 16 / (time.perf_counter() - began), 512 / first


def model(name: str) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "1 x 2 threads": {"threads": 2},
        "tp 2 x 1 thread": {"threads": 2, "tensor_parallel_size": 2},
        "pp 2 x 1 thread": {"threads": 2, "pipeline_parallel_size": 2},
    }
    found: dict[str, list[tuple[float, ...]]] = {label: [] for label in layouts}
    engines = {
        label: LLM(name, max_model_len=1024, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
        for label, options in layouts.items()
    }
    for llm in engines.values():
        speed(llm)
    for _ in range(4):
        for label, llm in engines.items():
            found[label].append(speed(llm))
            shown = ", ".join(f"{value:.1f}" for value in found[label][-1])
            print(f"{label}: one sequence, eight, a prompt: {shown} tok/s", flush=True)
    first, *others = layouts
    for label in others:
        ratios = zip(found[first], found[label], strict=True)
        columns = zip(*([b / a for a, b in zip(*pair, strict=True)] for pair in ratios), strict=True)
        shown = ", ".join(f"{statistics.median(column):.2f} x" for column in columns)
        print(f"{label} beside {first}: {shown}")
    for llm in engines.values():
        llm.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    named = parser.parse_args().model
    if named:
        model(named)
    else:
        sums()
