"""Many models under load: each answer must be what it was on an idle server. For tests, and for bench/models.py."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.serve.running import Server
from tests.waiting import wait_until

MB = 1 << 20


def listed(folder: Path, *models: dict[str, Any]) -> str:
    """Write a file of models for --models."""
    path = folder / "models.yaml"
    path.write_text(json.dumps({"models": list(models)}))  # JSON is YAML
    return str(path)


def entry(name: str, path: str, options: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "path": path,
        "options": {"kv_cache_memory_bytes": 8 * MB, **(options or {})},
        **more,
    }


def children(server: Server, count: int | None = None) -> list[int]:
    """The processes of engines, and last the one that waits for its model; once there are `count` if that is given."""
    wait_until(lambda: count is None or len(children(server)) == count)
    path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def cards(server: Server) -> list[dict[str, Any]]:
    with server.client as client:
        return [card for card in client.get("/v1/models").json()["data"] if "state" in card]


def counted(server: Server) -> list[tuple[int, int]]:
    """How many requests of each model run and wait."""
    return [(card["running"], card["waiting"]) for card in cards(server)]


def private(pid: int) -> int:
    """Bytes of a process that no file holds."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Anonymous:")) << 10


@dataclass
class Ask:
    """A request, and where its answer is."""

    path: str
    body: dict[str, Any]

    def answer(self, client: httpx.Client) -> str:
        """The answer without what names it, as text."""
        got = client.post(self.path, json=self.body)
        if got.status_code != 200:
            return f"{got.status_code}: {got.text}"
        told = got.json()
        return json.dumps([told.get("choices"), [one["embedding"] for one in told.get("data", ())]])

    @property
    def model(self) -> str:
        return str(self.body["model"])


def completion(model: str, seed: int = 0, **more: Any) -> Ask:
    body = {
        "model": model,
        "prompt": [3, 1, 4, 1, 5],
        "seed": seed,
        "temperature": 1,
        "return_token_ids": True,
    }
    return Ask("/v1/completions", {**body, "max_tokens": 24, "ignore_eos": True, **more})


def chat(model: str, seed: int = 0) -> Ask:
    words = [{"role": "user", "content": f"A story of {seed} dogs"}]
    return Ask("/v1/chat/completions", {"model": model, "messages": words, "seed": seed, "max_tokens": 16})


def embedding(model: str, seed: int = 0) -> Ask:
    return Ask("/v1/embeddings", {"model": model, "input": ["a b c", "the d of e " * (1 + seed % 3)]})


@dataclass
class Crowd:
    """Clients that ask in turn until they are told to end."""

    server: Server
    asks: list[Ask]
    right: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        with self.client() as client:
            self.right = [ask.answer(client) for ask in self.asks]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, timeout=300)

    def run(
        self, clients: int, seconds: float, most: int = 1 << 30, enough: Callable[[], bool] = lambda: False
    ) -> None:
        """Ask with so many clients until it is enough, each of them everything in an order of its own."""
        limit, numbers, lock = time.monotonic() + seconds, itertools.count(), threading.Lock()

        def ask(place: int) -> None:
            with self.client() as client:
                while time.monotonic() < limit and not enough() and (number := next(numbers)) < most:
                    which = (number * 7 + place) % len(self.asks)
                    asked, began = self.asks[which], time.monotonic()
                    found = asked.answer(client)
                    with lock:
                        self.done[asked.model] += 1
                        took = time.monotonic() - began
                        self.longest[asked.model] = max(self.longest[asked.model], took)  # type: ignore[call-overload]
                        if found != self.right[which]:
                            self.wrong.append(f"{asked}: {found}")

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(ask, range(clients)))


def rounds(server: Server, names: Iterable[str], count: int) -> list[tuple[int, int]]:
    """Ask each model in turn; return the private bytes of the server, and the most of an engine, after each round."""
    found = []
    for _ in range(count):
        most = 0
        for name in names:
            assert server.post("/v1/completions", completion(name).body).status_code == 200
            for pid in children(server):
                with suppress(OSError):  # it has ended meanwhile
                    most = max(most, private(pid))
        found.append((private(server.process.pid), most))
    return found


def spells(server: Server, name: str) -> list[float]:
    """For how many seconds a model was loaded, each time that it was, by the log."""
    found, began = [], None
    for line in server.lines:
        hours, minutes, seconds = map(float, line.split()[0].split(":")) if line[:1].isdigit() else (0, 0, 0)
        at = (hours * 60 + minutes) * 60 + seconds
        if f": loaded {name} " in line:
            began = at
        elif line.endswith(f": unloaded {name}") and began is not None:
            found.append((at - began) % 86400)
    return found


def turns(server: Server) -> Counter[str]:
    """How often each model was loaded, by the log."""
    return Counter(line.partition(": loaded ")[2].split()[0] for line in server.lines if ": loaded " in line)
