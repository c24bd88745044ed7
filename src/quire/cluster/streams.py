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
    """Reads the stream of one replica: `feed` returns what the client gets.

    Args:
        passage: What the client has.
        again: The replica was asked the same again, so its first events must be those that the client has.
        word: Called with a replica's load.
    """

    def __init__(self, passage: Passage, word: Callable[[bytes], None], again: bool = False) -> None:
        self._passage, self._word = passage, word
        self._compared = passage.digests[:] if again else array("Q")
        self._place = 0
        self._parts: list[bytes] = []
        self.moved = ""
        """Why the replica gives the stream up: drained or engine."""
        self.signs = False
        """Whether it gives signs of life."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the stream. Raises DiffersError."""
        last = self._parts[-1][-1:] if self._parts else b""
        if b"\n\n" not in last + data:
            self._parts.append(data)
            return b""
        data = b"".join([*self._parts, data])
        end = data.rfind(b"\n\n")
        self._parts = [rest] if (rest := data[end + 2 :]) else []
        passed = []
        for block in data[:end].split(b"\n\n"):
            if (block := self._unmarked(block)) and not self.moved:
                passed.append(block)
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
        if self._place < len(self._compared):
            return self._compare(block)
        passage.events += 1
        passage.ended |= block.startswith(ENDS)
        if not passage.marks:
            passage.digests.append(xxhash.xxh3_64_intdigest(block))
        return block

    def _compare(self, block: bytes) -> bytes:
        if xxhash.xxh3_64_intdigest(block) != self._compared[self._place]:
            raise DiffersError("another replica's answer differs from what was sent already")
        self._place += 1
        return b""
