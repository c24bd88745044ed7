"""How an answer is shown: the text on standard output, and its reasoning, marked and dimmed, on standard error."""

from __future__ import annotations

import sys
import time

from quire.commands.chat.answer import AnswerPart
from quire.commands.screen import Paper, StatusLine


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
