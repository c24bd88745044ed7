"""Names of prefixes, and which replicas hold them: bookkeeping alone.

A prefix is named by the digest of its text, in blocks of 1,024 bytes: each digest covers its block and all before it.
Text will do for routing, since a rendered chat shares its prefix as text too, and a router has no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from quire.serve.held import BLOCK_BYTES, Held, read

MOST_BLOCKS = 512
"""Blocks of a prompt that have names: a router needs no more, and headers stay short."""
_BITS = (1 << 60) - 1  # an int of 60 bits takes 32 bytes, one of 64 takes 48


class Prompt(msgspec.Struct):
    """The fields of a body that make its prompt, as slices of the body: nothing is built from them."""

    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @property
    def text(self) -> bytes:
        """The prompt in the order of templates, so that a longer chat begins as a shorter one does."""
        parts = (self.tools, self.system, self.instructions, self.messages, self.prompt, self.input)
        return b"".join(map(bytes, parts))


def digests(text: bytes, *salt: str) -> list[int]:
    """Name the prefixes of a text, one for each whole block. `salt` keeps caches apart: owner, model, cache salt."""
    digest = xxhash.xxh3_64_intdigest("\0".join(salt).encode())
    found = []
    for start in range(0, min(len(text) // BLOCK_BYTES, MOST_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        digest = xxhash.xxh3_64_intdigest(text[start : start + BLOCK_BYTES], digest)
        found.append(digest & _BITS)
    return found


class Prefixes:
    """The replicas that hold a prefix, as bits, by digest.

    A cache gives up a prefix before what it begins with, so the length that is held is found by bisection.
    """

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self._held: dict[int, Held] = {}

    def add(self, index: int, capacity: int) -> None:
        """Begin with a replica, whose cache is empty and has room for `capacity` tokens."""
        self._held[index] = Held(capacity)

    def touch(self, index: int, names: Sequence[int], each: int) -> None:
        """Note that a replica computes a prompt."""
        came, gone = self._held[index].touch(names, each)
        holders, bit = self.holders, 1 << index
        for name in came:
            holders[name] = holders[name] | bit if name in holders else bit
        self._remove(index, gone)

    def clear(self, index: int) -> None:
        """Note that a replica holds nothing."""
        self._remove(index, self._held[index].order)
        self._held[index].clear()

    def events(self, index: int, changes: Iterable[Sequence[str]], *, reset: bool, each: int = 256) -> None:
        """Take a replica's word on its cache, as `Held.since` tells it."""
        if reset:
            self.clear(index)
        for sign, *spelled in changes:
            names = read(spelled)
            if sign == "+":
                self.touch(index, names, each)
            else:
                self._held[index].drop(names)
                self._remove(index, names)

    def depth(self, names: Sequence[int], replicas: int, most: int) -> int:
        """Count the leading blocks, up to `most`, that at least one of the replicas holds. `replicas` are bits."""
        holders = self.holders
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if holders.get(names[middle - 1], 0) & replicas:
                low = middle
            else:
                high = middle - 1
        return low

    def _remove(self, index: int, names: Iterable[int]) -> None:
        holders, others = self.holders, ~(1 << index)
        for name in names:
            if left := holders.get(name, 0) & others:
                holders[name] = left
            else:
                holders.pop(name, None)
