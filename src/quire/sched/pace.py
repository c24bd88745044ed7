"""Decides how long a step may be and which prompt it prefills first, so that nobody waits for another's prompt.

With a target (`--target-step-time`):

- A step that samples tokens takes at most the target. Decoding comes first; prompts get the rest of the step, and a
  fifth of it where decoding alone leaves less. A step that samples none is long enough to prefill prompts quickly,
  since a shorter one would help nobody.
- Prompts are served by *due time*: arrival + PATIENCE x the time that the rest of the prompt takes by itself. So short
  ones come first, and waiting prompts move up: only prompts that arrive before a prompt is due overtake it.
  Earliest due first also keeps all within their due times if any order does (Liu & Layland 1973).
- Every fourth step serves the oldest prompt first, whatever the others cost. So it gets a quarter of the prompts' time
  even if short ones would take all of it, and then the next one does. Hence nobody waits for a first token much longer
  than four times as long as in the order of arrival, which would compute the same prompts before it at full speed
  (bench/policy.py finds at most 6 over 10,000 requests of two traces, in which decoding differs too).

Without a target, steps are bounded in tokens only and prompts go in order of arrival: batches count, not waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quire.config import SchedulerConfig
from quire.sched.sequence import Sequence
from quire.sched.times import StepRates, StepTimes, StepWork

if TYPE_CHECKING:
    from quire.sched.step_plan import StepPlan

PATIENCE = 300.0
"""A prompt waits at most PATIENCE times its own prefill time for prompts that arrive after it."""
TURNS = 4
"""Every TURNS-th step serves the oldest prompt first."""
LEAST_SHARE = 0.25
"""Prompts get at least LEAST_SHARE seconds per second of decoding."""
SLACK = 0.05
"""When nobody waits for a token, a step grows until reading the weights takes at most the share SLACK of it."""
LONG_SHARE = 0.04
"""A prompt above LONG_SHARE of the model's length is long, unless --long-prefill-token-threshold says otherwise."""


class Pace:
    """Chooses the length of steps and the order of prompts. `clock` gives seconds."""

    def __init__(
        self,
        config: SchedulerConfig,
        rates: StepRates,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.times = StepTimes(rates)
        self.target = (config.target_step_time or 0.0) / 1e3
        self._clock = clock
        self._max_partial = config.max_num_partial_prefills
        self._max_long = config.max_long_partial_prefills
        self._long = config.long_prefill_token_threshold or max(1, int(LONG_SHARE * max_model_len))
        self._turn = 0

    # --- order

    def arrive(self, seq: Sequence, cached: int) -> None:
        """Set the due time of a new sequence; its `cached` tokens need no prefill."""
        if self.target:
            seq.arrival = self._clock()
            seq.key = (seq.key[0], self._due(seq, cached), seq.key[2])

    def order(self, partial: list[Sequence]) -> list[Sequence]:
        """Sort partly computed prompts into the order in which this step serves them."""
        if not self.target or len(partial) < 2:
            return partial
        return sorted(partial, key=self.rank)

    def rank(self, seq: Sequence) -> tuple[int, float, int]:
        """Rank a sequence like `Sequence.key`, but by the rest of its prompt."""
        if not self.target:
            return seq.key
        return seq.key[0], self._due(seq, seq.num_computed), seq.key[2]

    def oldest(self, prompts: Iterable[Sequence]) -> Sequence | None:
        """Pick the prompt of the best priority that arrived first, if it is the oldest one's turn."""
        if not self.target:
            return None
        self._turn = (self._turn + 1) % TURNS
        if self._turn:
            return None
        return min(prompts, key=lambda seq: (seq.key[0], seq.key[2]), default=None)

    def may_start(self, seq: Sequence, partial: int, long: int) -> bool:
        """Tell whether one more prompt may start beside `partial` partly computed ones, `long` of which are long."""
        return partial < self._max_partial and (long < self._max_long or not self.is_long(seq))

    def is_long(self, seq: Sequence) -> bool:
        return len(seq.tokens) > self._long

    def _due(self, seq: Sequence, computed: int) -> float:
        left = max(1, len(seq.tokens) - computed)
        return seq.arrival + PATIENCE * self.times.prompt(computed, left)

    # --- length of a step

    def chunk(self, plan: StepPlan, start: int, pending: int, ends: bool) -> int:
        """Count how many of `pending` tokens from `start` on the step has time for, on top of what it has.

        `ends`: the last of them gives a token.
        """
        if not self.target:
            return pending
        times, work = self.times, plan.work
        if plan.awaited or work.outputs:
            limit = max(self.target, plan.decoding * (1.0 + LEAST_SHARE))
        else:
            limit = max(self.target, times.reading() / SLACK)
        return _most(
            pending,
            lambda count: (
                times.seconds(times.with_prompt(work, start, count, ends and count == pending)) <= limit
            ),
        )

    def spare(self, work: StepWork, most: int) -> int:
        """Count the tokens, up to `most`, that decoding sequences may compute on top of `work`."""
        if not self.target:
            return most

        def fits(count: int) -> bool:
            more = StepWork(work.tokens + count, work.outputs + count, work.pairs, work.positions)
            return self.times.seconds(more) <= self.target

        return _most(most, fits)

    def took(self, plan: StepPlan, seconds: float) -> float:
        """Learn from a step that took `seconds`; return the seconds that its prompts took."""
        prompts = plan.num_prompt_tokens > 0
        share = 0.0
        if prompts and plan.work.outputs:
            share = max(0.0, 1.0 - plan.decoding / self.times.seconds(plan.work))
        self.times.record(plan.work, seconds, prompts)
        return share * seconds


def _most(high: int, fits: Callable[[int], bool]) -> int:
    """Find the largest number up to `high` that fits, where all smaller ones fit too; 0 if none does."""
    if fits(high):
        return high
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
