"""A fault in what one request needs ends that request alone: every slot part, gate and step of a program is broken.

All are found in the package and in the running engine, so that new ones are broken too.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

import quire
from quire import LLM, LoRARequest, SamplingParams
from quire.client.adapters import with_adapter
from quire.client.programs import ProgramCall, program_request
from quire.engine.core import EngineCore
from quire.engine.directory import ASSETS, SHIPPED_MODEL
from quire.engine.registry import FEATURES
from quire.params import BeamRules, StructuredOutputsParams
from quire.program.interpreter import Interpreter
from quire.steps import AnyStep, InRole, Step
from quire.types import Delta, FinishReason, Request
from tests.adapter_files import write_adapter

PROMPT = "Once upon a time there was a dog"
STEPS: list[dict[str, Any]] = [
    {"type": "text", "text": PROMPT},
    {"type": "gen", "name": "a", "max_tokens": 3, "temperature": 0},
    {"type": "insert", "name": "a"},
    {"type": "select", "name": "b", "choices": ["yes", "no"]},
    {"type": "compute"},
    {
        "type": "fork",
        "branches": [[{"type": "gen", "name": "c", "max_tokens": 3, "temperature": 0}]] * 2,
    },
    {"type": "join"},
    {"type": "repeat", "times": 2, "steps": [{"type": "text", "text": " and"}]},
    {"type": "if", "condition": {"variable": "a", "contains": "x"}, "then": []},
    {"type": "separate_reasoning", "model_type": "qwen3", "steps": [{"type": "text", "text": " so"}]},
]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.0, "ignore_eos": True},
    "drawn": {"temperature": 1.0, "repetition_penalty": 1.2, "n": 2},
    "adapted": {"temperature": 0.0, "ignore_eos": True},
    "constrained": {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{30}")},
    "scored": {"prompt_logprobs": 1, "logprobs": 1},
    "predicted": {"temperature": 0.0, "prediction": "named Lily. She was"},
    "processed": {"logits_processors": [lambda output, row: row]},
    "selected": {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"], select=True)},
    "beam": {"n": 2, "beam": BeamRules(beam_width=2)},
    "program": {},
    "pooled": {},
}


class BrokenError(Exception):
    """What is injected."""


Results = dict[str, tuple[Any, ...]]


class World:
    """An engine, the requests of every kind in it, and what each answers alone."""

    def __init__(self, llm: LLM, adapter: str) -> None:
        self.llm, self.adapter = llm, LoRARequest("a", 1, adapter)
        self.core: EngineCore = llm._core  # type: ignore[assignment]
        self.alone: Results = {}
        for kind in KINDS:
            self.alone |= self.run([self.request(kind, kind)])

    def request(self, kind: str, id: str) -> Request:
        front, given = self.llm._front, dict(KINDS[kind])
        if kind == "program":
            return program_request(front, id, msgspec.convert({"steps": STEPS}, ProgramCall))
        if kind == "pooled":
            return front.pooled(id, front.encode(PROMPT))
        made = front.request(id, PROMPT, SamplingParams(max_tokens=10, seed=7, **given))
        if kind == "adapted":
            (found,) = self.llm._adapters_of(self.adapter, 1)
            made = with_adapter(made, found, front.info)
        return made

    def run(self, requests: list[Request]) -> Results:
        """What each request answers: tokens, ends, scores, vectors, events."""
        found: dict[str, list[Any]] = {request.id: [] for request in requests}
        with self.llm._submit(requests) as call:
            for deltas in call:
                for delta in deltas:
                    found[delta.request_id].append(delta)
        return {id: answer(deltas) for id, deltas in found.items()}

    def rest(self) -> None:
        """Nothing is left, and everything answers as before."""
        assert self.run([self.request(kind, kind) for kind in KINDS]) == self.alone
        stats = self.llm.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_programs) == (0,) * 4
        self.llm._engine.ask(lambda core: core.scheduler.check())  # type: ignore[attr-defined]

    def beside(self, victims: list[str]) -> list[tuple[Any, ...]]:
        """Run victims of these kinds among neighbours of all kinds, which must not notice; the victims' answers."""
        neighbours = [self.request(kind, kind) for kind in KINDS]
        broken = [self.request(kind, f"victim {kind}") for kind in victims]
        half = len(neighbours) // 2
        found = self.run([*neighbours[:half], *broken, *neighbours[half:]])
        assert {kind: found[kind] for kind in KINDS} == self.alone
        return [found[one.id] for one in broken]


def answer(deltas: list[Delta]) -> tuple[Any, ...]:
    samples: dict[int, list[int]] = {}
    scores, ends, events = [], {}, []
    for delta in deltas:
        samples.setdefault(delta.index, []).extend(delta.tokens)
        scores += [*(delta.logprobs or ()), *(delta.prompt_logprobs or ())]
        events += [(e.kind, e.lane, e.name, e.value) for e in delta.events or ()]
        if delta.finish_reason is not None:
            ends[delta.index] = (delta.finish_reason, delta.error, delta.embedding)
    assert set(ends) == set(samples)
    return samples, scores, ends, sorted(map(repr, events))


def failed(found: tuple[Any, ...]) -> bool:
    return any(reason is FinishReason.ERROR for reason, _, _ in found[2].values())


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    adapter = write_adapter(tmp_path_factory.mktemp("adapter"), ASSETS / SHIPPED_MODEL, 0)
    options = {"enable_lora": True, "max_loras": 2, "max_model_len": 256, "max_num_seqs": 32}
    with LLM(async_scheduling=request.param, num_gpu_blocks_override=600, **options) as llm:
        yield World(llm, adapter)


