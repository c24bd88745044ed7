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
from quire.lora import arena as module
from quire.lora.arena import AdapterArena
from quire.params import SamplingParams
from quire.types import Request


class Files:
    """Adapters whose files are their names; `broken` cannot be read, `gate` holds up loading."""

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}
        self.reads: list[str] = []
        self.built: list[str] = []
        self.content: dict[str, str] = {}
        self.broken: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def read(self, path: Path) -> tuple[str, Callable[[], str]]:
        self.gate.wait(60)
        self.reads.append(path.name)
        if path.name in self.broken:
            raise ModelError(f"{path.name} is broken")
        digest = self.content.get(path.name, path.name)

        def build() -> str:
            self.built.append(digest)
            return digest

        return digest, build

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


def request(number: int, adapter: str, n: int = 1, owner: str = "") -> Request:
    params = SamplingParams(n=n)
    return Request(
        id=str(number),
        tokens=[1],
        sampling=params,
        seed=0,
        max_tokens=1,
        adapter=adapter,
        adapter_path=adapter,
        owner=owner,
    )


def settle(made: Arena) -> list[tuple[str, str | None]]:
    """The requests that get their adapter, or an error, once all loads that have begun are done."""
    found: list[tuple[str, str | None]] = []
    quiet = 0
    while quiet < 2:  # the first look may only begin a load
        made.gates.wait()
        made._thread.submit(lambda: None).result(60)
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
    assert made.load(LoadAdapter("a", pin=True)).result(60) == "a"
    for number, name in enumerate("bcd"):
        made.gates.take(request(number, name))
        settle(made)
        made.release(str(number))
    assert made.residents == ["a", "d"]
    made.load(LoadAdapter("b", pin=True)).result(60)
    with pytest.raises(EngineError, match="max-cpu-loras"):
        made.load(LoadAdapter("c", pin=True)).result(60)


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
        made.load(LoadAdapter("b")).result(60)


def test_an_adapter_is_built_once_to_check_and_to_place_it() -> None:
    made, files = arena(1)
    for pin in (False, True):
        assert made.load(LoadAdapter("a", pin)).result(60) == "a"
    assert files.built == ["a"]
    assert files.slots == {0: "a"}
    assert made.load(LoadAdapter("b")).result(60) == "b"
    assert files.built == ["a", "b"], "it is checked, though no slot is left"
    assert files.slots == {0: "a"}


def test_files_that_changed_are_an_error_and_not_another_answer() -> None:
    made, files = arena(1)
    assert made.load(LoadAdapter("a")).result(60) == "a"
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


def test_the_owner_with_most_adapters_makes_room() -> None:
    made, _ = arena(4)
    for number, name in enumerate(("modest", "a1", "a2", "a3", "a4", "a5", "a6")):
        if made.gates.take(request(number, name, owner="b" if name == "modest" else "a")):
            settle(made)
        made.release(str(number))
    assert made.residents == ["modest", "a4", "a5", "a6"]


def test_a_new_adapter_keeps_no_request_waiting() -> None:
    """One that was evicted comes back while another user's load goes on."""
    made, files = arena(1)
    for number, name in enumerate("ab"):
        made.gates.take(request(number, name))
        settle(made)
        made.release(str(number))
    slow = threading.Event()
    read = files.read

    def reads(path: Path) -> tuple[str, Callable[[], str]]:
        if path.name == "new":
            slow.wait(60)
        return read(path)

    made._read = reads
    loading = made.load(LoadAdapter("new"))
    assert made.gates.take(request(7, "a"))
    assert settle(made) == [("7", None)]
    assert not loading.done()
    slow.set()
    assert loading.result(60) == "new"


def test_a_load_that_failed_is_remembered_while_its_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, files = arena(1)
    (tmp_path / "adapter_config.json").write_text("{}")
    path, now = str(tmp_path), 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    files.broken.add(tmp_path.name)
    for _ in range(5):
        with pytest.raises(ModelError, match="is broken"):
            made.load(LoadAdapter(path)).result(60)
    assert len(files.reads) == 1
    files.broken.clear()
    now = module.REMEMBER_SECONDS + 1
    assert made.load(LoadAdapter(path)).result(60) == tmp_path.name
    files.broken.add(tmp_path.name)
    (tmp_path / "adapter_config.json").write_text("{ }")
    with pytest.raises(ModelError, match="is broken"):
        made.load(LoadAdapter(path)).result(60)
    files.broken.clear()
    (tmp_path / "adapter_config.json").write_text("{  }")
    assert made.load(LoadAdapter(path)).result(60) == tmp_path.name


def test_a_load_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made, files = arena(1)
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    read = files.read

    def slow(path: Path) -> tuple[str, Callable[[], str]]:
        nonlocal now
        now += module.LOAD_SECONDS + 1
        return read(path)

    made._read = slow
    with pytest.raises(EngineError, match="takes more than 60 s to load"):
        made.load(LoadAdapter("a")).result(60)
    assert made.residents == []
    assert made.load(LoadAdapter("b", pin=True)).result(60) == "b"


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
