"""Predicts the seconds of a step from what it computes, and learns from the steps that it sees. Plain numbers only.

A step reads the weights, multiplies its tokens by them, and attends. Reading and multiplying overlap for the most part:

    seconds = max(read, multiply) + OVERLAP * min(read, multiply) + outputs + attention + caches

Each part is a count (`StepWork`) times a rate. The first rates come from the model's bytes and operations
(`StepRates`); a factor per part corrects them. A Kalman filter follows the factors. At first all of them are likely
to be wrong in common, by as much as the machine is faster or slower than assumed, so the first steps set the scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

OVERLAP = 0.3
"""Reading and multiplying overlap: the longer one hides all but OVERLAP of the shorter."""
NOISE = 0.1
"""A step's time spreads around its prediction by NOISE of it."""
SCALE_DOUBT = 3.0
"""Before anything is measured, all factors may be wrong in common by SCALE_DOUBT of themselves."""
PART_DOUBT = 0.6
"""Each factor may be wrong by PART_DOUBT of itself beside the common error; doubt never grows beyond it."""
DRIFT = 0.02
"""A factor may change by DRIFT of itself from one measured step to the next."""
SURPRISE = 3.0
"""Outliers are clipped to SURPRISE standard deviations."""
LEAST_FACTOR = 0.02
IDLE_PERIOD = 32
"""Decode-only steps look alike, so only every IDLE_PERIOD-th is learned from."""


@dataclass(frozen=True, slots=True)
class StepRates:
    """The seconds that a model is expected to take on this machine, before anything is measured.

    `read`: reading the weights that every step reads. `routed`: reading all routed experts; a token misses a given one
    with probability `miss`. `token`: multiplying one token by the weights. `output`: computing one token's logits.
    `pair`: one query and one position that it sees. `position`: reading the keys and values of one position for one
    sequence. `state`: reading the recurrent states of one sequence. `spans`: shares of the attention, each with the
    most positions that it sees (None: all). `byte` and `operation`: reading one byte, one operation; 0 if not counted.
    `limits` are the bytes and operations per second that the machine is known to do.
    """

    read: float = 0.02
    routed: float = 0.0
    miss: float = 0.0
    token: float = 0.002
    output: float = 0.0002
    pair: float = 1e-7
    position: float = 1e-7
    state: float = 0.0
    spans: tuple[tuple[float, int | None], ...] = ((1.0, None),)
    byte: float = 0.0
    operation: float = 0.0
    limits: tuple[float, float] | None = None

    def seen(self, start: float, count: int) -> float:
        """Count the positions that each of `count` tokens from `start` on sees, averaged over tokens and layers."""
        middle = start + 0.5 * (count + 1)
        seen = 0.0
        for share, span in self.spans:  # each step asks
            seen += share * (middle if span is None or middle < span else span)
        return seen

    def counts(self, work: StepWork) -> tuple[float, float]:
        """Count the bytes that a step of this work reads, and its operations."""
        if not self.byte:
            return 0.0, 0.0
        outputs = work.outputs
        positions = outputs * self.seen(work.positions / outputs - 0.5, 0) if outputs else work.positions
        read = self.read + self.position * positions + self.state * outputs
        if self.routed:
            read += self.routed * (1.0 - self.miss**work.tokens)
        # Tokens that decode see the positions that they read; those of prompts are counted as pairs.
        computed = self.token * work.tokens + self.output * outputs + self.pair * (work.pairs + positions)
        return read / self.byte, computed / self.operation


class StepWork(msgspec.Struct, frozen=True):
    """Counts of one step: tokens, tokens with logits, pairs of query and position, cached positions that are read."""

    tokens: int = 0
    outputs: int = 0
    pairs: float = 0.0
    positions: float = 0.0


class StepTimes:
    """Predicts the cost of steps from `rates` and the steps recorded so far."""

    def __init__(self, rates: StepRates) -> None:
        self.rates = rates
        self._factors = [1.0] * 6
        self._doubt = [
            [SCALE_DOUBT**2 + (PART_DOUBT**2 if i == k else 0.0) for k in range(6)] for i in range(6)
        ]
        self._unseen = 0

    def with_prompt(self, work: StepWork, start: int, count: int, ends: bool) -> StepWork:
        """Add `count` tokens from `start` on of one more sequence to `work`; logits of the last if it `ends` there."""
        seen = self.rates.seen(start, count)
        return StepWork(
            work.tokens + count, work.outputs + ends, work.pairs + count * seen, work.positions + start
        )

    def seconds(self, work: StepWork) -> float:
        """Predict how long a step of this work takes."""
        return sum(map(float.__mul__, self._factors, self._parts(work)))

    def reading(self) -> float:
        """Predict a step that computes next to nothing: it reads the weights."""
        return self._factors[0] * self.rates.read

    def prompt(self, start: int, count: int) -> float:
        """Predict a prompt by itself, from position `start` on, in one step."""
        return self.seconds(self.with_prompt(StepWork(), start, count, ends=True))

    def record(self, work: StepWork, seconds: float, learns: bool) -> None:
        """Learn from a step of `work` that took `seconds`; of steps without `learns`, only every IDLE_PERIOD-th."""
        self._unseen += 1
        if seconds <= 0.0 or not (learns or self._unseen >= IDLE_PERIOD):
            return
        self._unseen = 0
        # The filter works on relative times, so that long steps do not outweigh short ones.
        x = [part / seconds for part in self._parts(work)]
        factors, doubt = self._factors, self._doubt
        spread = [sum(map(float.__mul__, row, x)) for row in doubt]
        variance = sum(map(float.__mul__, x, spread)) + NOISE**2
        reach = SURPRISE * math.sqrt(variance)
        error = max(-reach, min(1.0 - sum(map(float.__mul__, factors, x)), reach))
        for i, gain in enumerate([s / variance for s in spread]):
            factors[i] = max(LEAST_FACTOR, factors[i] + gain * error)
            row = doubt[i]
            for k, s in enumerate(spread):
                row[k] -= gain * s
            if row[i] < (PART_DOUBT * factors[i]) ** 2:
                row[i] += (DRIFT * factors[i]) ** 2

    def _parts(self, work: StepWork) -> list[float]:
        """Estimate each part's seconds by the rates alone, less the hidden share of reading or multiplying."""
        rates = self.rates
        read, multiply = rates.read, rates.token * work.tokens
        routed = rates.routed * (1.0 - rates.miss**work.tokens) if rates.routed else 0.0
        factors = self._factors
        if factors[0] * read + factors[1] * routed > factors[2] * multiply:
            multiply *= OVERLAP
        else:
            read, routed = read * OVERLAP, routed * OVERLAP
        return [
            read,
            routed,
            multiply,
            (rates.output + rates.state) * work.outputs,
            rates.pair * work.pairs,
            rates.position * work.positions,
        ]
