"""Text that arrives in pieces, for parsers written as coroutines that cannot see where it was split.

A parser is a generator that yields when it needs more text. It decides only what later text cannot change, so its
result depends on the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from quire.text.output.events import SPACE

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

MAX_NAME = 512
_SPACES = re.compile(f"[{SPACE}]+")


class Unreadable(Exception):
    """The text is not what was expected, or ends too early."""


class Reader:
    """Text with a position. Text before both `at` and `mark` is forgotten."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.mark: int | None = None
        self.ended = False
        self._forgotten = 0

    @property
    def place(self) -> int:
        """How many characters of the output have been read."""
        return self._forgotten + self.at

    def add(self, text: str) -> None:
        cut = self.at if self.mark is None else self.mark
        self._forgotten += cut
        self.text = self.text[cut:] + text
        self.at -= cut
        if self.mark is not None:
            self.mark = 0

    def since_mark(self) -> str:
        """Return what was read since the mark, and remove the mark."""
        text = "" if self.mark is None else self.text[self.mark : self.at]
        self.mark = None
        return text

    def peek(self) -> Steps[str]:
        """Return the next character; empty at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def take(self) -> Steps[str]:
        """Read the next character. Unreadable at the end."""
        c = yield from self.peek()
        if not c:
            raise Unreadable
        self.at += 1
        return c

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read some of the characters that match; empty if the next one does not, or at the end.

        `pattern` must match every part of what it matches. Call again for the rest of the run.
        """
        yield from self.peek()
        found = pattern.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found.group()

    def whole_run(self, pattern: re.Pattern[str], limit: int = MAX_NAME) -> Steps[str]:
        """Read all characters that match. Unreadable if there are more than `limit`."""
        parts = ""
        while part := (yield from self.run(pattern)):
            parts += part
            if len(parts) > limit:
                raise Unreadable
        return parts

    def skip_space(self) -> Steps[None]:
        while (yield from self.run(_SPACES)):
            pass

    def match(self, options: tuple[str, ...]) -> Steps[str | None]:
        """Read the longest of `options` that comes next, or nothing."""
        size = max(map(len, options), default=0)
        while True:
            rest = self.text[self.at : self.at + size]
            if self.ended or not any(len(o) > len(rest) and o.startswith(rest) for o in options):
                found = max((o for o in options if rest.startswith(o)), key=len, default=None)
                self.at += len(found or "")
                return found
            yield

    def expect(self, text: str) -> Steps[None]:
        if (yield from self.match((text,))) is None:
            raise Unreadable

    def found_ahead(self, markers: tuple[str, ...]) -> Steps[bool]:
        """Whether one of `markers` follows anywhere; waits for the end of the text if none does. Needs a mark."""
        assert self.mark is not None
        longest = max(map(len, markers))
        searched = self.at - self.mark
        while True:
            if any(self.text.find(marker, self.mark + searched) >= 0 for marker in markers):
                return True
            if self.ended:
                return False
            searched = max(searched, len(self.text) - self.mark - longest + 1)
            yield

    def scan(self, markers: tuple[str, ...], starts: re.Pattern[str] | None, sink: Emit) -> Steps[str]:
        """Pass text to `sink` until one of `markers` is read, and mark where that begins. Empty at the end.

        `starts` finds the first characters of markers, None if there are no markers.
        """
        while (yield from self.peek()):
            found = None if starts is None else starts.search(self.text, self.at)
            to = len(self.text) if found is None else found.start()
            if to > self.at:
                passed, self.at = self.text[self.at : to], to
                sink(passed)
            if found is not None:
                self.mark = self.at
                marker = yield from self.match(markers)
                if marker is not None:
                    return marker
                self.mark = None
                self.at += 1
                sink(self.text[self.at - 1])
        return ""


def starts_of(markers: tuple[str, ...]) -> re.Pattern[str] | None:
    """Make a pattern for `Reader.scan` that finds the first character of any marker."""
    letters = sorted({marker[0] for marker in markers})
    return re.compile("[" + "".join(map(re.escape, letters)) + "]") if letters else None
