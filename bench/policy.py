"""Simulates the order of prompts: the real scheduler, a scripted clock, and the arrivals and lengths of a trace.

    python bench/policy.py ../shared/data/traces-azure2023/AzureLLMInferenceTrace_conv.csv --num 10000

A step takes what `Machine` says, with noise that the scheduler has to live with. Prints a table per load: time to first
token in seconds, mean and percentiles, and the worst wait as a multiple of the same request's wait in the order of
arrival (beyond the first second). The orders are that of arrival, shortest first, and the engine's own
(src/quire/sched/pace.py).
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from quire.config import SchedulerConfig
from quire.params import SamplingParams
from quire.sched import Scheduler
from quire.sched.pace import Pace
from quire.sched.sequence import Sequence
from quire.sched.times import StepRates, StepTimes, StepWork
from quire.types import Request, ScheduledBatch, StepOutput

TARGET = 0.1
MAX_LEN = 16384


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace: seconds from the start, tokens of prompt and output."""

    at: float
    prompt: int
    output: int


def read_trace(path: Path, count: int, length_scale: float, output_scale: float) -> list[Arrival]:
    """The first `count` requests of an Azure (CSV) or a Mooncake (JSON lines) trace."""
    found = []
    with path.open() as file:
        if path.suffix == ".csv":
            for row in csv.DictReader(file):
                at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                found.append((at, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
        else:
            for line in file:
                row = json.loads(line)
                found.append((row["timestamp"] / 1e3, row["input_length"], row["output_length"]))
    found = found[:count]
    start = found[0][0]
    return [
        Arrival(
            at - start,
            max(1, min(MAX_LEN - 1024, int(prompt * length_scale))),
            max(1, min(1000, int(output * output_scale))),
        )
        for at, prompt, output in found
    ]


class Machine:
    """What steps take: the rates of a model of 0.6 B parameters on two cores, times a factor that nobody tells."""

    rates = StepRates(read=0.009, token=0.0005, output=0.0001, pair=3.5e-8, position=5e-7)
    factor = 2.0

    def __init__(self, seed: int) -> None:
        self._times = StepTimes(self.rates)
        self._rng = random.Random(seed)

    def seconds(self, batch: ScheduledBatch) -> float:
        work = StepWork()
        for seq in batch.seqs:
            work = self._times.with_prompt(work, seq.start, len(seq.tokens), seq.wants_logits)
        return self._times.seconds(work) * self.factor * self._rng.lognormvariate(0.0, 0.1)

    def alone(self, prompt: int) -> float:
        return self._times.prompt(0, prompt) * self.factor


class FirstCome(Pace):
    """Prompts in the order in which they came."""

    def _due(self, seq: Sequence, computed: int) -> float:
        return seq.arrival

    def oldest(self, prompts: Iterable[Sequence]) -> Sequence | None:
        return None


class ShortestFirst(Pace):
    """The prompt with the least work left; long ones may starve."""

    def _due(self, seq: Sequence, computed: int) -> float:
        return super()._due(seq, computed) - seq.arrival

    def oldest(self, prompts: Iterable[Sequence]) -> Sequence | None:
        return None


ORDERS: dict[str, type[Pace]] = {
    "first come first served": FirstCome,
    "shortest first": ShortestFirst,
    "due time, a quarter to the oldest": Pace,
}


def summary(ttft: list[float], first_come: list[float]) -> dict[str, float]:
    """Times to first token in seconds, and the worst of them as a multiple of `first_come`, beyond the first second."""
    found = np.array(ttft)
    return {
        "mean": float(found.mean()),
        "p50": float(np.median(found)),
        "p99": float(np.percentile(found, 99)),
        "max": float(found.max()),
        "multiple": float((found / (np.array(first_come) + 1.0)).max()),
    }


def simulate(trace: list[Arrival], order: type[Pace], load: float, seed: int = 0) -> list[float]:
    """Seconds to the first token of each request.

    The trace comes at `load` times the rate at which its prompts alone would keep the machine busy.
    """
    machine = Machine(seed)
    work = sum(machine.alone(arrival.prompt) for arrival in trace)
    squeeze = work / load / max(1e-9, trace[-1].at)
    due = [arrival.at * squeeze for arrival in trace]
    clock = [0.0]
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=1024, target_step_time=1e3 * TARGET)
    scheduler = Scheduler(config, 200_000, 16, MAX_LEN, False, rates=machine.rates, clock=lambda: clock[0])
    scheduler.pace = order(config, machine.rates, MAX_LEN, lambda: clock[0])
    scheduler._planner._pace = scheduler.pace
    first: dict[str, float] = {}
    sent = 0
    while sent < len(trace) or scheduler.has_work:
        while sent < len(trace) and due[sent] <= clock[0]:
            prompt, output = trace[sent].prompt, trace[sent].output
            sampling = SamplingParams(max_tokens=output, ignore_eos=True)
            tokens = [sent % 1000] * prompt
            scheduler.add(
                Request(
                    id=str(sent),
                    tokens=tokens,
                    sampling=sampling,
                    max_tokens=output,
                    seed=0,
                    arrival=due[sent],
                )
            )
            sent += 1
        batch = scheduler.schedule()
        if batch is None:
            clock[0] = due[sent]
            continue
        seconds = machine.seconds(batch)
        clock[0] += seconds
        output_tokens = {seq.slot: [1] for seq in batch.seqs if seq.wants_logits}
        for delta in scheduler.update(batch, StepOutput(batch.step, output_tokens), seconds):
            if delta.request_id not in first:
                first[delta.request_id] = clock[0] - due[int(delta.request_id)]
    return [first[str(i)] for i in range(len(trace))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--num", type=int, default=10000)
    parser.add_argument("--loads", default="0.5,0.7,0.9")
    parser.add_argument("--length-scale", type=float, default=1.0)
    parser.add_argument("--output-scale", type=float, default=0.1)
    args = parser.parse_args()
    trace = read_trace(args.trace, args.num, args.length_scale, args.output_scale)
    for load in map(float, args.loads.split(",")):
        print(f"\n{args.trace.name}: {len(trace)} requests, prompts alone take {load:.0%} of the time\n")
        print("| Order | mean | p50 | p99 | longest | worst multiple |\n|---|---:|---:|---:|---:|---:|")
        first_come = simulate(trace, FirstCome, load)
        for name, order in ORDERS.items():
            ttft = first_come if order is FirstCome else simulate(trace, order, load)
            cells = [f"{value:.3g}" for value in summary(ttft, first_come).values()]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
