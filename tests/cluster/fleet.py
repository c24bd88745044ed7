"""Replicas of the shipped model as processes that a test kills, freezes and starts again, and what clients must see."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import threading
import time
from typing import Any, NamedTuple

import httpx

from tests.cluster.stand_in import KEY, Running
from tests.serve.running import Server, start
from tests.serve.test_resume import KINDS, joined

STEPS = [{"type": "text", "text": "Once"}, {"type": "gen", "name": "a", "max_tokens": 20}]
LANES = [
    {"type": "text", "text": "Tom has a pet. It is"},
    {"type": "select", "name": "pet", "choices": [" a dog", " a cat"]},
    {
        "type": "fork",
        "branches": [
            [{"type": "text", "text": f" It {what}"}, {"type": "gen", "name": "fact", "max_tokens": 12}]
            for what in ("likes", "has", "is called")
        ],
    },
    {"type": "join"},
]
# With several choices, the first event of a later one has the scores of the prompt only if they have come by then.
ONE = {"logprobs": {"n": 1}, "prompt-logprobs": {"n": 1}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (path, {"model": "m", **body, **ONE.get(name, {})}) for name, (path, body) in KINDS.items()},
    "whole adapter": ("/v1/completions", {"prompt": "A dog", "max_tokens": 20, "model": "tale"}),
    "long": ("/v1/completions", {"prompt": "A", "max_tokens": 200, "ignore_eos": True, "stream": True}),
    "program": ("/v1/programs", {"steps": STEPS, "stream": True}),
    "lanes": ("/v1/programs", {"steps": LANES, "stream": True}),
    "whole": ("/v1/completions", {"prompt": "A dog", "max_tokens": 40, "n": 2, "logprobs": 1}),
    "long whole": ("/v1/completions", {"prompt": "A", "max_tokens": 200, "ignore_eos": True}),
    "beams": ("/v1/completions", {"prompt": "A dog", "max_tokens": 8, "use_beam_search": True, "n": 2}),
    "whole chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "A dog?"}], "max_tokens": 30},
    ),
}
ENDS = ("data: [DONE]", "event: message_stop", "event: response.completed", "event: response.incomplete")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Fleet:
    """Three replicas."""

    def __init__(self, count: int = 3) -> None:
        self.ports = [free_port() for _ in range(count)]
        self.servers: list[Server | None] = [None] * count
        self.start_all()

    def start_all(self) -> None:
        """Start them side by side."""
        starting = [threading.Thread(target=self.start, args=(place,)) for place in range(len(self.ports))]
        for one in starting:
            one.start()
        for one in starting:
            one.join()
        assert all(self.servers)

    def start(self, place: int) -> None:
        self.servers[place] = start(
            maker="tests.serve.slowed", model="", threads=1, router_api_key=[KEY], served_model_name=["m"],
            tool_call_parser="hermes", reasoning_parser="qwen3", max_model_len=512, port=self.ports[place],
            kv_cache_memory_bytes=1 << 26, shutdown_timeout=5,
            enable_lora=True, lora_modules=["tale=quire-stories-lora-oldtale"],
        )  # fmt: skip

    def options(self) -> list[str]:
        return [word for port in self.ports for word in ("--replica", f"http://127.0.0.1:{port}")]

    def disturb(self, place: int, how: str) -> None:
        """Do one harm, and let the replica be well again after it."""
        server = self.servers[place]
        assert server is not None
        if how == "engine":
            os.kill(server.engine_pid, signal.SIGKILL)
            return
        if how in ("freeze", "freeze engine"):
            pid = server.process.pid if how == "freeze" else server.engine_pid
            os.kill(pid, signal.SIGSTOP)
            time.sleep(5)
            os.kill(pid, signal.SIGCONT)
            return
        server.process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        server.wait()
        self.start(place)

    def kill_all(self) -> None:
        """Kill them at once."""
        running = [server for server in self.servers if server is not None]
        for server in running:
            server.process.kill()
        for server in running:
            server.wait()
        self.servers = [None] * len(self.ports)


class Wait(NamedTuple):
    """Seconds without bytes, since the time `at`."""

    seconds: float
    kind: str
    at: float


def ask(running: Running, kind: str, waits: list[Wait] | None = None) -> str:
    """The answer to one request, whole. `waits` gets the longest time without bytes."""
    path, body = ASKED[kind]
    headers = {"x-request-id": f"id-{kind.replace(' ', '-')}"}
    parts, last, longest = [], time.monotonic(), Wait(0.0, kind, 0.0)
    with (
        httpx.Client(base_url=running.url, timeout=300) as client,
        client.stream("POST", path, json=body, headers=headers) as answer,
    ):
        for part in answer.iter_text():
            longest, last = max(longest, Wait(time.monotonic() - last, kind, last)), time.monotonic()
            parts.append(part)
        text = "".join(parts)
        if waits is not None:
            waits.append(longest)
        assert answer.status_code == 200, (kind, text)
    return text


def said(kind: str, text: str) -> Any:
    """What an answer says, however it was cut into events. It has one time and one end."""
    assert len(set(re.findall(r'"created(?:_at)?": ?[0-9.]+', text))) <= 1, kind
    text = re.sub(r'"created(?:_at)?": ?[0-9.]+', '"created":0', text)
    if not ASKED[kind][1].get("stream"):
        whole = json.loads(text)
        whole.pop("usage", None)
        return whole
    events = [block for block in text.split("\n\n")[:-1] if not block.startswith(":")]
    assert sum(block.startswith(ENDS) for block in events) == 1, (kind, text[-300:])
    assert events[-1].startswith(ENDS), kind
    if kind in ("program", "lanes"):
        found = [re.sub(r'"cached_tokens":\d+', "", event) for event in events]
        return sorted(found, key=_lane)  # on busy cores lanes take turns in another order
    found = joined(events)
    for usage in [one for parts in found.values() for one in parts if isinstance(one, dict)]:
        for cached in ("prompt_tokens_details", "cache_read_input_tokens", "input_tokens"):
            usage.pop(cached, None)  # another replica finds other prefixes in its cache
    return found


def _lane(event: str) -> str:
    found = re.search(r'"lane":"([^"]*)"', event)
    return "~" if found is None else found[1]


class Load:
    """Clients that ask all kinds again and again, and compare."""

    def __init__(self, running: Running, clients: int, kinds: list[str] | None = None) -> None:
        self.running, self.kinds = running, kinds or list(ASKED)
        alone = {kind: ask(running, kind) for kind in self.kinds}
        self.wanted = {kind: said(kind, text) for kind, text in alone.items()}
        self.classes = {
            kind: set(re.findall(r'"system_fingerprint": ?"(\w+)"', text)) for kind, text in alone.items()
        }
        self.wrong: list[str] = []
        self.count = 0
        self.waits: list[Wait] = []
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]
        for one in self.threads:
            one.start()

    def _run(self, number: int) -> None:
        order = random.Random(number)
        while not self.over.is_set():
            kind = order.choice(self.kinds)
            try:
                if (got := said(kind, ask(self.running, kind, self.waits))) != self.wanted[kind]:
                    self.wrong.append(f"{kind}: got {got} instead of {self.wanted[kind]}")
            except (AssertionError, httpx.HTTPError, ValueError, KeyError) as error:
                self.wrong.append(f"{kind}: {type(error).__name__} {error}")
            self.count += 1

    @property
    def longest(self) -> list[Wait]:
        """The waits, longest first."""
        return sorted(self.waits, reverse=True)

    def end(self) -> None:
        self.over.set()
        for one in self.threads:
            one.join()
