"""The length of steps and the order of prompts: each rule alone, and waits of real traces under a scripted clock."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from fake_executor import FakeExecutor, Journal, drain, request

from quire.config import SchedulerConfig
from quire.sched import Scheduler
from quire.sched.pace import TURNS
from quire.sched.times import StepRates, StepTimes, StepWork
from quire.types import Delta, StepOutput

# One token costs a millisecond beside 10 for reading the weights, of which computing hides 7.
RATES = StepRates(read=0.01, token=0.001, output=0.0, pair=0.0, position=0.0)


class World:
    """A scheduler whose steps take exactly what `RATES` say."""

    def __init__(self, **options: object) -> None:
        config = SchedulerConfig(
            **{"max_num_seqs": 16, "max_num_batched_tokens": 4096, "target_step_time": 50.0, **options}  # type: ignore[arg-type]
        )
        self.now = 0.0
        self.times = StepTimes(RATES)
        self.scheduler = Scheduler(config, 4096, 4, 8000, False, rates=RATES, clock=lambda: self.now)
        self.seconds = 0.0
        self.names: dict[int, str] = {}

    def add(self, id: str, length: int, max_tokens: int = 50, **options: object) -> None:
        self.scheduler.add(request(id, [1] * length, max_tokens, ignore_eos=True, **options))

    def step(self) -> dict[str, int]:
        """Compute a step: tokens by request."""
        batch = self.scheduler.schedule()
        assert batch is not None
        self.names |= {new.slot: new.request.id for new in batch.new}
        work = StepWork()
        for seq in batch.seqs:
            count = len(seq.tokens) + len(seq.draft)
            work = self.times.with_prompt(work, seq.start, count, seq.wants_logits)
        self.seconds = self.times.seconds(work)
        self.now += self.seconds
        tokens = {seq.slot: [1] for seq in batch.seqs if seq.wants_logits}
        self.deltas: list[Delta] = self.scheduler.update(batch, StepOutput(batch.step, tokens), self.seconds)
        self.scheduler.check()
        return {self.names[seq.slot]: len(seq.tokens) for seq in batch.seqs}


def test_a_step_stays_within_the_target_while_a_sequence_generates() -> None:
    world = World()
    world.add("stream", 5)
    world.step()
    world.add("long", 1000)
    for _ in range(10):
        found = world.step()
        assert found["stream"] == 1
        assert found["long"] > 30
        assert 0.045 < world.seconds <= 0.05


def test_alone_a_prompt_takes_the_chunks_that_are_quick() -> None:
    world = World()
    world.add("long", 5000)
    assert world.step()["long"] == pytest.approx(200, abs=4)  # reading is 5% of the step
    bounded = World(max_num_batched_tokens=64)
    bounded.add("long", 5000)
    assert bounded.step() == {"long": 64}


def test_without_a_target_a_prompt_takes_the_whole_budget_in_order_of_arrival() -> None:
    world = World(target_step_time=0.0, max_num_batched_tokens=300)
    for id, length in (("long", 700), ("short", 10)):
        world.add(id, length)
    assert [world.step() for _ in range(3)] == [{"long": 300}, {"long": 300}, {"long": 100, "short": 10}]


def test_a_short_prompt_passes_a_long_one_at_once() -> None:
    world = World()
    world.add("long", 5000)
    world.step()
    world.add("short", 20)
    assert world.step()["short"] == 20
    assert world.seconds <= 0.05, "the short prompt waits for a step that is bounded"
    assert world.deltas[0].request_id == "short"


def test_prompts_get_a_fifth_of_steps_in_which_decoding_alone_exceeds_the_target() -> None:
    world = World(target_step_time=5.0)
    for i in range(8):
        world.add(f"stream {i}", 2, 900)
    while len(world.deltas if world.now else []) < 8:
        world.step()
    alone = world.seconds
    world.add("long", 1000)
    assert world.step()["long"] > 1
    assert world.seconds <= 1.25 * alone + 1e-6


def test_every_fourth_step_serves_the_oldest_prompt_first() -> None:
    world = World()
    world.add("long", 4000)
    world.step()
    progress = [0] * 40
    for i in range(40):
        world.add(f"short {i}", 60, 1)  # more than a step of work comes with each step
        world.add(f"other {i}", 60, 1)
        progress[i] = world.step().get("long", 0)
    served = [i for i, count in enumerate(progress) if count]
    assert len(served) == pytest.approx(40 / TURNS, abs=1)
    assert all(b - a == TURNS for a, b in itertools.pairwise(served))


def test_an_earlier_prompt_is_due_before_a_later_one_of_its_length() -> None:
    world = World(max_num_seqs=1)
    for id in "abc":
        world.add(id, 10, 1)
        world.now += 0.01
    assert [next(iter(world.step())) for _ in range(3)] == ["a", "b", "c"]


def test_a_priority_comes_before_any_due_time() -> None:
    world = World(scheduling_policy="priority")
    world.add("short", 10, priority=1)
    world.add("long", 3000, priority=0)
    assert list(world.step()) == ["long"]


def test_partly_computed_prompts_are_limited_and_short_ones_pass_long_ones() -> None:
    world = World(max_num_partial_prefills=3, max_long_partial_prefills=1, long_prefill_token_threshold=400)
    world.add("stream", 5, 900)
    world.step()
    for i, length in enumerate((900, 800, 700, 300)):
        world.add(f"{length}", length)
        world.now += 1e-4 * i
    seen: set[str] = set()
    making: set[str] = set()
    for _ in range(200):
        for id in world.step():
            making |= {id} - seen - {"stream"}
        done = {delta.request_id for delta in world.deltas}
        making -= done
        seen |= done
        assert len([id for id in making if int(id) > 400]) <= 1
        if {"900", "800", "700", "300"} <= seen:
            break
    assert {"900", "800", "700", "300"} <= seen


def most_drafted(target: float) -> int:
    """The most tokens of drafts in a step of at least five sequences of six that draft all the time."""
    config = SchedulerConfig(max_num_seqs=8, target_step_time=target)
    scheduler = Scheduler(config, 64, 4, 64, True, rates=RATES)
    for i in range(6):
        scheduler.add(request(str(i), [1, 2, i], 12))
    executor = FakeExecutor(64, 4, random.Random(0), draft_rate=1.0)
    batches = drain(scheduler, executor, Journal())
    return max(sum(len(seq.draft) for seq in batch.seqs) for batch in batches if len(batch.seqs) > 4)


def test_drafts_are_cut_to_the_time_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "record", lambda *_, **__: None)  # the fake executor's times are random
    assert 0 < most_drafted(16.0) <= 8 < most_drafted(0.0)


# --- the model of step times ---------------------------------------------------------------------------


def true_seconds(work: StepWork, rng: np.random.Generator) -> float:
    """A machine with rates of its own: reading hides most of computing."""
    read, multiply = 0.038, 0.0046 * work.tokens
    exact = max(read, multiply) + 0.3 * min(read, multiply) + 5e-4 * work.outputs
    return float((exact + 6e-7 * work.pairs + 2.5e-6 * work.positions) * rng.lognormal(0.0, 0.08))


def test_step_times_are_learned_from_steps_and_survive_stalls() -> None:
    rng, times = np.random.default_rng(0), StepTimes(StepRates())
    errors = []
    for step in range(300):
        if step < 3:  # a prompt alone comes first
            work = times.with_prompt(StepWork(), 170 * step, 170, False)
        else:
            decoding = int(rng.integers(1, 6))
            work = StepWork(decoding, decoding, 0.0, 1000.0 * decoding)
            work = times.with_prompt(work, int(rng.integers(8000)), int(rng.integers(1, 24)), False)
        seconds = true_seconds(work, rng)
        errors.append(abs(times.seconds(work) / seconds - 1.0))
        times.record(work, 20.0 * seconds if step % 50 == 49 else seconds, learns=True)
    assert np.mean(errors[3:20]) < 0.25
    assert np.mean(errors[20:]) < 0.12  # the noise alone makes 0.065


def test_step_times_follow_a_machine_that_becomes_slower() -> None:
    rng, times = np.random.default_rng(1), StepTimes(StepRates())
    work = times.with_prompt(StepWork(2, 2, 0.0, 500.0), 400, 16, False)
    for _ in range(50):
        times.record(work, true_seconds(work, rng), learns=True)
    for _ in range(40):
        times.record(work, 2.0 * true_seconds(work, rng), learns=True)
    assert times.seconds(work) == pytest.approx(2.0 * true_seconds(work, rng), rel=0.3)


def test_only_a_few_of_the_steps_without_prompts_are_learned_from() -> None:
    times = StepTimes(RATES)
    before = times.seconds(StepWork(1, 1))
    for _ in range(20):
        times.record(StepWork(1, 1), 1.0, learns=False)
    assert times.seconds(StepWork(1, 1)) == before
    for _ in range(20):
        times.record(StepWork(1, 1), 1.0, learns=False)
    assert times.seconds(StepWork(1, 1)) > before


def test_windows_bound_the_positions_that_a_token_sees() -> None:
    rates = StepRates(spans=((0.75, 100), (0.25, None)))
    assert rates.seen(1000, 1) == 75 + 0.25 * 1001
    assert rates.seen(0, 1) == 1.0


# --- traces --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "policy.py"
    spec = importlib.util.spec_from_file_location("policy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["policy"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("load", [0.5, 0.9])
def test_nobody_waits_five_times_as_long_as_in_the_order_of_arrival(
    load: float, policy: ModuleType, data: Path
) -> None:
    trace = policy.read_trace(data / "traces-azure2023" / "AzureLLMInferenceTrace_conv.csv", 150, 1.0, 0.05)
    found = {name: policy.simulate(trace, order, load) for name, order in policy.ORDERS.items()}
    first_come = found["first come first served"]
    ours = found["due time, a quarter to the oldest"]
    worst = policy.summary(ours, first_come)
    assert worst["multiple"] <= TURNS + 1
    assert worst["mean"] < np.mean(first_come)
