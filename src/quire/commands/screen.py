"""What commands show on a terminal: text that wraps at spaces, dimmed text, and a line that changes."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, TextIO

from quire.lazy import Lazy
from quire.meter import CLEAR, redrawn, takes_codes

if TYPE_CHECKING:
    from rich import cells
else:
    cells = Lazy("rich.cells")

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# A model's text may hold codes that move the cursor, set the title or fill the clipboard.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_PARTS = re.compile(r"[ \t]|\n|[^ \t\n]+")


def in_words(error: Exception) -> str:
    """Return an error's message, of the system's errors without their number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


class Paper:
    """Writes text as it comes. On a terminal a word that does not fit moves to the next line, and text may be dim.

    Elsewhere the text stays as it is.
    """

    def __init__(self, stream: TextIO, dim: bool = False) -> None:
        self._stream = stream
        self._wraps = takes_codes(stream)
        dims = dim and self._wraps and "NO_COLOR" not in os.environ
        self._dim, self._plain = (DIM, PLAIN) if dims else ("", "")
        self._column = 0
        self._word = ""  # the last word on the line, which may go on

    def write(self, text: str) -> None:
        if not text:
            return
        if self._wraps:
            width = shutil.get_terminal_size().columns
            clean = text.translate(_CONTROLS)
            text = "".join(self._wrapped(part, width) for part in _PARTS.findall(clean))
        self._stream.write(f"{self._dim}{text}{self._plain}")
        self._stream.flush()

    def _wrapped(self, part: str, width: int) -> str:
        """Place a space, the end of a line, or a piece of a word."""
        if part == "\n" or (part in " \t" and self._column >= width):
            self._column, self._word = 0, ""
            return "\n"
        if part in " \t":
            self._column, self._word = self._column + 1, ""
            return " "
        return "".join(self._placed(letter, width) for letter in part)

    def _placed(self, letter: str, width: int) -> str:
        size = cells.cell_len(letter)
        moved = ""
        if self._column + size > width:
            start = self._column - cells.cell_len(self._word)
            if 0 < start < self._column:  # the word goes to the next line
                moved = f"\x1b[{start + 1}G\x1b[K\n{self._word}"
                self._column -= start
            else:
                moved, self._column, self._word = "\n", 0, ""
        self._column += size
        self._word = "" if size > 1 else self._word + letter  # lines may break beside a wide letter
        return moved + letter


class StatusLine:
    """One line on a terminal that changes until it is cleared; nothing elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if takes_codes(stream) else None
        self._shown = ""

    def show(self, text: str) -> None:
        if self._stream is not None and text != self._shown:
            self._stream.write(redrawn(text))
            self._stream.flush()
            self._shown = text

    def clear(self) -> None:
        if self._shown and self._stream is not None:
            self._stream.write(CLEAR)
            self._stream.flush()
            self._shown = ""
