"""Finds stop strings in a text that arrives in pieces.

A stop string ends the text at the first character that completes one; of two completed by the same character
the longer counts. That rule sees characters alone, so how tokens split the text does not change the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import copy
from typing import Protocol

from quire.errors import RequestError
from quire.text.tokenizer import check_text

MAX_STOP_CHARACTERS = 16384


class StopMatcher:
    """Finds the first of several strings in a stream of characters (Aho and Corasick 1975).

    `depth` is the length of the longest end of the stream that could still become a stop string: what must be
    held back. Cost is constant per character, whatever the strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if sum(map(len, stop)) > MAX_STOP_CHARACTERS:
            raise RequestError(f"stop must be at most {MAX_STOP_CHARACTERS} characters in all", "stop")
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for text in stop:
            check_text(text, "stop")
            self._insert(text)
        self._fail = self._failures()
        self._first = re.compile("[" + "".join(map(re.escape, self._next[0])) + "]")
        self._state = 0

    def _insert(self, text: str) -> None:
        node = 0
        for c in text:
            if c not in self._next[node]:
                self._next[node][c] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
            node = self._next[node][c]
        self._found[node] = text

    def _failures(self) -> list[int]:
        """Find each node's longest proper suffix, breadth first; inherits shorter matches."""
        fail = [0] * len(self._next)
        queue = list(self._next[0].values())
        for node in queue:
            for c, child in self._next[node].items():
                fail[child] = self._step(fail, fail[node], c)
                if self._found[child] is None:
                    self._found[child] = self._found[fail[child]]
                queue.append(child)
        return fail

    def _step(self, fail: list[int], state: int, c: str) -> int:
        while (to := self._next[state].get(c)) is None:
            if not state:
                return 0
            state = fail[state]
        return to

    @property
    def depth(self) -> int:
        return self._depth[self._state]

    def held(self, include: bool) -> int:
        """How many characters at the end must be held back: none if the stop string is part of the text."""
        return 0 if include else self.depth

    def reset(self) -> None:
        """Forget the text so far."""
        self._state = 0

    def twin(self) -> StopMatcher:
        """Make another matcher with the same tables, before any text."""
        other = copy(self)
        other.reset()
        return other

    def finish(self) -> tuple[int, str] | None:
        """End the text, where no more can match."""
        return None

    def feed(self, text: str, ignore: bool = False) -> tuple[int, str] | None:
        """Take `text`; give the first match as (characters of `text` up to its end, stop string), or None.

        With `ignore` matches are passed over, but their characters still count towards later ones.
        """
        state, at = self._state, 0
        if not state:
            first = self._first.search(text)
            if first is None:
                return None
            at = first.start()
        for i in range(at, len(text)):
            state = self._step(self._fail, state, text[i])
            found = self._found[state]
            if found is not None and not ignore:
                self._state = state
                return i + 1, found
        self._state = state
        return None


class Matcher(Protocol):
    """Finds stop strings, as StopMatcher does."""

    def feed(self, text: str, ignore: bool = False) -> tuple[int, str] | None: ...
    def finish(self) -> tuple[int, str] | None: ...
    def held(self, include: bool) -> int: ...
    def twin(self) -> Matcher: ...


Narrow = Callable[[StopMatcher], Matcher]
