"""Options and the loop of `quire chat`."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quire.cli import Command, ignore_interrupts
from quire.commands.chat.answer import THINK, Answerer, LocalAnswerer, RemoteAnswerer
from quire.commands.chat.session import NO_SWITCH, Session
from quire.commands.chat.terminal import lines
from quire.commands.generate import SamplingOptions
from quire.config import EngineConfig, option
from quire.engine.directory import SHIPPED_MODEL
from quire.errors import ConfigError
from quire.flags.uses import CHATS
from quire.lazy import Lazy
from quire.llm import LLM
from quire.serve.keys import client_key

if TYPE_CHECKING:
    from quire.engine import suggested
else:
    suggested = Lazy("quire.engine.suggested")

HELLO = "Type a message and press Enter. /help lists the commands, /quit or Ctrl-D ends."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(SamplingOptions):
    """Options of `quire chat`."""

    system: str | None = option(None, "System message to begin with.")
    url: str | None = option(
        None, "Talk to a running server at this address instead of loading a model.", replaces=("model",)
    )
    api_key: str | None = option(
        None, "Key for --url; a file keeps it out of the process list.", replaces=("api_key_file",)
    )
    api_key_file: str | None = option(None, "File with the key for --url.", replaces=("api_key",))
    context: Literal["drop", "keep"] = option(
        "drop", "A conversation that is too long loses its oldest turns (drop), or is refused (keep)."
    )
    think: Literal["on", "off"] | None = option(
        None, "Ask for reasoning, or none; default is the model's own."
    )
    reasoning: Literal["show", "hide"] = option(
        "show", "Show the reasoning, or one line in its place (hide)."
    )
    quick: str | None = option(None, "Answer this message and end.", short="-q")


def run(config: EngineConfig, options: ChatOptions) -> None:
    answerer: Answerer
    if options.url is None:
        answerer = LocalAnswerer(LLM.from_config(config))
    else:
        answerer = RemoteAnswerer(
            options.url, client_key(options.api_key, options.api_key_file), config.model.model
        )
    if options.think is not None and answerer.switches_thinking() is False:
        raise ConfigError(f"--think: {NO_SWITCH}")
    settings = options.settings() | ({} if options.think is None else {THINK: options.think == "on"})
    hide = options.reasoning == "hide"
    session = Session(answerer, settings, options.system, options.context == "drop", hide)
    if options.quick is not None:
        session.take(options.quick)
    else:
        print(f"{answerer.name}. {HELLO}", file=sys.stderr)
        if options.url is None and answerer.name == SHIPPED_MODEL:
            print(suggested.advice("quire chat", measured=True), file=sys.stderr)
        for line in lines(session.names):
            if not session.take(line):
                break
    ignore_interrupts()
    if session.failed and (options.quick is not None or not sys.stdin.isatty()):
        raise SystemExit(1)


def _idle(options: ChatOptions) -> Collection[str]:
    """Name what means nothing: the engine's options beside the server at --url, or the keys of one without it."""
    return ("api_key", "api_key_file") if options.url is None else CHATS - {"model"}


COMMAND = Command(run, ChatOptions, arguments=("model",), uses=CHATS, idle=_idle)
