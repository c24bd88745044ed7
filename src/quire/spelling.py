"""Finds the known names that unknown ones were meant to be. Loaded when a name is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from quire.lazy import Lazy

if TYPE_CHECKING:
    import difflib
else:
    difflib = Lazy("difflib")

MAX_NAME = 64  # characters of a name that is compared


def nearest(word: str, known: Iterable[str]) -> str:
    """Make "; did you mean ...?" if a known word is close to `word`, else an empty string."""
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def as_arguments(text: str) -> str:
    """Spell the options in a message as Python's arguments (max_model_len), but those in a command (`quire ...`)."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![\w-])--([a-z][a-z0-9-]*)", _argument, part) for part in parts[::2]]
    return "`".join(parts)


def _argument(flag: re.Match[str]) -> str:
    return flag[1].replace("-", "_")


def near(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that `name` misspells: other case or separators, or one letter wrong (two in long names)."""
    if len(name) > MAX_NAME:
        return None
    plain = _plain(name)
    for other in known:
        letters = _plain(other)
        shortest = min(len(plain), len(letters))
        limit = 0 if shortest < 5 else 1 if shortest < 9 else 2
        if abs(len(plain) - len(letters)) <= limit and _distance(plain, letters) <= limit:
            return other
    return None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _distance(a: str, b: str) -> int:
    """Edit distance in which swapped neighbours count once (optimal string alignment)."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(last[j] + 1, row[-1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]
