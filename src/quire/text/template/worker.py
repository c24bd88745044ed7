"""The process that compiles and renders templates: it may be slow, grow, crash and be killed.

Started as `python -m quire.text.template.worker` with a socket as standard input. Knows Jinja; no model, no network.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sys
from collections import OrderedDict
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from quire.text.template.frames import Answer, Compile, Render, Setup, receive_request, send

MAX_DATE_FORMAT = 256


class SandboxedTemplates(SandboxedEnvironment):
    """The environment that transformers gives chat templates.

    Whitespace control as there; `raise_exception`, `strftime_now`, `namespace`, `dict`, `tojson`, `from_json` and
    the loop controls exist; `{% generation %}` renders its inside. No loader. `now` is the time of `strftime_now`.
    Templates may change lists and dicts, which some do with lists of their own: all they see is a copy.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.now = datetime.now()
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = self._strftime_now
        self.globals["namespace"] = _PlainNamespace
        self.filters["tojson"] = _tojson
        self.filters["from_json"] = json.loads
        self.tests["true"] = lambda value: (
            value is True or (isinstance(value, GenerationPrompt) and bool(value))
        )

    def _strftime_now(self, format: object) -> str:
        if not isinstance(format, str) or len(format) > MAX_DATE_FORMAT or re.search(r"\d{3,}", format):
            raise jinja2.TemplateError("the template asks for a date in an unusual format")
        return self.now.strftime(format)


class GenerationPrompt(int):
    """True, as add_generation_prompt; remembers how much was `written` when a template last asked for it."""

    def __init__(self, value: int) -> None:
        self.written = 0
        self.asked: int | None = None

    def __bool__(self) -> bool:
        self.asked = self.written
        return True

    def __str__(self) -> str:
        return "True"


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: names must not begin with an underscore")


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own, not escaped for HTML: the text goes to a model.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def reads_parts(tree: nodes.Template) -> bool:
    """Whether some loop runs over a message's content, also through variables and parameters of macros."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    while True:
        before = len(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                given = zip(macros[call.node.name].args, call.args, strict=False)
                names.update(param.name for param, arg in given if _is_content(arg, names))
        if len(names) == before:
            break
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def needs_parts(tree: nodes.Template) -> bool:
    """Whether a template reads content as parts and never asks whether it is a string."""
    tests = {test.name for test in tree.find_all(nodes.Test)}
    return reads_parts(tree) and not tests & {"string", "iterable", "sequence", "mapping"}


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


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
