"""`quire chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.cli import Command
from quire.commands.generate import SamplingOptions
from quire.config import EngineConfig, option
from quire.errors import RequestError
from quire.llm import LLM

HELP = "Type a message and press Enter. /new starts over, /quit or Ctrl-D ends."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(SamplingOptions):
    """Options of `quire chat`."""

    system: str | None = option(None, "A system message to begin with.")


def run(config: EngineConfig, options: ChatOptions) -> None:
    llm = LLM.from_config(config)
    params = options.params(llm)
    start: list[dict[str, Any]] = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(start)
    print(f"{llm.name}. {HELP}", file=sys.stderr)
    for line in _lines():
        if line == "/quit":
            return
        if line == "/new":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        answer = ""
        try:
            for output in llm.stream_chat(messages, params):
                text = output.outputs[0].text
                print(text[len(answer) :], end="", flush=True)
                answer = text
        except RequestError as error:
            print(f"{error} (/new starts over)", file=sys.stderr)
            messages.pop()
            continue
        except KeyboardInterrupt:
            print(" ...", end="")  # the reader has seen enough: keep what was said
        print()
        messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    """What the user types, without blank lines; ends with the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line


COMMAND = Command(run, ChatOptions, arguments=("model",))
