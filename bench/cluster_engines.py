"""One replica of `bench/cluster.py --scheduler real`: the server's scheduler and prefix cache under a scripted clock.

There is no model. A step takes the time that the simulator's rules give for its tokens: prompts at so many a second, a
token of each output in 25 ms, beside and unhindered; so a step with both takes the longer of the two. All else is the
scheduler's: chunks, the order of prompts, blocks that running requests hold, preemption, outputs that stay cached.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bench.cluster_replicas import BLOCK, TOKEN, Cluster, Request
from quire import types
from quire.cluster.loads import Load, Replica
from quire.config import SchedulerConfig
from quire.params import SamplingParams
from quire.sched import Scheduler
from quire.sched.times import StepRates
from quire.serve.options import TARGET_STEP_TIME
from quire.types import Made, ScheduledBatch, StepOutput

MAX_LEN = 1 << 17
MANY_BLOCKS = 1 << 16
"""Blocks of a cache without end."""


@dataclass
class Live:
    """A request in an engine. `left`: tokens of its prompt that are still to be computed, as far as is known."""

    place: int
    left: int
    made: int


@dataclass
class Event:
    """What a step brought: the first token of a request or (`ended`) its last, and the tokens found in the cache."""

    at: float
    place: int
    found: int
    first: bool
    ended: bool


@dataclass
class Engine:
    """A replica: `speed` tokens of prompts a second, `token` seconds each of outputs, `blocks` of cache (0: no end)."""

    speed: float
    token: float
    blocks: int
    now: float = 0.0
    until: float | None = None  # when the step under way ends
    queued: int = 0
    computed: int = 0
    live: dict[str, Live] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            replace(SchedulerConfig(), target_step_time=TARGET_STEP_TIME),
            self.blocks or MANY_BLOCKS,
            BLOCK,
            MAX_LEN,
            True,
            rates=StepRates(self.token, token=1 / self.speed, output=0.0, pair=0.0, position=0.0),
            clock=lambda: self.now,
        )
        self._by_slot: dict[int, Live] = {}
        self._batch = ScheduledBatch(0, [], [], [], [])

    def add(
        self, at: float, place: int, blocks: tuple[int, ...], tokens: int, output: int, made: int, found: int
    ) -> None:
        """Queue a request, `made` tokens of whose output exist. The cache is believed to hold `found` tokens."""
        prompt = [block for block in blocks for _ in range(BLOCK)][:tokens]
        own = -1 - place  # the tokens of an output are alike, and nobody else's
        before = (Made([own] * made),) if made else ()
        request = types.Request(
            id=f"{place}",
            tokens=prompt,
            sampling=SamplingParams(max_tokens=output),
            seed=0,
            max_tokens=output,
            made=before,
        )
        if self.until is None:
            self.now = at
        left = tokens + made - found
        self.live[request.id] = Live(place, left, made)
        self.queued += left
        refused = self.scheduler.add(request)
        assert not refused, refused
        if self.until is None:
            self._start()

    def _start(self) -> None:
        """Plan the next step."""
        batch = self.scheduler.schedule()
        self.until = None
        if batch is None:
            return
        self._batch = batch
        for new in batch.new:
            self._by_slot[new.slot] = self.live[new.request.id]
        fresh = {new.slot: len(new.tokens) for new in batch.new}
        prompts, decodes = 0, False
        for item in batch.seqs:
            one = self._by_slot[item.slot]
            if item.slot in fresh:  # what it found is known now
                left = fresh[item.slot] - item.start
                self.queued += left - one.left
                one.left = left
            prompts += len(item.tokens) if one.left else 0
            decodes = decodes or not one.left
        self.until = self.now + max(prompts / self.speed, self.token if decodes else 0.0)

    def step(self) -> Iterator[Event]:
        """End the step under way, and begin the next."""
        assert self.until is not None
        seconds, self.now = self.until - self.now, self.until
        batch, tokens = self._batch, {}
        for item in batch.seqs:
            one = self._by_slot[item.slot]
            if one.left:
                one.left -= len(item.tokens)
                self.queued -= len(item.tokens)
                self.computed += len(item.tokens)
            if item.wants_logits:
                tokens[item.slot] = [-1 - one.place]
        for delta in self.scheduler.update(batch, StepOutput(batch.step, tokens), seconds):
            one = self.live[delta.request_id]
            one.made += 1
            ended = delta.finish_reason is not None
            if one.made == 1 or ended:
                yield Event(self.now, one.place, delta.usage.num_cached, one.made == 1, ended)
            if ended:
                del self.live[delta.request_id]
        self._start()


class Engines(Cluster):
    """Replicas that are engines. What they have found and made is known when a step ends."""

    def __init__(self, count: int, blocks: int, rate: float) -> None:
        super().__init__(count, blocks, rate)
        self.blocks = blocks
        self.engines = [Engine(rate, TOKEN, blocks) for _ in range(count)]
        self._steps: list[tuple[float, int]] = []  # when steps end, and whose
        self._made: dict[int, int] = {}  # by place, of requests that have begun and not ended
        self._sent: list[Request] = []

    def arrive(self, at: float) -> None:
        while self._steps and self._steps[0][0] <= at:
            until, index = heapq.heappop(self._steps)
            engine = self.engines[index]
            if engine.until != until:
                continue  # it died
            for event in engine.step():
                self._take(index, event)
            self._follow(index)
        self.now = at

    def _take(self, index: int, event: Event) -> None:
        request = self._sent[event.place]
        if event.first:
            self.waits[event.place] = event.at - request.at
            self.found += event.found
            self.asked += request.tokens
        if event.ended:
            self.open[index] -= 1
            self.ended.append(request)

    def _follow(self, index: int) -> None:
        engine = self.engines[index]
        self.clear[index] = engine.now + engine.queued / engine.speed
        if engine.until is not None:
            heapq.heappush(self._steps, (engine.until, index))

    def send(self, request: Request, index: int, place: int | None = None) -> None:
        engine = self.engines[index]
        found = min(BLOCK * self.depth(request, index), request.tokens - 1)
        self.caches.touch(index, request.blocks, BLOCK)
        self.published[index].touch(request.blocks, BLOCK)
        if place is None:
            place = len(self.waits)
            self.waits.append(0.0)
            self._sent.append(request)
        idle = engine.until is None
        made = self._made.pop(place, 0)
        engine.add(self.now, place, request.blocks, request.tokens, request.output, made, found)
        self.open[index] += 1
        self.step += 1
        if idle:
            self._follow(index)
        else:
            self.clear[index] = max(engine.now, self.now) + engine.queued / engine.speed

    def slow(self, index: int, speed: float) -> None:
        self.speed[index] = self.engines[index].speed = speed

    def die(self, index: int) -> list[tuple[int, Request]]:
        """Lose a replica. Returns all its requests: those that have begun go on elsewhere."""
        live = self.engines[index].live.values()
        self._made |= {one.place: one.made for one in live if one.made}
        places = [one.place for one in live]
        self.caches.clear(index)
        self.published[index].clear()
        self.computed[index] += self.engines[index].computed
        self.engines[index] = Engine(float(self.speed[index]), TOKEN, self.blocks, self.now)
        self.open[index] = 0
        self.clear[index] = self.now
        return [(place, self._sent[place]) for place in places]

    def tell(self, replica: Replica, index: int, at: float) -> None:
        engine = self.engines[index]
        replica.word(Load(queued=engine.queued, running=len(engine.live)), self.now)

    def finish(self) -> None:
        self.arrive(math.inf)
        self.computed += [engine.computed for engine in self.engines]
