"""The arena of adapters: who is loaded, who waits, who is evicted; no request is lost and none waits for ever."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.gates import Gates
from quire.engine.verbs import LoadAdapter, UnloadAdapter
from quire.errors import EngineError, ModelError
from quire.lora.arena import AdapterArena
from quire.params import SamplingParams
from quire.types import Request


class Files:
    """Adapters whose files are their names; `broken` cannot be read, `gate` holds up loading."""

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}
        self.reads: list[str] = []
        self.content: dict[str, str] = {}
        self.broken: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def read(self, path: Path) -> tuple[str, Callable[[], str]]:
        self.gate.wait(10)
        self.reads.append(path.name)
        if path.name in self.broken:
            raise ModelError(f"{path.name} is broken")
        digest = self.content.get(path.name, path.name)
        return digest, lambda: digest

    def place(self, slot: int, adapter: str | None) -> int:
        if adapter is None:
            self.slots.pop(slot, None)
            return 0
        self.slots[slot] = adapter
        return 10


class Arena(AdapterArena[str]):
    """An arena behind the gates of an engine."""

    def __init__(self, slots: int, files: Files) -> None:
        super().__init__(slots, files.read, files.place)
        self.gates = Gates([self])


def arena(slots: int) -> tuple[Arena, Files]:
    files = Files()
    return Arena(slots, files), files


def request(number: int, adapter: str, n: int = 1) -> Request:
    params = SamplingParams(n=n)
    return Request(
        id=str(number),
        tokens=[1],
        sampling=params,
        seed=0,
        max_tokens=1,
        adapter=adapter,
        adapter_path=adapter,
    )


def settle(made: Arena) -> list[tuple[str, str | None]]:
    """The requests that get their adapter, or an error, once all loads that have begun are done."""
    found: list[tuple[str, str | None]] = []
    quiet = 0
    while quiet < 2:  # the first look may only begin a load
        made.gates.wait()
        made._thread.submit(lambda: None).result(10)
        taken = made.gates.ready()
        quiet = 0 if taken else quiet + 1
        found += [(one.request.id, None if error is None else str(error)) for one, error in taken]
    return found


def test_a_request_waits_for_its_adapter_and_pins_it() -> None:
    made, files = arena(1)
    assert made.gates.take(request(1, "a"))
    assert settle(made) == [("1", None)]
    assert files.slots == {made.slot_of("a"): "a"}
    assert not made.gates.take(request(2, "a")), "a resident adapter is there at once"
    assert made.gates.take(request(3, "b"))
    assert settle(made) == [], "the only slot is pinned"
    made.release("1")
    made.release("2")
    assert settle(made) == [("3", None)]
    assert files.slots == {0: "b"}


def test_the_least_recently_used_adapter_makes_room() -> None:
    made, _ = arena(2)
    for number, name in enumerate("abac"):
        if made.gates.take(request(number, name)):
            settle(made)
        made.release(str(number))
    assert made.residents == ["a", "c"]


def test_a_pinned_adapter_stays() -> None:
    made, _ = arena(2)
    assert made.load(LoadAdapter("a", pin=True)).result(10) == "a"
    for number, name in enumerate("bcd"):
        made.gates.take(request(number, name))
        settle(made)
        made.release(str(number))
    assert made.residents == ["a", "d"]
    made.load(LoadAdapter("b", pin=True)).result(10)
    with pytest.raises(EngineError, match="max-cpu-loras"):
        made.load(LoadAdapter("c", pin=True)).result(10)


def test_nobody_overtakes_a_request_that_waits_for_a_slot() -> None:
    made, _ = arena(1)
    made.gates.take(request(0, "a"))
    settle(made)
    made.gates.take(request(1, "b"))
    assert made.gates.take(request(2, "a")), "else users of a could keep b waiting for ever"
    made.release("0")
    assert settle(made) == [("1", None)]
    made.release("1")
    assert settle(made) == [("2", None)]


def test_every_sample_of_a_request_pins() -> None:
    made, _ = arena(1)
    made.gates.take(request(0, "a", n=2))
    settle(made)
    made.release("0", 1)
    made.gates.take(request(1, "b"))
    assert settle(made) == []
    made.release("0", 0)
    assert settle(made) == [("1", None)]


def test_a_broken_adapter_ends_its_requests_alone() -> None:
    made, files = arena(1)
    files.broken.add("b")
    made.gates.take(request(0, "b"))
    made.gates.take(request(1, "a"))
    assert dict(settle(made)) == {"0": "b is broken", "1": None}
    with pytest.raises(ModelError, match="broken"):
        made.load(LoadAdapter("b")).result(10)


def test_files_that_changed_are_an_error_and_not_another_answer() -> None:
    made, files = arena(1)
    assert made.load(LoadAdapter("a")).result(10) == "a"
    made.gates.take(request(0, "b"))
    settle(made)
    made.release("0")
    files.content["a"] = "other"
    made.gates.take(request(1, "a"))
    ((number, error),) = settle(made)
    assert number == "1"
    assert "changed since it was loaded" in str(error)


def test_an_unloaded_adapter_leaves_once_nobody_uses_it() -> None:
    made, files = arena(2)
    made.gates.take(request(0, "a"))
    settle(made)
    made.unload(UnloadAdapter("a"))
    assert made.residents == ["a"]
    made.release("0")
    assert made.residents == []
    assert files.slots == {}


def test_an_aborted_request_that_waits_frees_what_it_reserved() -> None:
    made, files = arena(1)
    files.gate.clear()
    made.gates.take(request(0, "a"))
    made.gates.take(request(1, "b"))
    made.gates.remove("0")
    files.gate.set()
    assert settle(made) == [("1", None)]


def test_random_traffic_loses_nothing() -> None:
    rng, (made, files) = random.Random(0), arena(3)
    running: dict[str, str] = {}
    ended = 0
    for number in range(600):
        one = request(number, rng.choice("abcdefg"))
        if not made.gates.take(one):
            running[one.id] = str(one.adapter)
        for taken, error in made.gates.ready():
            assert error is None
            running[taken.request.id] = str(taken.request.adapter)
        for name in running.values():
            assert files.slots[made.slot_of(name)] == name, "a running request lost its adapter"
        if rng.random() < 0.1:
            made.unload(UnloadAdapter(rng.choice("abcdefg")))
        while running and (len(running) > 5 or rng.random() < 0.6):
            made.release(running.popitem()[0])
            ended += 1
    while ended < 600:
        for taken, error in made.gates.ready():
            assert error is None
            running[taken.request.id] = ""
        made.gates.wait()
        while running:
            made.release(running.popitem()[0])
            ended += 1
    assert not made._held
    assert not made._queued
    assert not len(made.gates)
    assert not made._requests
    assert sorted(made._free + list(made._resident.values())) == [0, 1, 2]
