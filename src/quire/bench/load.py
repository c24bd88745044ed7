"""Sends requests: their bodies, their times, and the limit on concurrency. Knows no statistics and no files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from quire.bench.client import Client, Outcome
from quire.bench.datasets import Sample
from quire.errors import ConfigError

History = Sequence[tuple[str, str]]
"""Earlier turns of a conversation: what was asked and answered."""
ROLES = ("user", "assistant")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Api:
    """Completions or chat, the model's name, and the parameters that all requests share."""

    endpoint: str
    chat: bool
    model: str
    params: dict[str, Any] = field(default_factory=dict)

    def body(self, sample: Sample, history: History = ()) -> bytes:
        """Make the JSON body: a stream of `sample.output_len` tokens with usage at its end, after earlier turns."""
        prompt = sample.prompt if isinstance(sample.prompt, str) else sample.prompt.tolist()
        body: dict[str, Any] = {"model": self.model}
        if self.chat:
            turns = [
                {"role": role, "content": text}
                for turn in history
                for role, text in zip(ROLES, turn, strict=True)
            ]
            body["messages"] = [*turns, {"role": "user", "content": prompt}]
            body["max_completion_tokens"] = sample.output_len
        else:
            body["prompt"] = "".join(map("".join, history)) + prompt if isinstance(prompt, str) else prompt
            body["max_tokens"] = sample.output_len
        return _encode({**body, "stream": True, "stream_options": {"include_usage": True}, **self.params})


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The arrival process: `rate` per second with gamma-distributed gaps (burstiness 1: Poisson; less: bursts; inf:
    even), or a rate that rises from `start` to `end`."""

    rate: float = float("inf")
    burstiness: float = 1.0
    ramp_up: Literal["linear", "exponential"] | None = None
    start: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"--request-rate must be above 0, got {self.rate}")
        if not self.burstiness > 0:
            raise ConfigError(f"--burstiness must be above 0, got {self.burstiness}")
        if self.ramp_up is None:
            if self.start is not None or self.end is not None:
                raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
            return
        if self.start is None or self.end is None or min(self.start, self.end) <= 0:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps above 0")
        if self.rate != float("inf"):
            raise ConfigError("--ramp-up-strategy sets the rate: leave out --request-rate")

    def times(self, count: int, rng: np.random.Generator) -> list[float]:
        """Choose when each of `count` requests is sent: ascending seconds from the start.

        At a fixed rate they are scaled so that the last one is at count / rate, for any seed.
        """
        rates = self._rates(count)
        if np.isinf(rates).any():
            return [0.0] * count
        even, shape = np.isinf(self.burstiness), self.burstiness
        times = np.cumsum(1.0 / rates if even else rng.gamma(shape, 1.0 / (rates * shape)))
        if self.ramp_up is None:
            times *= count / self.rate / times[-1]
        return [float(t) for t in times]

    def _rates(self, count: int) -> Any:
        """The rate at each request, per second."""
        if self.ramp_up is None:
            return np.full(count, self.rate)
        assert self.start is not None
        assert self.end is not None
        space = np.linspace if self.ramp_up == "linear" else np.geomspace
        return space(self.start, self.end, count)


@dataclass(slots=True)
class Sent:
    """Measurements: outcomes in the order of the samples, seconds from the first send to the last end, the greatest
    delay of a send, and the CPU time of this client, in seconds."""

    outcomes: list[Outcome]
    duration: float
    lag: float
    cpu: float


async def send_all(
    client: Client,
    api: Api,
    samples: Sequence[Sample],
    times: Sequence[float],
    max_concurrency: int | None,
    on_end: Callable[[Outcome], None],
) -> Sent:
    """Send each sample at its time, at most `max_concurrency` at once, and wait for all.

    A turn of a conversation is sent once the turn before has ended, with what was said until then.
    """
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    outcomes = [Outcome() for _ in samples]
    histories: list[list[tuple[str, str]]] = [[] for _ in samples]
    tasks: list[asyncio.Task[None]] = []

    async def one(number: int, arrived: float) -> None:
        sample, outcome = samples[number], outcomes[number]
        if sample.after is not None:
            await tasks[sample.after]
            arrived = time.perf_counter()
            asked, before = samples[sample.after].prompt, outcomes[sample.after]
            assert isinstance(asked, str)
            histories[number] = [*histories[sample.after], (asked, before.text)]
            if not before.ok:
                outcome.error = "the turn before failed"
                on_end(outcome)
                return
        if gate is not None:
            await gate.acquire()
        try:
            body = api.body(sample, histories[number])
            outcome.queue_time = time.perf_counter() - arrived
            await client.stream(api.endpoint, body, outcome)
        finally:
            if gate is not None:
                gate.release()
        on_end(outcome)

    lag = 0.0
    cpu, start = time.process_time(), time.perf_counter()
    for number, at in enumerate(times):
        wait = start + at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        arrived = time.perf_counter()
        lag = max(lag, arrived - start - at)
        tasks.append(asyncio.create_task(one(number, arrived)))
    await asyncio.gather(*tasks)
    return Sent(outcomes, time.perf_counter() - start, lag, time.process_time() - cpu)
