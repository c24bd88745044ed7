"""The process that compiles and renders templates: it may be slow, grow, crash and be killed.

Started as `python -m quire.text.template.worker` with a socket as standard input. Knows Jinja; no model, no network.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
from collections import OrderedDict
from datetime import datetime
from pathlib import Path

import jinja2

from quire.text.template.content import needs_parts, reads_parts
from quire.text.template.frames import Answer, Compile, Render, Setup, receive_request, send
from quire.text.template.sandbox import GenerationPrompt, SandboxedTemplates

if sys.platform != "win32":
    import resource

MAX_TEMPLATES = 32
MAX_OUTPUT = 32 << 20
MAX_ERROR = 1000
# GRACE seconds past the limit, the process ends itself if its parent is gone.
GRACE = 2


class Templates:
    """Compiled templates by key; the least recently used go first."""

    def __init__(self) -> None:
        self._environment = SandboxedTemplates()
        self._known: OrderedDict[str, jinja2.Template] = OrderedDict()

    def compile(self, request: Compile) -> Answer:
        try:
            tree = self._environment.parse(request.source)
            parts = reads_parts(tree), needs_parts(tree)
            compiled = self._environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            return Answer(error=f"line {error.lineno}: {str(error.message)[:MAX_ERROR]}")
        except Exception as error:  # whatever an untrusted template makes the compiler raise
            return Answer(error=f"it cannot be compiled: {_named(error)}")
        self._known[request.key] = compiled
        while len(self._known) > MAX_TEMPLATES:
            self._known.popitem(last=False)
        return Answer(reads_parts=parts[0], needs_parts=parts[1])

    def render(self, request: Render) -> Answer:
        template = self._known.get(request.key)
        if template is None:
            return Answer(unknown=True)
        self._known.move_to_end(request.key)
        self._environment.now = datetime.fromisoformat(request.now)
        try:
            begins = GenerationPrompt(1)
            variables = request.variables
            if variables.get("add_generation_prompt") is True:
                variables = {**variables, "add_generation_prompt": begins}
            pieces = []
            for piece in template.generate(variables):
                pieces.append(piece)
                begins.written += len(piece)
            text = "".join(pieces)
            text.encode()  # surrogates cannot be sent
        except jinja2.TemplateError as error:
            return Answer(
                error=f"refuses these messages: {str(error)[:MAX_ERROR]}", raised=type(error).__name__
            )
        except Exception as error:  # whatever an untrusted template raises
            return Answer(error=f"fails on these messages: {_named(error)}", raised=type(error).__name__)
        if len(text) > MAX_OUTPUT:
            return Answer(error=f"makes more than {MAX_OUTPUT} characters of these messages")
        return Answer(text, begins=begins.asked)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_ERROR]}"


def _confine(setup: Setup) -> None:
    """Keep this process from opening files and from taking more than `memory` (where the system can tell)."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + setup.memory
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    if sys.platform != "win32":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def _warm_up(templates: Templates) -> None:
    """Render with an error at the end, so that everything is imported before files cannot be opened any more."""
    source = (
        "{% for m in ['\\n'] %}{{ [m] | pprint | tojson }}{{ strftime_now('%d %B') }}{% endfor %}{{ a.b.c }}"
    )
    templates.compile(Compile("", source))
    templates.render(Render("", {}, datetime.now().isoformat()))


def main() -> int:
    connection = socket.socket(fileno=os.dup(0))
    templates = Templates()
    _warm_up(templates)
    setup = receive_request(connection)
    assert isinstance(setup, Setup)
    _confine(setup)
    send(connection, Answer())
    limit = math.ceil(setup.seconds) + GRACE
    while True:
        try:
            request = receive_request(connection)
        except (EOFError, OSError):
            return 0
        if sys.platform != "win32":
            signal.alarm(limit)
        try:
            answer = templates.compile(request) if isinstance(request, Compile) else None
            if isinstance(request, Render):
                answer = templates.render(request)
        except MemoryError:
            answer = Answer(error="needs too much memory")
        send(connection, answer or Answer(unknown=True))
        if sys.platform != "win32":
            signal.alarm(0)


if __name__ == "__main__":
    sys.exit(main())
