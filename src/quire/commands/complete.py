"""`quire complete`: continue texts through a running server, printing each as it comes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from quire.cli import Command
from quire.commands.chat.answer import RemoteAnswerer
from quire.commands.chat.terminal import AnswerView
from quire.commands.generate import SamplingOptions
from quire.config import option
from quire.serve.keys import client_key
from quire.text.stdin import read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteOptions(SamplingOptions):
    """Options of `quire complete`."""

    prompt: str = option("", "The text to continue; without it, each line of standard input is one.")
    url: str = option("http://127.0.0.1:8000", "Address of the server.")
    api_key: str | None = option(
        None, "Key of the server; a file keeps it out of the process list.", replaces=("api_key_file",)
    )
    api_key_file: str | None = option(None, "File with the key of the server.", replaces=("api_key",))
    model: str = option("", "Name of the model; default is the first that the server lists.")
    quick: str | None = option(None, "The text to continue, as vLLM's command takes it.", short="-q")


def run(options: CompleteOptions) -> None:
    server = RemoteAnswerer(options.url, client_key(options.api_key, options.api_key_file), options.model)
    given = options.prompt or options.quick
    for prompt in [given] if given else read_lines(sys.stdin.buffer):
        view = AnswerView(hidden=False)
        for piece in server.complete(prompt.rstrip("\n"), options.settings()):
            view.add(piece)
        view.end()


COMMAND = Command(run, CompleteOptions, arguments=("prompt",), uses=frozenset())
