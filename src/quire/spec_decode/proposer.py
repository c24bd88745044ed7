"""The protocol of proposers: they see what the target computed and drew, and guess the next tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.devices.hidden import HiddenRows
from quire.devices.protocol import IntArray
from quire.spec_decode.acceptance import Odds
from quire.types import Request

Taps = tuple[HiddenRows, ...]


@dataclass(slots=True, eq=False)
class SpecSequence:
    """A sequence that may be drafted for. `tokens` are all its known tokens: the prompt, then the output."""

    slot: int
    request: Request
    index: int
    tokens: array[int]
    odds: Odds
    since_draft: int = 1 << 30  # tokens drawn since the last draft

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def room(self) -> int:
        """Return the most tokens of a draft that could be of use: the target always adds one of its own."""
        return self.request.max_tokens - (len(self.tokens) - self.num_prompt) - 1


@dataclass(slots=True)
class Draft:
    """Guesses for the next tokens. `probabilities[i]`, if known, is the chance of the first i + 1 tokens together."""

    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] | None = None


NO_DRAFT = Draft()


@dataclass(slots=True, frozen=True)
class Computed:
    """The target computed known tokens of `seq` from position `start` on, in `rows` of the step, one for each.

    Rejected drafts are left out. `seq.tokens` has all of these tokens, and at least one more if the step reached the
    end of the sequence.
    """

    seq: SpecSequence
    start: int
    rows: range


@dataclass(slots=True, frozen=True)
class StepView:
    """A step as a proposer with a model sees it.

    It has the block tables [S, M], the number of blocks of each slot, the first position that each sequence of the step
    computed, also without drafts, and the target's tapped layers [T, D].
    `drafting_pays` is false while the controller has drafted nothing for long.
    """

    block_table_SM: IntArray
    num_blocks: Sequence[int] = ()
    starts: Sequence[tuple[int, int]] = ()
    taps: Taps = ()
    drafting_pays: bool = True

    def blocks(self, slot: int) -> IntArray:
        """Return the blocks of a slot's sequence."""
        return self.block_table_SM[slot, : self.num_blocks[slot]]


class Proposer:
    """Drafts for running sequences. All calls are made by one thread, the one that computes steps.

    In each step: `stop` for slots that were freed, `start` for new ones, `observe` once the target has drawn, and then
    perhaps `propose`. Drafts need not be right, and a proposer may always return fewer tokens than it is asked for.
    """

    @property
    def drafts_freely(self) -> bool:
        """Tell whether drafting costs next to nothing, so that drafts are made first and cut afterwards."""
        return True

    @property
    def may_sleep(self) -> bool:
        """Tell whether it may miss steps that plan no drafts; it learns later where they computed."""
        return True

    def start(self, seq: SpecSequence) -> None:
        """Begin with a sequence that takes a slot."""

    def stop(self, seq: SpecSequence) -> None:
        """Forget a sequence that leaves its slot: it ended, or was preempted."""

    def observe(self, computed: Sequence[Computed], step: StepView) -> None:
        """Take in the tokens that the target computed; `seq.tokens` include those just drawn."""

    def propose(self, asks: Sequence[tuple[SpecSequence, int]], step: StepView) -> list[Draft]:
        """Draft at most the given number of tokens for each sequence. All have been observed to their end."""
        raise NotImplementedError
