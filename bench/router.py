"""The router beside the server itself, asked in turns: short answers, streams, and the processor's time of each.

    python bench/router.py --half 1000 --open 1000 --many 100000

Rounds ask the server directly, then through the router; compare within a round, on an idle machine. Processor's time is
that of the router and of the server's HTTP process. `--many` sends so many short answers more and shows the router's
memory before and after, `--open` opens streams at once, and `--half` lets clients begin requests that they never end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import uvloop

from quire.bench.client import Client, Outcome, Target
from quire.serve.system_limits import raise_descriptor_limit
from quire.serve.upstream import Lost, Upstream, message

PATH = "/v1/completions"
BODY = {"prompt": "Once upon a time, a dog", "ignore_eos": True}
SHORT = 8
"""Tokens of a short answer."""


@dataclass
class Process:
    """The server or the router."""

    url: str
    process: subprocess.Popen[str]

    @property
    def seconds(self) -> float:
        """The processor's time of this process, without its children's."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def megabytes(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextlib.contextmanager
def running(*words: str) -> Iterator[Process]:
    """A command that serves."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "quire.cli",
        *words,
        "--port",
        str(port),
        "--log-level",
        "warning",
        "--uvicorn-log-level",
        "warning",
    ]
    with subprocess.Popen(command, text=True) as process:
        try:
            yield Process(f"http://127.0.0.1:{port}", process)
        finally:
            process.terminate()


async def ready(place: Process) -> None:
    """Wait until a request is answered."""
    for _ in range(600):
        with contextlib.suppress(Lost, AssertionError):
            return await short(place, 1, 1)
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{place.url} does not answer")


async def short(place: Process, requests: int, clients: int) -> None:
    """Ask for whole answers, over a connection for each client."""
    target = Target.from_url(place.url)
    upstream, head = Upstream(target.address, 60), target.head("POST", PATH)
    body = json.dumps({**BODY, "max_tokens": SHORT}).encode()
    asked = message(head, ((b"content-type", b"application/json"),), body)
    left = iter(range(requests))

    async def one() -> None:
        for _ in left:
            status, said = await upstream.whole(asked)
            assert status == 200, said

    try:
        await asyncio.gather(*(one() for _ in range(clients)))
    finally:
        upstream.close()


async def streams(place: Process, count: int, tokens: int) -> list[float]:
    """Ask for streams at once; returns the seconds between events."""
    client = Client(Target.from_url(place.url), 600)
    outcomes = [Outcome() for _ in range(count)]
    body = json.dumps({**BODY, "max_tokens": tokens, "stream": True}).encode()
    await asyncio.gather(*(client.stream(PATH, body, outcome) for outcome in outcomes))
    client.close()
    assert all(outcome.ok for outcome in outcomes), {outcome.error for outcome in outcomes}
    return [gap for outcome in outcomes for gap in outcome.itls]


@dataclass
class Figures:
    """What one place did in a round, and its share of each process's time, in microseconds."""

    rate: float
    micros: dict[str, float]
    gap: float = 0.0


async def measure(
    places: dict[str, Process], count: int, job: Callable[[], Coroutine[None, None, object]]
) -> Figures:
    before, began = {name: place.seconds for name, place in places.items()}, time.perf_counter()
    gaps = await job()
    took = time.perf_counter() - began
    micros = {name: 1e6 * (place.seconds - before[name]) / count for name, place in places.items()}
    gap = 1e3 * float(np.percentile(gaps, 99)) if isinstance(gaps, list) else 0.0
    return Figures(count / took, micros, gap)


def told(name: str, found: list[Figures]) -> None:
    """Print the medians of the rounds, and the lowest and highest rate."""
    rates = [one.rate for one in found]
    shown = f"{name:26} {statistics.median(rates):8.0f}/s ({min(rates):.0f} to {max(rates):.0f})"
    if any(one.gap for one in found):
        shown += f"  p99 of gaps {statistics.median(one.gap for one in found):6.1f} ms"
    for process in found[0].micros:
        shown += f"  {process} {statistics.median(one.micros[process] for one in found):.0f} us"
    print(shown, flush=True)


async def compare(options: argparse.Namespace, places: dict[str, Process]) -> None:
    """Measure both in turns."""
    found = defaultdict[str, list[Figures]](list)
    job: Callable[[], Coroutine[None, None, object]]
    tokens = options.streams * options.tokens
    for _ in range(options.rounds):
        for name, place in places.items():
            job = partial(short, place, options.requests, options.clients)
            found[f"short answers, {name}"].append(await measure(places, options.requests, job))
        for name, place in places.items():
            job = partial(streams, place, options.streams, options.tokens)
            found[f"tokens in streams, {name}"].append(await measure(places, tokens, job))
    for what in ("short answers", "tokens in streams"):
        direct, routed = found[f"{what}, server"], found[f"{what}, router"]
        told(f"{what}, server", direct)
        told(f"{what}, router", routed)
        shares = [two.rate / one.rate for one, two in zip(direct, routed, strict=True)]
        print(f"  the router's rate is {statistics.median(shares):.3f} of the server's")


async def half(place: Process, count: int) -> None:
    """Begin requests and never end them, while another client is answered as ever."""
    parts = urlsplit(place.url)
    begun = []
    for number in range(count):
        begun.append(socket.create_connection((parts.hostname or "", parts.port or 0)))
        rest = "" if number % 2 else "host: localhost\r\ncontent-length: 999\r\n\r\n{"
        begun[-1].sendall(f"POST {PATH} HTTP/1.1\r\n{rest}".encode())
    began = time.perf_counter()
    await short(place, 200, 1)
    print(
        f"beside {count} half requests: {200 / (time.perf_counter() - began):.0f} short answers/s of one client"
    )
    for one in begun:
        one.close()


async def run(options: argparse.Namespace, places: dict[str, Process]) -> None:
    for place in places.values():
        await ready(place)
    router = places["router"]
    print(f"router at rest: {router.megabytes:.0f} MB")
    if options.rounds:
        await compare(options, places)
        print(f"router after that: {router.megabytes:.0f} MB")
    if options.half:
        await half(router, options.half)
        print(f"router after that: {router.megabytes:.0f} MB")
    if options.open:
        await streams(router, options.open, options.tokens)
        print(f"router after {options.open} streams at once: {router.megabytes:.0f} MB")
    for part in range(10 if options.many else 0):
        await short(router, options.many // 10, options.clients)
        print(
            f"router after {options.many * (part + 1) // 10} short answers: {router.megabytes:.1f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--open", type=int, default=0)
    parser.add_argument("--half", type=int, default=0)
    options = parser.parse_args()
    raise_descriptor_limit()
    with tempfile.NamedTemporaryFile("w") as key:
        key.write("a key of this run alone")
        key.flush()
        word = ("--router-api-key-file", key.name, "--disable-uvicorn-access-log")
        with (
            running("serve", "--threads", "1", "--max-num-seqs", "64", *word) as server,
            running("route", "--replica", server.url, *word) as router,
        ):
            uvloop.run(run(options, {"server": server, "router": router}))


if __name__ == "__main__":
    main()
