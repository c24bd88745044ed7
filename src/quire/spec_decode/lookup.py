"""Drafts copied from known text: the sequence itself (prompt lookup), or the output that a request predicts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire import _native
from quire.devices.shared import Shared
from quire.spec_decode.proposer import NO_DRAFT, Draft, Proposer, SpecSequence, StepView

REALIGN_TOKENS = (2, 16)
"""A draft from a prediction resumes where the last 2 to 16 tokens of the output are found in it."""
MOST_SEARCHED = 1 << 20
"""MOST_SEARCHED tokens of predictions are searched in a step, in turns: a few milliseconds at worst."""


def lookup(tokens: array[int], low: int, high: int, count: int) -> list[int]:
    """Copy the `count` tokens after the first earlier occurrence of the longest n-gram (low..high) that ends `tokens`.

    Saxena 2023, "Prompt lookup decoding". Fewer where the sequence ends; none where no n-gram occurred before.
    """
    end, length = _native.find_last_tokens(tokens[:-1], tokens, low, high)
    return tokens[end : end + count].tolist() if length else []


class NgramProposer(Proposer):
    """Prompt lookup in the sequence's own tokens, prompt and output."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    def propose(self, asks: Sequence[tuple[SpecSequence, int]], step: StepView) -> list[Draft]:
        return [Draft(lookup(seq.tokens, self._low, self._high, count)) for seq, count in asks]


class PredictionProposer(Proposer):
    """Drafts of requests that predict their output: the prediction from a cursor on.

    While the output follows the prediction, the cursor moves along. After tokens that differ it is set behind the next
    place where the output's last tokens occur in the prediction.
    """

    def __init__(self) -> None:
        self._texts: Shared[array[int]] = Shared()
        # By slot: the place in the prediction, and the length of the sequence.
        self._cursors: dict[int, tuple[int, int]] = {}
        self._searched = self._turn = 0

    def start(self, seq: SpecSequence) -> None:
        prediction = seq.request.prediction
        self._texts.take(seq.slot, id(prediction), prediction, lambda tokens: array("i", tokens))
        self._cursors[seq.slot] = 0, seq.num_prompt

    def stop(self, seq: SpecSequence) -> None:
        self._texts.clear(seq.slot)
        self._cursors.pop(seq.slot, None)

    def propose(self, asks: Sequence[tuple[SpecSequence, int]], step: StepView) -> list[Draft]:
        self._searched, self._turn = 0, self._turn + 1
        order = [(i + self._turn) % len(asks) for i in range(len(asks))]
        drafts = {i: self._one(*asks[i]) for i in order}
        return [drafts[i] for i in range(len(asks))]

    def _one(self, seq: SpecSequence, count: int) -> Draft:
        text, tokens = self._texts.of(seq.slot), seq.tokens
        cursor, length = self._cursors[seq.slot]
        new = tokens[length:]
        if cursor >= 0 and text[cursor : cursor + len(new)] == new:
            cursor += len(new)
        elif self._searched and self._searched + len(text) > MOST_SEARCHED:
            return NO_DRAFT  # its turn comes
        else:
            self._searched += len(text)
            low, high = REALIGN_TOKENS
            output = tokens[seq.num_prompt :]
            found, matched = _native.find_last_tokens(text, output, low, high, max(0, cursor))
            cursor = found if matched else -1 if cursor < 0 else cursor
            if not matched:
                self._cursors[seq.slot] = cursor, len(tokens)
                return NO_DRAFT
        self._cursors[seq.slot] = cursor, len(tokens)
        return Draft(text[cursor : cursor + count].tolist())
