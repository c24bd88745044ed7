"""Decides how many tokens to draft for each sequence in each step: the number that gives most tokens per second.

Another drafted token pays if its chance of acceptance exceeds the share of a step that its row costs. So the likeliest
tokens of all sequences are taken first, until tokens per second no longer rise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from quire.spec_decode.costs import NEW_SHARE, DraftCosts, StepCosts

LONGEST_NAP = 128
"""LONGEST_NAP is the most steps without planning after drafts did not pay."""
PROBE_TOKENS = 2
PROBE_SHARE = 8
"""One of PROBE_SHARE sequences gets a draft, to measure acceptance again."""
LEAST_GAIN = 0.03
"""LEAST_GAIN in speed is beyond the error of measurements: drafts must promise it."""
MOST_OVERHEAD = 0.005
"""MOST_OVERHEAD is the share of time for looking for drafts while there are none."""
EXPLORE = 1.25
"""EXPLORE times the most rows ever measured, or FEW more than sequences, is the largest step that is planned."""
FEW = 8
REFRESH = 128
"""Each REFRESH steps with drafts, one comes without, to measure its cost."""


class Controller:
    """Keeps what was measured and plans drafts by it. With `adaptive` false every draft has its full length."""

    def __init__(self, adaptive: bool = True) -> None:
        self.adaptive = adaptive
        self.steps = StepCosts()
        self.drafting = DraftCosts()
        self._overhead = 0.0  # seconds of looking for drafts and planning in one step
        self._nap = 0
        self._left = 0
        self._busy = 0
        self._num_seqs = 0

    @property
    def rests(self) -> bool:
        """Tell whether drafts have not paid for long."""
        return self._nap >= LONGEST_NAP

    def asleep(self, num_seqs: int) -> bool:
        """Tell whether this step plans nothing, because drafts did not pay lately. Counts the steps."""
        if not self.adaptive:
            return False
        if num_seqs * 2 <= self._num_seqs:
            self._nap = self._left = 0  # another load: what held for more sequences may not hold now
        if self._left > 0:
            self._left -= 1
            return True
        return False

    def record_overhead(self, seconds: float) -> None:
        """Record the seconds of looking for drafts and planning in one step."""
        self._overhead += NEW_SHARE * (seconds - self._overhead) if self._overhead else seconds

    def plan(self, chances: Sequence[list[float]], num_seqs: int) -> list[int]:
        """Return the number of tokens to draft for each sequence.

        `chances`: the probability that the first 1, 2, ... tokens of each sequence's draft are all accepted, up to
        the longest draft. `num_seqs` sequences draw a token in the next step, these included.
        """
        if not self.adaptive:
            return [len(chance) for chance in chances]
        counts, pays = self._best(chances, num_seqs)
        if pays:
            self._nap, self._num_seqs = 0, num_seqs
            self._busy += 1
            return counts if self._busy % REFRESH else [0] * len(chances)
        if any(chances):
            self._nap = min(LONGEST_NAP, max(1, 2 * self._nap))
            self._left, self._num_seqs = self._nap, num_seqs
            if self._nap == LONGEST_NAP:
                return self._probe(chances, num_seqs)
        else:
            rest = self._overhead / (MOST_OVERHEAD * self.steps.seconds(num_seqs))
            self._left = max(self._left, min(LONGEST_NAP, int(rest)))
        return [0] * len(chances)

    def _best(self, chances: Sequence[list[float]], num_seqs: int) -> tuple[list[int], bool]:
        tokens = sorted(
            (-probability, depth, number)
            for number, chance in enumerate(chances)
            for depth, probability in enumerate(chance)
        )
        most = max(int(EXPLORE * self.steps.most_rows), num_seqs + FEW) - num_seqs
        del tokens[most:]
        stride = max(1, len(tokens) // 32)  # a coarse search is good enough where there are many
        gains = list(accumulate(-token[0] for token in tokens))
        depths = list(accumulate((token[1] + 1 for token in tokens), max))
        counts, taken = [0] * len(chances), 0
        best = (1 + LEAST_GAIN) * num_seqs / self.steps.seconds(num_seqs)
        for count in range(stride, len(tokens) + 1, stride):
            seconds = self.steps.seconds(num_seqs + count) + self.drafting.seconds(depths[count - 1])
            rate = (num_seqs + gains[count - 1]) / (seconds + self._overhead)
            if rate > best:
                best, taken = rate, count
        for _, _, number in tokens[:taken]:
            counts[number] += 1
        return counts, taken > 0

    def _probe(self, chances: Sequence[list[float]], num_seqs: int) -> list[int]:
        """Return a few short drafts, if drafts that are always accepted would pay."""
        best_case, pays = self._best([[1.0] * len(chance) for chance in chances], num_seqs)
        counts = [0] * len(chances)
        if not pays:
            self.drafting.doubt()
            return counts
        likely = sorted(range(len(chances)), key=lambda i: -sum(chances[i]))
        for number in likely[: 1 + num_seqs // PROBE_SHARE]:
            counts[number] = min(PROBE_TOKENS, best_case[number])
        return counts
