"""The slot part: one kind of state that the runner keeps per slot, and its role in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.devices.sampling import SlotSampling
from quire.runtime.inputs import StepLayout
from quire.runtime.rows import StepRows
from quire.types import NewSeq, StepOutput


def slot_sampling(new: NewSeq) -> SlotSampling:
    """Make the sampling state of a sequence, with the output that it has from before a preemption, if any."""
    request, params = new.request, new.request.sampling
    return SlotSampling(
        seed=request.sample_seed(new.index),
        params=params,
        stop_ids=request.eos_token_ids + tuple(params.stop_token_ids or ()),
        bad_words=request.bad_words_token_ids,
        prompt_tokens=request.tokens,
        output_tokens=new.tokens[len(request.tokens) :],
    )


Collect = Callable[[StepOutput], None]
"""Collect adds what a part launched in a step to the step's output."""


class SlotPart(Protocol):
    """State per slot, the rows that it reads in a step, and the results it takes from them.

    In each step the runner calls `clear` for freed slots, `set` for new ones, then `rows` of every active part; it
    launches the step and calls `launch` of the same parts, always in the order of the parts; once the device is done it
    calls what they returned, in this order too. By then a later step may have been launched, in which slots were freed
    and taken anew. One call is made at a time. `active` and `greedy` change only in `set` and `clear`.
    """

    def set(self, new: NewSeq) -> None:
        """Give a sequence its slot. Parts ignore sequences that don't concern them."""

    def clear(self, slot: int) -> None:
        """Forget a slot. Unknown slots are ignored."""

    @property
    def active(self) -> bool:
        """Tell whether any slot has something for this part to do in a step."""

    def rows(self, step: StepLayout) -> list[int]:
        """List the tokens of the step (0..T-1, ascending) whose logits or hidden states this part reads."""

    @property
    def greedy(self) -> bool:
        """Tell whether all slots of this part need only the largest logit of each row."""

    def launch(self, rows: StepRows, first: int) -> Collect | None:
        """Have the device work on the step's result; returns what collects it. The part's own rows start at `first`."""
