"""Reads what the user types: with history and line editing on a terminal, plain lines from a pipe."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.commands.chat.answer import AnswerPart
from quire.commands.screen import Paper, StatusLine, in_words
from quire.lazy import Lazy
from quire.meter import takes_codes
from quire.text.stdin import read_lines


class AnswerView:
    """Shows one answer as it comes. Reasoning is shown between two marks, or `hidden` behind one line."""

    def __init__(self, hidden: bool) -> None:
        self.thought = False
        self._wrote = False
        self._hidden = hidden
        self._text = Paper(sys.stdout)
        self._aside = Paper(sys.stderr, dim=True)
        self._status = StatusLine(sys.stderr)
        self._began: float | None = None  # when the open reasoning began

    def add(self, piece: AnswerPart) -> None:
        if piece.prompt_done is not None:
            self._status.show(f"reading the prompt: {piece.prompt_done:,} of {piece.prompt_tokens:,} tokens")
        if piece.reasoning:
            self._think(piece)
        if piece.text:
            self._end_reasoning()
            self._wrote = True
            self._text.write(piece.text)

    def end(self, whole: bool = True) -> None:
        """End the answer's line, and one that is not `whole` if it has begun."""
        self._end_reasoning()
        if whole or self._wrote:
            self._text.write("\n")

    def _think(self, piece: AnswerPart) -> None:
        opens, self.thought = self._began is None, True
        if opens:
            self._status.clear()
        self._began = began = time.monotonic() if self._began is None else self._began
        if self._hidden:
            tokens = f", {piece.output_tokens:,} tokens" if piece.output_tokens else ""
            self._status.show(f"thinking... {time.monotonic() - began:.0f} s{tokens}")
        else:
            self._aside.write(("Thinking...\n" if opens else "") + piece.reasoning)

    def _end_reasoning(self) -> None:
        self._status.clear()
        if self._began is not None:
            seconds, self._began = time.monotonic() - self._began, None
            self._aside.write(f"thought for {seconds:.0f} s\n" if self._hidden else "\n...done thinking.\n\n")


if TYPE_CHECKING:
    import prompt_toolkit
    from prompt_toolkit import completion, history, key_binding
else:  # 0.1 s to import, and only a terminal needs them
    prompt_toolkit = Lazy("prompt_toolkit")
    completion = Lazy("prompt_toolkit.completion")
    history = Lazy("prompt_toolkit.history")
    key_binding = Lazy("prompt_toolkit.key_binding")


def lines(commands: Sequence[str]) -> Iterator[str]:
    """Yield messages without surrounding space, blank ones left out; ends with the input (Ctrl-D).

    Ctrl-C clears the line.
    """
    typed = _typed(commands) if sys.stdin.isatty() else read_lines(sys.stdin.buffer)
    for line in typed:
        if line.strip():
            yield line.strip()


def _typed(commands: Sequence[str]) -> Iterator[str]:
    if not takes_codes(sys.stdin):
        yield from _plain()
        return
    bindings = key_binding.KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: key_binding.KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: prompt_toolkit.PromptSession[str] = prompt_toolkit.PromptSession(
        history=_history(),
        completer=completion.WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        key_bindings=bindings,
    )
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            print("Ctrl-D or /quit ends.", file=sys.stderr)
        except EOFError:
            return


def _plain() -> Iterator[str]:
    """Read without escape codes, for terminals that know none."""
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            return


def _history() -> history.History:
    """Open the history, a file in the user's state directory (XDG Base Directory specification).

    Where that directory cannot be written, history lasts as long as the chat.
    """
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "quire"
    file = base / "chat-history"
    try:
        base.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        print(f"What you type is not kept for the next chat: {in_words(error)}", file=sys.stderr)
        return history.InMemoryHistory()
    return history.FileHistory(str(file))
