"""Bounds on the reasoning of a request. Loaded when a request sets one."""

from __future__ import annotations

from quire.text.formats.shapes import Place, ReasoningFormat
from quire.text.tokenizer import Tokenizer
from quire.types import ThinkingBudget

MAX_TURN = 256  # tokens at the end of a prompt that may tell whether it has begun the reasoning


def thinking_budget(
    limit: int, form: ReasoningFormat, tokenizer: Tokenizer, tokens: list[int], place: Place | None
) -> ThinkingBudget | None:
    """Return the bound on reasoning; None if the output can neither begin nor go on with reasoning.

    `place` is where the prompt leaves the answer; None reads it from the end of the prompt.
    """
    begin, end = form.begin, form.end
    if form.channels is not None:
        channels = form.channels
        begin, end = (channels.channel + channels.reasoning + channels.message,), channels.ends
    if not end:
        return None
    if place is None:
        place = form.place(tokenizer.decode(tokens[-MAX_TURN:], skip_special_tokens=False))
    return None if place == "answer" else ThinkingBudget(limit, begin, end, place == "reasoning")
