"""KV memory that is reserved and never used: contiguous reservations beside blocks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.article.lengths import conversations
from bench.article.study import ENGINES, GUIDE, OPTIMIZE, Claim, Result, Setting, Study
from quire.config import SchedulerConfig
from quire.params import SamplingParams
from quire.sched import Scheduler
from quire.types import Request, StepOutput

BLOCK = 16
LONGEST = 2048  # tokens: what a server without blocks has to reserve for each request
BUDGET = 64 * 1024  # KV slots

Lengths = list[tuple[int, int]]


@dataclass(slots=True)
class Usage:
    """Sums over steps: reserved and used slots, sequences; unused slots of last blocks.

    `refused` counts requests that did not fit at a step, `fragmented` those of them for which enough slots were free.
    """

    reserved: int = 0
    used: int = 0
    sequences: int = 0
    tails: list[float] = field(default_factory=list)
    steps: int = 0
    fragmented: int = 0
    refused: int = 0

    @property
    def waste(self) -> float:
        return 1 - self.used / self.reserved

    @property
    def running(self) -> float:
        return self.sequences / self.steps


class Arena:
    """First-fit allocation of contiguous slots."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]  # (begin, length), in order

    @property
    def num_free(self) -> int:
        return sum(length for _, length in self._free)

    def take(self, count: int) -> int | None:
        """The begin of `count` free slots, or None if no gap has so many."""
        for i, (begin, length) in enumerate(self._free):
            if length >= count:
                self._free[i : i + 1] = [(begin + count, length - count)] if length > count else []
                return begin
        return None

    def give(self, begin: int, count: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (begin, count)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


def contiguous(lengths: Lengths, reserve: Callable[[int], int], budget: int = BUDGET) -> Usage:
    """Serve requests in order, one token per step each, with `reserve(total length)` slots in a row for each."""
    arena, usage, waiting = Arena(budget), Usage(), list(reversed(lengths))
    running: list[list[int]] = []  # begin, reserved, held, last
    while waiting or running:
        while waiting:
            prompt, output = waiting[-1]
            wanted = min(LONGEST, reserve(prompt + output))
            begin = arena.take(wanted)
            if begin is None:
                usage.refused += 1
                usage.fragmented += arena.num_free >= wanted
                break
            waiting.pop()
            running.append([begin, wanted, prompt, prompt + output])
        usage.steps += 1
        usage.sequences += len(running)
        usage.reserved += sum(one[1] for one in running)
        usage.used += sum(one[2] for one in running)
        for one in running:
            one[2] += 1
        for begin, wanted, held, last in running:
            if held >= last:
                arena.give(begin, wanted)
        running = [one for one in running if one[2] < one[3]]
    return usage


def paged(lengths: Lengths, budget: int = BUDGET) -> Usage:
    """The same requests through the engine's own scheduler, whose steps take prompts whole."""
    config = SchedulerConfig(max_num_seqs=4096, max_num_batched_tokens=budget)
    scheduler, usage = Scheduler(config, budget // BLOCK, BLOCK, LONGEST, False), Usage()
    for i, (prompt, output) in enumerate(lengths):
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        request = Request(
            id=str(i),
            tokens=[i % 1000] * prompt,
            sampling=sampling,
            max_tokens=output,
            seed=0,
            arrival=float(i),
        )
        scheduler.add(request)
    while (batch := scheduler.schedule()) is not None:
        held = [seq.start + len(seq.tokens) for seq in batch.seqs]
        usage.steps += 1
        usage.sequences += len(held)
        usage.used += sum(held)
        usage.reserved += BLOCK * scheduler.stats().num_used_blocks
        usage.tails += [-count % BLOCK for count in held]
        tokens = {seq.slot: [1] for seq in batch.seqs if seq.wants_logits}
        scheduler.update(batch, StepOutput(batch.step, tokens))
    return usage


def power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


def measure(setting: Setting) -> Result:
    lengths = conversations(setting.data, setting.count(2000, 50), LONGEST)
    found = {
        f"reserve the longest, {LONGEST:,}": contiguous(lengths, lambda _: LONGEST),
        "reserve the next power of two": contiguous(lengths, power_of_two),
        "reserve the true length": contiguous(lengths, lambda length: length),
        f"blocks of {BLOCK}": paged(lengths),
    }
    blocks = found[f"blocks of {BLOCK}"]
    rows: list[tuple[str | float, ...]] = [
        (
            name,
            f"{usage.waste:.1%}",
            f"{usage.fragmented / max(1, usage.refused):.0%}",
            usage.running,
            f"{blocks.running / usage.running:.1f} x",
        )
        for name, usage in found.items()
    ]
    longest = next(iter(found.values()))
    return Result(
        ("allocation", "slots unused", "refusals by fragmentation", "sequences at once", "blocks hold"),
        rows,
        f"Reserving the longest wastes {longest.waste:.0%}, blocks {blocks.waste:.1%}; blocks hold "
        f"{blocks.running / longest.running:.1f} times as many sequences. A last block has "
        f"{statistics.mean(blocks.tails):.1f} unused slots on average, and none is lost to fragmentation.",
        f"{len(lengths):,} requests that all wait, a budget of {BUDGET:,} slots, one token per sequence and step; "
        "blocks by the engine's scheduler.",
    )


STUDY = Study(
    "KV memory that is reserved and unused",
    (
        Claim(
            "contiguous allocation wastes 60 to 80% of KV memory, blocks under 4%", (ENGINES, OPTIMIZE, GUIDE)
        ),
        Claim("less than half a block is wasted per sequence; external fragmentation is gone", (GUIDE,)),
        Claim("PagedAttention admits batches 2 to 4 times as large", (GUIDE,)),
    ),
    measure,
)
