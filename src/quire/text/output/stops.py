"""Finds stop strings in the content of an output: not in reasoning, markers, or calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.text.output.events import Content, Event
from quire.text.output.parser import OutputParser
from quire.text.stop_strings import StopMatcher


class AnswerStops:
    """Matches what a StopMatcher does, in the content alone; `make` gives the parser, located, that finds it.

    A stop string stands in one piece: none reaches over a call, a marker or another message. What a stop string may
    still cut off is held back until the parser knows what it is.
    """

    def __init__(self, make: Callable[[], OutputParser], matcher: StopMatcher) -> None:
        self._make = make
        self._matcher = matcher
        self._parser = make()
        self._num_read = 0  # characters of the output
        self._num_taken = 0  # characters of the content
        self._counts_from = 0
        self._given = 0  # characters that are no longer held
        self._last = -1

    def twin(self) -> AnswerStops:
        return AnswerStops(self._make, self._matcher.twin())

    def held(self, include: bool) -> int:
        """How many characters at the end of the output must be held back."""
        depth = self._matcher.depth
        begins = self._last + 1 - depth if depth else self._num_read
        self._given = max(self._given, min(begins, self._parser.decided))
        return self._num_read - self._given

    def feed(self, text: str, ignore: bool = False) -> tuple[int, str] | None:
        """Take `text`; give the first match, as StopMatcher does. It may end before `text` begins."""
        self._num_read += len(text)
        if ignore:
            self._counts_from = self._num_read
        return self._match(self._parser.feed(text), self._num_read - len(text))

    def finish(self) -> tuple[int, str] | None:
        """End the output; give a match whose end is counted from there."""
        return self._match(self._parser.finish(), self._num_read)

    def _match(self, events: Sequence[Event], origin: int) -> tuple[int, str] | None:
        content = "".join(event.text for event in events if isinstance(event, Content))
        places = self._parser.places[self._num_taken : self._num_taken + len(content)]
        self._num_taken += len(content)
        for c, place in zip(content, places, strict=False):  # a forced call's content has no places
            if place != self._last + 1:
                self._matcher.reset()
            self._last = place
            if place < self._given:
                continue  # white space before a call, which is shown already
            found = self._matcher.feed(c)
            if found is not None and place >= self._counts_from:
                return place + 1 - origin, found[1]
        return None
