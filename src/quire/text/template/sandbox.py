"""A Jinja environment for templates that nobody has read: no access to Python, bounded steps, sizes and time.

Knows templates, not chats. Chat templates come with checkpoints, so they are untrusted code. Jinja's sandbox
keeps them from Python's internals; the bounds keep them from holding a server with loops or huge strings.
Bounds are checked in loops, macros, operators, filters and methods that grow text, and on all output.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_OUTPUT = 32 << 20
MAX_STEPS = 2_000_000
MAX_SECONDS = 20.0
MAX_WIDTH = 10_000
MAX_BITS = 4096
# What one element of a list costs in `_weight`: its share of brackets and commas, and the walk to it.
ELEMENT = 64

_WIDE_FORMAT = re.compile(r"\d{5,}|:[^{}]*\{")
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5,})")
_PADDING = {"center", "ljust", "rjust", "zfill", "to_bytes"}
_PER_CHARACTER = {"indent", "expandtabs"}


class BoundError(jinja2.TemplateError):
    """A template went past a bound."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the template {what}, past the bound that chat templates have")


class _Budget(threading.local):
    """What the render on this thread has used."""

    steps = 0
    deadline = float("inf")


class SandboxedTemplates(ImmutableSandboxedEnvironment):
    """The environment that transformers gives chat templates, with bounds.

    Whitespace control as there; `raise_exception`, `strftime_now`, `namespace`, `dict`, `tojson` and the loop
    controls exist; `{% generation %}` renders its inside. No loader. `now` gives strftime_now's time.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=_check_output,
        )
        self._budget = _Budget()
        self.concat = self.bounded_concat  # type: ignore[method-assign]
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(_short_format(format))
        self.globals["namespace"] = _PlainNamespace
        self.globals["dict"] = _dict
        for name in ("center", "indent", "format", "join", "replace", "string"):
            self.filters[name] = _bounded_filter(name, self.filters[name])
        self.filters["tojson"] = _tojson

    def run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render within the bounds. Raises jinja2.TemplateError, or what the template's mistakes raise."""
        self._budget.steps = 0
        self._budget.deadline = time.monotonic() + MAX_SECONDS
        return template.render(variables)

    @property
    def tick(self) -> None:
        """Read for its effect: counts one turn of a loop or call of a macro. `_parse` puts the reads in."""
        budget = self._budget
        budget.steps += 1
        if budget.steps > MAX_STEPS:
            raise BoundError(f"took more than {MAX_STEPS} steps")
        if budget.steps % 64 == 0 and time.monotonic() > budget.deadline:
            raise BoundError(f"ran for more than {MAX_SECONDS:g} seconds")

    def bounded_concat(self, parts: Iterable[Any]) -> str:
        """Join the output of a template, macro, block or `~`, within the bound on its size."""
        kept: list[str] = []
        total = 0
        for part in parts:
            text = part if isinstance(part, str) else str(_check_output(part))
            total += len(text)
            _check_size(total)
            kept.append(text)
        return "".join(kept)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            body: list[nodes.Node] = node.body  # type: ignore[attr-defined]
            # A property of the environment, not a call: cheap, and no variable can take its place.
            body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick"), lineno=node.lineno))
        _replace_concats(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_size(_length(left) + _length(right))
        elif operator == "*":
            _check_size(max(_weight(left) * _count(right), _weight(right) * _count(left)))
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**":
            _check_bits(_bits(left) * max(1, _count(right)))
        elif isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise BoundError("used a very wide format")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Jinja wraps str.format to guard attributes; the method is behind the wrapper.
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, int)):
            _check_growth(method.__name__, owner, (*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)


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


def _own_call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    # An attribute of the environment, not a variable: the template cannot put something else in its place.
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=line)


def _replace_concats(node: nodes.Node) -> None:
    """Turn `a ~ b` below `node` into a call that checks the size of the result."""
    for field, value in node.iter_fields():
        values = value if isinstance(value, list) else [value]
        for i, child in enumerate(values):
            if not isinstance(child, nodes.Node):
                continue
            _replace_concats(child)
            if isinstance(child, nodes.Concat):
                parts = nodes.List(child.nodes, lineno=child.lineno)
                values[i] = _own_call("bounded_concat", [parts], child.lineno)
        setattr(node, field, values if isinstance(value, list) else values[0])


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: names must not begin with an underscore")


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _short_format(format: object) -> str:
    if not isinstance(format, str) or len(format) > 256 or re.search(r"\d{3,}", format):
        raise BoundError("asked for a date in an unusual format")
    return format


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own, not escaped for HTML: the text goes to a model.
    if max(_count(indent), _length(indent)) > 64:
        raise BoundError("asked for very wide JSON")
    _check_size(_weight(value))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _length(value: object) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _count(value: object) -> int:
    return max(0, value) if isinstance(value, int) else 0


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _weight(value: object) -> int:
    """About how long `value` would be as text, counted no further than the bound."""
    total, stack = 0, [value]
    while stack and total <= MAX_OUTPUT:
        item = stack.pop()
        total += ELEMENT
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
    return total


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT:
        raise BoundError(f"made more than {MAX_OUTPUT} characters")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise BoundError(f"made a number of more than {MAX_BITS} bits")


def _check_output(value: Any) -> Any:
    if not isinstance(value, str):
        _check_size(_weight(value))
    return value


def _check_growth(name: str, owner: object, args: tuple[Any, ...]) -> None:
    """Refuse a text method or filter whose result would be out of proportion to what goes in."""
    if name in _PADDING and any(_count(a) > MAX_WIDTH for a in args):
        raise BoundError("padded text very wide")
    if name in _PER_CHARACTER:
        _check_size(_length(owner) * max([1, *map(_count, args), *map(_length, args)]))
    if name in ("format", "format_map") and _WIDE_FORMAT.search(str(owner)):
        raise BoundError("used a very wide format")
    if name == "replace" and isinstance(owner, str) and len(args) >= 2:
        found = owner.count(str(args[0]))
        _check_size(len(owner) + found * len(str(args[1])))
    if name == "join" and args:
        _check_size(_weight(args[0]) + _length(owner) * _length(args[0]))
    if name == "translate":
        raise BoundError("translates characters by a table")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, a Jinja filter, behind the check of the method it is like."""
    context_first = hasattr(function, "jinja_pass_arg")

    def check(value: Any, args: tuple[Any, ...]) -> Any:
        if name == "join":
            value = list(value)
            _check_growth("join", args[0] if args else "", (value,))
        elif name == "format":
            if _WIDE_PERCENT.search(str(value)):
                raise BoundError("used a very wide format")
        elif name == "string":
            _check_output(value)
        else:
            _check_growth(name, value, args)
        return value

    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        return function(check(value, (*args, *kwargs.values())), *args, **kwargs)

    def bounded_with_context(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return function(context, check(value, (*args, *kwargs.values())), *args, **kwargs)

    chosen = bounded_with_context if context_first else bounded
    for mark in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, mark):
            setattr(chosen, mark, getattr(function, mark))
    return chosen
