"""What the samples of a call have made, as lines of text that another engine reads to go on. Knows no HTTP.

A line is a delta in base64 of msgpack, without what is the same as before: its tokens, and where there is more to tell
how the sample ended, its counts, its log-probabilities.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec

from quire.types import Delta, Request

_pack = msgspec.msgpack.Encoder().encode


class Teller:
    """Writes the deltas of a call's requests as lines."""

    def __init__(self, requests: list[Request]) -> None:
        self._places = {request.id: place for place, request in enumerate(requests)}
        self._counts: dict[tuple[int, int], tuple[int, ...]] = {}
        self._lines: list[bytes] = []

    def take(self, delta: Delta) -> None:
        """Note a delta that is about to become text. Those of programs, which start again, are not told."""
        if delta.events is not None:
            return
        place, usage = self._places[delta.request_id], delta.usage
        counts: tuple[int, ...] | None
        counts = usage.num_cached, usage.num_accepted, usage.num_rejected, usage.num_computed
        if self._counts.get((place, delta.index)) == counts:
            counts = None
        else:
            self._counts[place, delta.index] = counts
        told: list[Any] = [place, delta.index, delta.tokens, delta.finish_reason, delta.stop_reason]
        told += [delta.complete or None, counts, delta.logprobs, delta.prompt_logprobs]
        while told[-1] is None:
            told.pop()
        self._lines.append(b64encode(_pack(told)))

    def lines(self) -> list[bytes]:
        """Return the lines since the last call."""
        lines, self._lines = self._lines, []
        return lines
