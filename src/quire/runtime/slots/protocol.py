"""What a slot part is: one kind of state that the runner keeps per slot, with what a step does with it."""

from __future__ import annotations

from typing import Protocol

from quire.runtime.inputs import Layout
from quire.runtime.rows import StepRows
from quire.types import NewSeq, StepOutput


class SlotPart(Protocol):
    """State per slot, the rows that it reads in a step, and what it takes out of them.

    In each step the runner calls `clear` for freed slots, `set` for new ones, then `rows` of every part, computes the
    step, and calls `take` of every part, always in the order of the parts. All calls are made by one thread.
    """

    def set(self, new: NewSeq) -> None:
        """A sequence takes a slot. Parts ignore sequences that do not concern them."""

    def clear(self, slot: int) -> None:
        """Forget a slot. Unknown slots are ignored."""

    def rows(self, step: Layout) -> list[int]:
        """The tokens of the step (0..T-1, ascending) of which this part reads logits or hidden states."""

    @property
    def greedy(self) -> bool:
        """Whether all slots of this part need at most the largest logit of each row, and no other."""

    def take(self, rows: StepRows, first: int, output: StepOutput) -> None:
        """Read the step's result, and add to `output`. The part's own rows are those from `first` on."""