def classes(*methods: str) -> set[type]:
    """The package's classes with these methods, but for protocols."""
    found = set()
    for module in pkgutil.walk_packages(quire.__path__, "quire."):
        if module.name.split(".")[1] in ("engine", "runtime", *FEATURES):
            for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if kind.__module__ == module.name and all(hasattr(kind, name) for name in methods):
                    found.add(kind)
    return {kind for kind in found if not getattr(kind, "_is_protocol", False)}


@contextmanager
def replaced(
    place: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    whole = getattr(place, name)
    setattr(place, name, wrap(whole))
    try:
        yield
    finally:
        delattr(place, name) if not isinstance(place, type) else setattr(place, name, whole)


PARTS = sorted(classes("set", "clear", "rows", "launch", "active", "greedy"), key=lambda kind: kind.__name__)
GATES = sorted(classes("hold", "remove"), key=lambda kind: kind.__name__)


def test_something_is_found() -> None:
    assert {kind.__name__ for kind in PARTS} >= {
        "SamplingPart",
        "GrammarPart",
        "PoolingPart",
        "SpeculationPart",
    }
    assert {kind.__name__ for kind in GATES} >= {"GrammarGate", "AdapterArena", "Texts"}


@pytest.mark.parametrize("method", ["set", "rows", "launch", "collect", "clear"])
@pytest.mark.parametrize("part", PARTS, ids=lambda kind: kind.__name__)
def test_a_slot_part_that_fails_ends_the_request_it_fails_for(world: World, part: type, method: str) -> None:
    runner: Any = world.core._executor
    (one,) = (found for found in runner.parts if type(found) is part)
    names: dict[int, str] = {}  # by slot
    now: list[int] = []  # slots of this step
    left: dict[int, str] = {}  # of freed slots
    hit: list[str] = []

    def note(whole: Callable[..., Any]) -> Callable[..., Any]:
        def execute(batch: Any, begun: Any) -> Any:
            left.update((slot, names.get(slot, "")) for slot in batch.freed)
            names.update((new.slot, new.request.id) for new in batch.new)
            now[:] = [seq.slot for seq in batch.seqs]
            return whole(batch, begun)

        return execute

    def broken(whole: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*args: Any) -> Any:
            slots = {"set": lambda: [args[0].slot], "clear": lambda: [args[0]]}.get(method, lambda: now)()
            victims = [names[slot] for slot in slots if "victim" in names.get(slot, "")]
            if method == "clear":  # once: the slot is cleared again for the next one
                victims = [name for slot in slots if "victim" in (name := left.pop(slot, ""))]
            if victims:
                hit.extend(victims)
                raise BrokenError("injected")
            return whole(*args)

        return fail

    def broken_later(whole: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            found = whole(*args)
            return found and broken(found)

        return launch

    where, wrap = ("launch", broken_later) if method == "collect" else (method, broken)
    with replaced(runner, "_launch", note), replaced(one, where, wrap):
        for kind in KINDS:
            hit.clear()
            (found,) = world.run([world.request(kind, "victim")]).values()
            served = bool(hit) and method != "clear"  # else the part fails only where others need it
            assert failed(found) if served else found == world.alone[kind], kind
            hit.clear()
            (found,) = world.beside([kind])
            assert failed(found) if served else found == world.alone[kind], kind
        if method in ("set", "clear"):
            assert hit
        world.beside(["plain", "constrained", "program"])
    world.rest()


@pytest.mark.parametrize(
    ("gate", "method"),
    [(gate, name) for gate in GATES for name in ("hold", "remove", "keep", "release") if hasattr(gate, name)],
)
def test_a_gate_that_fails_ends_the_request_it_fails_for(world: World, gate: type, method: str) -> None:
    def broken(whole: Callable[..., Any]) -> Callable[..., Any]:
        def fail(self: Any, request: Any, *more: Any) -> Any:
            if "victim" in getattr(request, "id", request):
                whole(self, request, *more)
                raise BrokenError("injected")
            return whole(self, request, *more)

        return fail

    with replaced(gate, method, broken):
        for kind in KINDS:
            (found,) = world.beside([kind])
            assert failed(found) or method != "hold" or (gate.__name__ == "Texts" and kind != "program")
    world.rest()


def test_a_step_of_a_program_that_fails_ends_its_program(world: World) -> None:
    """Each kind of step fails, at its beginning and at its end."""
    assert set(Step.__subclasses__()) - {InRole} == set(map(type, steps_of(STEPS)))
    for kind in Step.__subclasses__():
        for late in (False, True):

            def broken(whole: Callable[..., Any], kind: type = kind, late: bool = late) -> Callable[..., Any]:
                async def fail(self: Interpreter, lane: Any, step: AnyStep) -> None:
                    concerned = isinstance(step, kind) and "victim" in self._caller._run.request.id
                    if concerned and not late:
                        raise BrokenError("injected")
                    await whole(self, lane, step)
                    if concerned:
                        raise BrokenError("injected")

                return fail

            with replaced(Interpreter, "_step", broken):
                found = world.beside(["program", "plain", "beam", "selected"])
                assert [failed(one) for one in found] == [kind is not InRole, False, False, False]
    world.rest()


def steps_of(steps: list[dict[str, Any]]) -> Iterator[AnyStep]:
    for step in msgspec.convert(steps, list[AnyStep]):
        yield step
        inner = [getattr(step, "steps", []), getattr(step, "then", []), *getattr(step, "branches", [])]
        for some in inner:
            yield from some
