"""What commands show on a terminal, replayed on a small terminal of our own."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.commands.screen import Paper, StatusLine

WIDTH = 12


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True, scope="module")
def narrow() -> object:
    patch = pytest.MonkeyPatch()
    patch.setenv("TERM", "xterm")
    patch.setenv("COLUMNS", str(WIDTH))
    patch.delenv("NO_COLOR", raising=False)
    yield
    patch.undo()


def lines_of(codes: str) -> list[str]:
    """The lines that a terminal of WIDTH columns shows, by the few codes that we use."""
    lines, column = [""], 0
    for code, letter in re.findall(r"(\x1b\[\d*[A-Za-z]|\r)|([^\r])", codes):
        if letter == "\n":
            lines.append("")
            column = 0
        elif letter:
            assert column < WIDTH, "the terminal itself had to wrap"
            lines[-1] = lines[-1][:column] + letter + lines[-1][column + 1 :]
            column += 1
        elif code == "\r":
            column = 0
        elif code.endswith("G"):
            column = int(code[2:-1]) - 1
        elif code.endswith("K"):
            lines[-1] = lines[-1][:column]
    return lines


def written(pieces: list[str]) -> list[str]:
    screen = Terminal()
    paper = Paper(screen)
    for piece in pieces:
        paper.write(piece)
    return lines_of(screen.getvalue())


@given(st.lists(st.text("ab  \n", max_size=9), max_size=12))
def test_words_that_fit_a_line_are_never_cut(pieces: list[str]) -> None:
    text, lines = "".join(pieces), written(pieces)
    assert re.sub(r"\s", "", text) == re.sub(r"\s", "", "".join(lines))
    words = [word for line in lines for word in line.split()]
    short = [word for word in text.split() if len(word) <= WIDTH]
    assert [word for word in words if word in short] or not short
    for word in short:
        assert word in words
    assert written([text]) == lines


def test_long_words_wide_letters_and_controls() -> None:
    assert written(["a" * 30]) == ["a" * 12, "a" * 12, "a" * 6]
    assert written(["one two three"]) == ["one two ", "three"]
    assert written(["exactly twelv"]) == ["exactly ", "twelv"]
    assert written(["\x1b]0;title\x07\x1b[2J\x9b2Jx\r\x08"]) == ["]0;title[2J2", "Jx"]
    screen = Terminal()
    Paper(screen).write("漢字漢字漢字漢字")
    assert screen.getvalue() == "漢字漢字漢字\n漢字"


def test_elsewhere_text_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = "one two three \x1b[2J" * 3
    pipe = io.StringIO()
    Paper(pipe, dim=True).write(raw)
    StatusLine(pipe).show("never")
    assert pipe.getvalue() == raw
    monkeypatch.setenv("TERM", "dumb")
    screen = Terminal()
    Paper(screen, dim=True).write(raw)
    assert screen.getvalue() == raw


def test_dimmed_text_and_a_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    Paper(screen, dim=True).write("x")
    assert screen.getvalue() == "\x1b[2mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    Paper(plain, dim=True).write("x")
    assert plain.getvalue() == "x"
    changing = Terminal()
    line = StatusLine(changing)
    line.show("first and far too long")
    line.show("second")
    assert lines_of(changing.getvalue()) == ["second"]
    line.clear()
    assert lines_of(changing.getvalue()) == [""]
