"""The Jinja environment of chat templates. Runs in the template process; knows templates, not chats.

Chat templates come with checkpoints and requests, so they are untrusted code. Jinja's sandbox keeps them from
Python's internals. What they cost is bounded from outside: the process they run in has a time and a memory limit.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

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
