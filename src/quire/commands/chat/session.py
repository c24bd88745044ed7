"""A conversation and its commands. Knows no terminal but `print`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quire.commands.chat.answer import THINK, Answerer, AnswerPart, Message
from quire.commands.chat.terminal import AnswerView
from quire.commands.screen import in_words
from quire.errors import PromptTooLongError, QuireError
from quire.fields import fields_of
from quire.params import SamplingParams
from quire.spelling import nearest

CUT = "(cut at the token limit; /more goes on)"
CUT_REASONING = "(cut at the token limit before the answer: /set max_tokens N, then /regen)"
DROPPED = "(the context is full: the oldest turn is left out; --context keep refuses instead)"
NO_SWITCH = "the chat template of this model has no switch for reasoning"
# What means nothing where one answer is shown as text.
_NO_SETTINGS = {"n", "logprobs", "prompt_logprobs", "logprob_token_ids", "stream_interval"}
SETTINGS = {
    name: field.sentence
    for name, field in fields_of(SamplingParams).items()
    if field.sentence and name not in _NO_SETTINGS
}


class Session:
    """A chat's messages so far, the settings of answers, and the time that the last answer took."""

    def __init__(
        self,
        answerer: Answerer,
        settings: dict[str, Any],
        system: str | None,
        drop: bool = True,
        hide: bool = False,
    ) -> None:
        """With `drop`, a conversation that is too long loses its oldest turns. `hide` shows no reasoning."""
        self.failed = False  # whether the last answer did not come to its end
        self._drop = drop
        self._hide = hide
        self._answerer = answerer
        self._settings = settings
        self._system = system
        self._messages: list[Message] = []
        self._last: AnswerPart | None = None
        self._times = (0.0, 0.0, 0.0)  # start, first and last piece of the last answer
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/help": (self._help, "list the commands"),
            "/new": (self._new, "start over; the system message stays"),
            "/system": (self._set_system, "/system TEXT sets the system message; alone, it shows it"),
            "/set": (self._set, "/set NAME VALUE sets a sampling parameter; alone, it shows all"),
            "/think": (self._think, "/think on or off asks for reasoning or none; alone, the model decides"),
            "/reasoning": (self._show, "/reasoning show or hide: the text itself, or one line in its place"),
            "/regen": (self._regenerate, "answer the last message again"),
            "/edit": (self._edit, "/edit TEXT replaces your last message and asks again"),
            "/more": (self._more, "continue the last answer"),
            "/save": (self._save, "/save FILE writes the conversation as JSON, to a new file"),
            "/save!": (self._overwrite, "/save! FILE writes it over a file that is there"),
            "/load": (self._load, "/load FILE reads one"),
            "/tokens": (self._tokens, "show how much of the context is used"),
            "/stats": (self._stats, "show counts and times of the last answer"),
            "/quit": (lambda _: None, "end"),
        }

    @property
    def names(self) -> list[str]:
        """List the commands, for completion."""
        return list(self._commands)

    def take(self, line: str) -> bool:
        """Take a message or a command; False ends the conversation."""
        if not line.startswith("/") or line.startswith("//"):
            self._messages.append({"role": "user", "content": line[1:] if line.startswith("//") else line})
            self._answer()
            return True
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return False
        if name not in self._commands:
            _note(f"there is no {name}; /help lists the commands (// begins a message with /)")
            return True
        try:
            self._commands[name][0](rest.strip())
        except (QuireError, OSError, ValueError, TypeError) as error:
            _note(in_words(error))
        return True

    # --- answers

    def _conversation(self) -> list[Message]:
        start = [{"role": "system", "content": self._system}] if self._system else []
        return [*start, *self._messages]

    def _answer(self, more: bool = False) -> None:
        """Print the answer as it comes. Ctrl-C keeps what was said; an error takes the question back."""
        text, began = "", time.monotonic()
        first = last = began
        self._last = None
        self.failed = False
        view = AnswerView(self._hide)
        try:
            for piece in self._pieces(more):
                if piece.text or piece.reasoning:
                    last = time.monotonic()
                    first = last if first == began else first
                view.add(piece)
                text += piece.text
                self._last = piece
        except KeyboardInterrupt:
            view.add(AnswerPart(" ..."))
        except QuireError as error:
            self.failed = True
            view.end(whole=False)
            _note(f"the answer broke off and is not kept: {error}" if text else f"{error} (/new starts over)")
            if not more:
                self._messages.pop()
            return
        view.end()
        self._times = (began, first, last)
        if more:
            self._messages[-1]["content"] += text
        else:
            self._messages.append({"role": "assistant", "content": text})
        if self._last is not None and self._last.finish_reason == "length":
            _note(CUT if text or not view.thought else CUT_REASONING)

    def _pieces(self, more: bool) -> Iterator[AnswerPart]:
        """Ask for the answer; while the conversation is too long, without its oldest turn."""
        while True:
            try:
                yield from self._answerer.answer(self._conversation(), self._settings, more)
                return
            except PromptTooLongError:
                asked = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
                if not self._drop or len(asked) < 2:
                    raise
            del self._messages[: asked[1]]
            _note(DROPPED)

    def _drop_answer(self) -> str:
        """Remove the last answer and its question; returns the question. ValueError without one."""
        while self._messages:
            message = self._messages.pop()
            if message["role"] == "user":
                return str(message["content"])
        raise ValueError("there is no message yet")

    # --- commands

    def _help(self, _: str) -> None:
        for name, (_run, text) in self._commands.items():
            _note(f"  {name:8} {text}")
        _note("  Esc Enter or Alt-Enter starts a new line; pasted text is one message.")

    def _new(self, _: str) -> None:
        self._messages.clear()

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
        _note(self._system or "there is no system message")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name and name not in SETTINGS:
            raise ValueError(f"there is no parameter {name}{nearest(name, SETTINGS)}")
        if not name:
            for known, sentence in SETTINGS.items():
                now = json.dumps(self._settings[known]) if known in self._settings else "(default)"
                _note(f"  {known:30} {now:12} {sentence}")
            return
        given = {key: now for key, now in self._settings.items() if key != name}
        if value:
            given[name] = _value(value)
            SamplingParams(**{key: now for key, now in given.items() if key != THINK})
        self._settings = given
        _note(", ".join(f"{k} {json.dumps(v)}" for k, v in given.items()) or "the model's defaults")

    def _think(self, text: str) -> None:
        if text not in ("", "on", "off"):
            raise ValueError(f"/think takes on or off, not {text}")
        if text and self._answerer.switches_thinking() is False:
            raise ValueError(NO_SWITCH)
        self._settings.pop(THINK, None)
        if text:
            self._settings[THINK] = text == "on"
        _note(f"reasoning {text or 'as the model decides'}")

    def _show(self, text: str) -> None:
        if text not in ("show", "hide"):
            raise ValueError(f"/reasoning takes show or hide{f', not {text}' if text else ''}")
        self._hide = text == "hide"
        _note("reasoning is hidden behind one line" if self._hide else "reasoning is shown")

    def _regenerate(self, _: str) -> None:
        self._edit(self._drop_answer())

    def _edit(self, text: str) -> None:
        if not text:
            raise ValueError("/edit needs the new message: /edit TEXT")
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._drop_answer()
        self._messages.append({"role": "user", "content": text})
        self._answer()

    def _more(self, _: str) -> None:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            raise ValueError("there is no answer to continue")
        self._answer(more=True)

    def _save(self, path: str) -> None:
        try:
            self._write(path, "x")
        except FileExistsError as error:
            raise ValueError(f"{path} is there already: /save! {path} overwrites it") from error

    def _overwrite(self, path: str) -> None:
        self._write(path, "w")

    def _write(self, path: str, mode: str) -> None:
        if not path:
            raise ValueError("/save needs a file: /save FILE")
        with Path(path).expanduser().open(mode, encoding="utf-8") as file:
            file.write(json.dumps({"messages": self._conversation()}, indent=2) + "\n")
        _note(f"saved {len(self._messages)} messages to {path}")

    def _load(self, path: str) -> None:
        if not path:
            raise ValueError("/load needs a file: /load FILE")
        try:
            data = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in data["messages"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no conversation that /save wrote") from error
        if messages and messages[0]["role"] == "system":
            self._system = messages.pop(0)["content"]
        self._messages = messages
        _note(f"loaded {len(messages)} messages from {path}")

    def _tokens(self, _: str) -> None:
        used, longest = self._answerer.count(self._conversation())
        _note(f"{used:,} of {longest:,} tokens of context")

    def _stats(self, _: str) -> None:
        if self._last is None:
            raise ValueError("there is no answer yet")
        began, first, last = self._times
        rate = (self._last.output_tokens - 1) / (last - first) if last > first else 0.0
        _note(
            f"{self._last.prompt_tokens:,} prompt tokens, {self._last.output_tokens:,} output tokens, "
            f"first after {first - began:.2f} s, {rate:.1f} tokens/s"
        )


def _value(text: str) -> Any:
    """Read the value of a parameter: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _note(text: str) -> None:
    """Print a note that is not part of the conversation."""
    print(text, file=sys.stderr)
