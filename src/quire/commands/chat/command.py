"""Options and the loop of `quire chat`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from quire.cli import Command, ignore_interrupts
from quire.commands.chat.answer import Answerer, LocalAnswerer, RemoteAnswerer
from quire.commands.chat.session import Session
from quire.commands.chat.terminal import lines
from quire.commands.generate import SamplingOptions
from quire.config import EngineConfig, option
from quire.llm import LLM

HELLO = "Type a message and press Enter. /help lists the commands, /quit or Ctrl-D ends."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(SamplingOptions):
    """Options of `quire chat`."""

    system: str | None = option(None, "System message to begin with.")
    url: str | None = option(None, "Talk to a running server at this address instead of loading a model.")
    api_key: str | None = option(None, "Key for --url.")
    context: Literal["drop", "keep"] = option(
        "drop", "A conversation that is too long loses its oldest turns (drop), or is refused (keep)."
    )
    quick: str | None = option(None, "Answer this message and end.", short="-q")


def run(config: EngineConfig, options: ChatOptions) -> None:
    answerer: Answerer
    if options.url is None:
        answerer = LocalAnswerer(LLM.from_config(config))
    else:
        answerer = RemoteAnswerer(options.url, options.api_key, config.model.model)
    session = Session(answerer, options.settings(), options.system, options.context == "drop")
    if options.quick is not None:
        session.take(options.quick)
    else:
        print(f"{answerer.name}. {HELLO}", file=sys.stderr)
        for line in lines(session.names):
            if not session.take(line):
                break
    ignore_interrupts()
    if session.failed and (options.quick is not None or not sys.stdin.isatty()):
        raise SystemExit(1)


COMMAND = Command(run, ChatOptions, arguments=("model",))
