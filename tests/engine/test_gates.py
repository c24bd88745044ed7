"""Gates: what a request waits for, one after the other; a fault of a gate ends one request."""

from __future__ import annotations

from concurrent.futures import Future

from quire.config import SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.gates import Gates
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.sched import Scheduler
from quire.types import Delta, FinishReason, Request, ScheduledBatch, StepOutput


class Door:
    """Holds the requests whose id contains its letter until it is opened; some break it."""

    def __init__(self, letter: str) -> None:
        self.letter = letter
        self.held: dict[str, Request] = {}
        self.opened: Future[None] = Future()

    def hold(self, request: Request) -> Future[None] | None:
        if f"break-{self.letter}" in request.id:
            raise ValueError("the door is broken")
        if self.letter not in request.id:
            return None
        if not self.opened.done():
            self.held[request.id] = request
            return self.opened
        self.held.pop(request.id, None)
        if "refuse" in request.id:
            raise RequestError("refused")
        return None

    def remove(self, request_id: str) -> None:
        self.held.pop(request_id, None)


class Echo:
    """Samples token 7 for every sequence."""

    def submit(self, batch: ScheduledBatch) -> Future[StepOutput]:
        raise NotImplementedError

    def settle(self) -> None:
        raise NotImplementedError

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        return StepOutput(batch.step, {seq.slot: [7] for seq in batch.seqs if seq.wants_logits})


def request(name: str, n: int = 1) -> Request:
    return Request(id=name, tokens=[1, 2], sampling=SamplingParams(n=n), seed=0, max_tokens=2)


def core(*doors: Door) -> EngineCore:
    made = EngineCore(Scheduler(SchedulerConfig(), 64, 16, 64, True), Echo())
    for door in doors:
        made.add_gate(door)
    return made


def run(made: EngineCore, steps: int = 20) -> dict[tuple[str, int], Delta]:
    last = {}
    for _ in range(steps):
        for delta in made.step():
            if delta.finish_reason is not None:
                last[delta.request_id, delta.index] = delta
    return last


def test_a_request_passes_gate_after_gate_while_others_go_on() -> None:
    a, b = Door("a"), Door("b")
    made = core(a, b)
    for name in ("ab", "b", "free"):
        made.add(request(name))
    assert list(run(made)) == [("free", 0)]
    a.opened.set_result(None)
    assert run(made) == {}
    assert list(b.held) == ["b", "ab"]
    b.opened.set_result(None)
    assert {name for name, _ in run(made)} == {"ab", "b"}
    assert not made.has_work


def test_a_fault_of_a_gate_ends_that_request_alone() -> None:
    a, b = Door("a"), Door("b")
    made = core(a, b)
    for name in ("break-a", "a break-b", "a refuse", "a", "free"):
        made.add(request(name))
    a.opened.set_result(None)
    last = run(made)
    errors = {name: delta.error for (name, _), delta in last.items() if delta.error is not None}
    broken = "ValueError: the door is broken"
    assert errors == {"break-a": broken, "a break-b": broken, "a refuse": "refused"}
    assert [name for (name, _), delta in last.items() if delta.refused] == ["a refuse"]
    assert not a.held
    assert last["a", 0].finish_reason is last["free", 0].finish_reason is FinishReason.LENGTH


def test_held_requests_and_their_samples_are_aborted_and_dropped() -> None:
    a = Door("a")
    made = core(a)
    for name in ("a whole", "a dropped"):
        made.add(request(name))
    made.add(request("a sample", n=2))
    made.abort("a whole")
    made.abort("a sample", 1)
    made.drop("a dropped")
    made.add(request("a sample"))
    (whole, twice) = made.step()
    assert (whole.request_id, whole.finish_reason) == ("a whole", FinishReason.ABORT)
    assert twice.error is not None
    assert "is in use" in twice.error
    a.opened.set_result(None)
    last = run(made)
    assert {key: delta.finish_reason for key, delta in last.items()} == {
        ("a sample", 0): FinishReason.LENGTH,
        ("a sample", 1): FinishReason.ABORT,
    }


def test_ids_are_known_until_requests_pass() -> None:
    a = Door("a")
    gates = Gates([a])
    assert gates.take(request("a"))
    assert not gates.take(request("b"))
    assert (gates.ids, len(gates), "a" in gates) == (["a"], 1, True)
    assert gates.ready() == []
    a.opened.set_result(None)
    ((held, error),) = gates.ready()
    assert (held.request.id, error, len(gates)) == ("a", None, 0)
