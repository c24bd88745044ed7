"""Reads what the user types: with history and line editing on a terminal, plain lines from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.commands.screen import in_words
from quire.lazy import Lazy
from quire.meter import takes_codes
from quire.text.stdin import read_lines

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
