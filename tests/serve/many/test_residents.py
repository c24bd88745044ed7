"""Which models are loaded: laws over random requests, and the order of moves in single cases."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.serve.many.residents import Resident, Residents

LOAD, UNLOAD = 1.0, 0.25  # seconds


@dataclass
class World:
    """Carries out decisions in virtual time, and checks the laws at each of them."""

    residents: Residents
    budget: int
    most: int
    now: float = 0.0
    queues: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    served: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    moves: list[tuple[float, str, str]] = field(default_factory=list)
    broken: frozenset[str] = frozenset()
    failures: int = 0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    count: Any = field(default_factory=itertools.count)

    def at(self, seconds: float, job: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.count), job))

    def ask(self, name: str, seconds: float) -> None:
        if self.residents.ask(name, self.now):
            self.run(name, self.now, seconds)
        else:
            self.queues[name].append((self.now, seconds))

    def give_up(self, name: str) -> None:
        if self.queues[name]:
            self.queues[name].pop()
            self.residents.leave(name)

    def run(self, name: str, asked: float, seconds: float) -> None:
        assert self.residents.models[name].state == "ready"
        self.waits[name].append(self.now - asked)
        self.served[name] += seconds
        self.at(seconds, lambda: self.residents.done(name, self.now))

    def open(self, name: str) -> None:
        waiting, self.queues[name] = self.queues[name], []
        for asked, seconds in waiting:
            self.run(name, asked, seconds)

    def load(self, name: str) -> None:
        if name in self.broken:
            self.residents.failed(name)
            self.failures += len(self.queues.pop(name))
        else:
            self.residents.loaded(name, self.now)
            self.open(name)

    def decide(self) -> None:
        while (action := self.residents.next(self.now)) is not None:
            verb, name = action
            self.moves.append((self.now, verb, name))
            model = self.residents.models[name]
            if verb == "load":
                self.at(LOAD, lambda name=name: self.load(name))  # type: ignore[misc]
            elif verb == "unload":
                assert not model.pinned
                assert not model.running
                self.at(UNLOAD, lambda name=name: self.residents.unloaded(name))  # type: ignore[misc]
            else:
                self.open(name)
        held = [m for m in self.residents.models.values() if m.state != "unloaded"]
        assert sum(m.size for m in held) <= self.budget
        assert len(held) <= self.most
        assert sum(m.state in ("loading", "unloading") for m in held) <= 1
        for name, model in self.residents.models.items():
            assert model.waiting == len(self.queues[name])
            assert model.running >= 0
            assert not (model.state == "ready" and model.waiting)

    def until(self, end: float) -> None:
        """Let time pass; wakes by itself only when `due` says so."""
        while True:
            self.decide()
            due = self.residents.due(self.now)
            following = min([end, *(e[0] for e in self.events[:1]), *([] if due is None else [due])])
            self.now = max(self.now, following)
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()
            if self.now >= end:
                self.decide()
                return


def world(
    *sizes: int,
    budget: int,
    most: int | None = None,
    idle: float | None = None,
    weights: tuple[float, ...] = (),
    pinned: tuple[int, ...] = (),
) -> World:
    models = [
        Resident("abcdefgh"[i], size, i in pinned, weights[i] if weights else 1.0)
        for i, size in enumerate(sizes)
    ]
    residents = Residents(models, budget, most=most, quantum=5.0, idle=idle)
    return World(residents, budget, len(sizes) if most is None else most)


REQUEST = st.tuples(
    st.floats(0, 3), st.integers(0, 5), st.floats(0.01, 20), st.sampled_from(["ask", "ask", "ask", "leave"])
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=6),
    st.integers(0, 12),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([None, 0.0, 4.0]),
    st.sets(st.integers(0, 5), max_size=2),
    st.sets(st.sampled_from("abcdef"), max_size=2),
    st.lists(REQUEST, max_size=60),
)
def test_laws(
    sizes: list[int],
    more: int,
    most: int | None,
    idle: float | None,
    pinned: set[int],
    broken: set[str],
    requests: list[tuple[float, int, float, str]],
) -> None:
    """The budget holds, pinned models stay, no running request is cut, and everybody is served in the end."""
    try:
        made = world(*sizes, budget=max(sizes) + more, most=most, idle=idle, pinned=tuple(pinned))
    except ConfigError:
        return
    made.broken = frozenset(broken)
    asked = 0
    for gap, number, seconds, kind in requests:
        made.until(made.now + gap)
        name = "abcdef"[number % len(sizes)]
        if kind == "ask":
            made.ask(name, seconds)
            asked += 1
        elif made.queues[name]:
            made.give_up(name)
            asked -= 1
    made.until(made.now + 60 * (len(requests) + 1))
    assert not any(made.queues.values())
    assert sum(map(len, made.waits.values())) + made.failures == asked
    assert all(model.running == 0 for model in made.residents.models.values())


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.floats(0.05, 2.0), st.floats(0.05, 2.0))
def test_nobody_starves_while_all_are_busy(count: int, room: int, gap: float, seconds: float) -> None:
    made = world(*[1] * count, budget=min(room, count))
    while made.now < 300:
        for name in "abcdef"[:count]:
            made.ask(name, seconds)
        made.until(made.now + gap)
    made.until(made.now + 200)
    longest = count * (5.0 + 2.0 + LOAD + UNLOAD) + 5.0
    for name in "abcdef"[:count]:
        assert max(made.waits[name]) <= longest
    if seconds > gap:  # else a queue is empty between two requests, and its model makes room at once
        switches = sum(verb == "load" for _, verb, _ in made.moves)
        assert switches <= count + (made.now / 5.0) * min(room, count)


def test_busy_models_take_turns_by_weight() -> None:
    made = world(2, 2, budget=3, weights=(3.0, 1.0))
    while made.now < 400:
        made.ask("a", 0.3)
        made.ask("b", 0.3)
        made.until(made.now + 0.2)
    loads = [(at, name) for at, verb, name in made.moves if verb == "load"]
    held: dict[str, float] = defaultdict(float)
    for (at, name), (end, _) in itertools.pairwise(loads):
        held[name] += end - at - LOAD - UNLOAD
    assert 2.5 < held["a"] / held["b"] < 3.5
    assert all(later - at >= 5 for (at, _), (later, _) in itertools.pairwise(loads))


def test_clients_that_ask_again_and_again_keep_their_turn() -> None:
    """Each sends its next request a moment after the last answer."""
    made = world(2, 2, budget=3, weights=(3.0, 1.0))
    while made.now < 200:
        for name in "ab":
            model = made.residents.models[name]
            if not (model.running or model.waiting):
                made.ask(name, 0.1)
        made.until(made.now + 0.02)
    loads = [(at, name) for at, verb, name in made.moves if verb == "load"]
    for (at, name), (end, _) in itertools.pairwise(loads[2:]):  # once both are known to be eager
        assert end - at - LOAD - UNLOAD == pytest.approx(15 if name == "a" else 5, abs=0.3)


def test_an_idle_model_makes_room_at_once_and_the_least_used_first() -> None:
    made = world(1, 1, 1, budget=2)
    for name in "abac":
        made.ask(name, 0.1)
        made.until(made.now + 3)
    assert [move[1:] for move in made.moves] == [
        ("load", "a"),
        ("load", "b"),
        ("unload", "b"),
        ("load", "c"),
    ]
    assert all(wait <= LOAD + UNLOAD + 0.01 for waits in made.waits.values() for wait in waits)


def test_only_what_must_leaves() -> None:
    """A large model waits for a large one; the small ones that were used before it stay."""
    made = world(1, 4, 4, budget=6)
    for name in "abc":
        made.ask(name, 0.1)
        made.until(made.now + 3)
    assert [move[1:] for move in made.moves][2:] == [("unload", "b"), ("load", "c")]


def test_a_drain_is_called_off_when_nobody_waits_any_more() -> None:
    made = world(1, 1, budget=1)
    made.ask("a", 30)
    made.until(10)
    made.ask("b", 1)
    made.until(11)
    made.ask("a", 1)
    assert made.residents.models["a"].state == "draining"
    made.give_up("b")
    made.until(12)
    assert made.residents.models["a"].state == "ready"
    assert made.waits["a"] == [1.0, 0.0]


def test_idle_models_are_unloaded_and_pinned_ones_stay() -> None:
    made = world(1, 1, budget=2, idle=10, pinned=(0,))
    made.ask("a", 1)
    made.ask("b", 1)
    made.until(100)
    assert {n: m.state for n, m in made.residents.models.items()} == {"a": "ready", "b": "unloaded"}
    made.residents.pin("a", False)
    made.until(101)
    assert made.residents.models["a"].state == "unloaded"


def test_an_operator_unloads_and_requests_load_again() -> None:
    made = world(1, budget=1)
    made.ask("a", 5)
    made.until(3)
    made.residents.unload("a")
    made.ask("a", 1)
    made.until(20)
    assert [verb for _, verb, _ in made.moves] == ["load", "unload", "load"]
    assert made.waits["a"] == [LOAD, pytest.approx(3 + UNLOAD + LOAD)]
    made.residents.pin("a", True)
    with pytest.raises(ConfigError, match="unpin it first"):
        made.residents.unload("a")


def test_a_pin_keeps_a_draining_model() -> None:
    made = world(1, 1, budget=2, most=2)
    made.ask("a", 30)
    made.until(2)
    made.residents.unload("a")
    made.residents.pin("a", True)
    made.until(3)
    assert made.residents.models["a"].state == "ready"


def test_an_engine_that_died_is_loaded_again_for_the_next_request() -> None:
    made = world(1, budget=1, pinned=(0,))
    made.ask("a", 1)
    made.until(5)
    made.residents.died("a")
    made.ask("a", 1)
    made.until(6)
    assert made.residents.models["a"].state == "unloading"
    made.residents.unloaded("a")
    made.until(9)
    assert len(made.waits["a"]) == 2


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a needs .* all models have"):
        world(9, budget=5)
    with pytest.raises(ConfigError, match="pinned models do not fit"):
        world(3, 3, budget=5, pinned=(0, 1))
    with pytest.raises(ConfigError, match="b finds no room beside the pinned"):
        world(3, 3, budget=5, pinned=(0,))
    made = world(3, 3, budget=5)
    with pytest.raises(ConfigError, match="finds no room"):
        made.residents.pin("a", True)
    assert not made.residents.models["a"].pinned
