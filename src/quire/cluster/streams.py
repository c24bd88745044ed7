"""One client's stream over one or several replicas: whole events pass, marks are kept or dropped. Reads no JSON.

Replicas put comment lines into streams for routers: `: t` before an event tells how another replica comes to its end,
`: s` is a sign of life with the replica's load, `: moved` gives the stream up. All other bytes pass as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import xxhash

from quire.errors import QuireError

ENDS = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: error",
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
)
"""ENDS begin the last event of a stream: nothing else is a good end."""


class DiffersError(QuireError):
    """A replica sent something else than what the client already has."""


class Passage:
    """What the client got of a stream: the marks of its events if they have some, else a digest of each."""

    def __init__(self) -> None:
        self.events = 0
        self.marks = bytearray()
        self.digests = array("Q")
        self.ended = False

    @property
    def sent(self) -> list[str]:
        """The marks, one a line."""
        return self.marks.decode("latin-1").split("\n")[:-1]


class Reader:
    """Reads the stream of one replica: `feed` returns what the client lacks. `word` is called with a replica's load.

    What the client has without marks comes again from the start, and must be the same.
    """

    def __init__(self, passage: Passage, word: Callable[[bytes], None]) -> None:
        self._passage, self._word = passage, word
        self._due = array("Q") if passage.marks else passage.digests[::-1]
        self._data = bytearray()
        self.moved = ""
        """Why the replica gives the stream up: drained or engine."""
        self.signs = False
        """Whether it gives signs of life."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the stream. Raises DiffersError."""
        seen = max(0, len(self._data) - 1)
        self._data += data
        if (end := self._data.rfind(b"\n\n", seen)) < 0:
            return b""
        blocks = bytes(self._data[:end]).split(b"\n\n")
        del self._data[: end + 2]
        passed = [block for block in map(self._unmarked, blocks) if block]
        return b"\n\n".join([*passed, b""]) if passed else b""

    def _unmarked(self, block: bytes) -> bytes:
        """Take the marks out of a block, and count it; empty if there is nothing else, or the client has it."""
        marks = b""
        while block.startswith(b": "):
            line, _, rest = block.partition(b"\n")
            if line.startswith(b": t "):
                marks += line[4:] + b"\n"
            elif line.startswith(b": s "):
                self._word(line[4:])
            elif line.startswith(b": moved"):
                self.moved = line[8:].decode("latin-1") or "drained"
                return b""
            else:
                return block  # a comment of its own
            self.signs, block = True, rest
        passage = self._passage
        passage.marks += marks
        if not block or self.moved:
            return b""
        if self._due:
            if xxhash.xxh3_64_intdigest(block) != self._due.pop():
                raise DiffersError("another replica's answer differs from what was sent already")
            return b""
        passage.events += 1
        passage.ended |= block.startswith(ENDS)
        if not passage.marks:
            passage.digests.append(xxhash.xxh3_64_intdigest(block))
        return block
