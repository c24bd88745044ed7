"""Reads the tools that a call offers, constrains its answer by them, and decides how to read that answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire.client.requests import Front
from quire.errors import RequestError
from quire.lazy import Lazy
from quire.params import SamplingParams, StructuredOutputsParams
from quire.serve.errors import invalid, unsupported
from quire.serve.ids import derived
from quire.serve.options import ServerConfig
from quire.text.formats.registry import reasoning_format, tool_format
from quire.text.formats.shapes import Place, ReasoningFormat, ToolFormat
from quire.text.output import constraint
from quire.text.output.arguments import Form
from quire.text.output.events import Event
from quire.text.output.parser import OutputParser

if TYPE_CHECKING:
    from quire.serve import custom_tools
    from quire.text.output import stops
    from quire.text.output.stops import AnswerStops
    from quire.text.stop_strings import StopMatcher
    from quire.text.template.render import Rendered
else:
    custom_tools = Lazy("quire.serve.custom_tools")
    stops = Lazy("quire.text.output.stops")

log = logging.getLogger("quire.serve")


MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")

Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Formats:
    """How the served model writes tool calls and reasoning; `special` if it uses special tokens for them."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    special: bool

    @classmethod
    def of(cls, front: Front, config: ServerConfig) -> Formats:
        """The formats named by the options, or detected from the chat template."""
        template = "" if front.template is None else front.template.source
        tools = tool_format(config.tool_call_parser, template, config.tool_plugins)
        reasoning = reasoning_format(config.reasoning_parser, template, config.reasoning_plugins)
        if tools is None:
            log.warning(
                "the chat template shows tools, but in no known format: their calls stay text, and tool_choice "
                "cannot force them (--tool-call-parser names a format)"
            )
        markers = (*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ()))
        return cls(tools, reasoning, front.tokenizer is not None and front.tokenizer.hides(markers))

    def thoughts(self, prompt: Callable[[], str]) -> Reading | None:
        """How to tell reasoning from other text in what continues a prompt, whose text is made if that is needed.

        None if nothing is told apart.
        """
        if self.reasoning is None or self.reasoning.in_content:
            return None
        form, place = self.reasoning.of_text(prompt())
        return Reading(None, form, {}, place)


@dataclass(frozen=True, slots=True)
class Offer:
    """The functions that a call offers (OpenAI's shape) and which of them it may or must call.

    `choice` is "auto", "none", "required", or "named" for the functions of `forced`. Those of `custom` stand for custom
    tools.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    forced: tuple[str, ...] = ()
    parallel: bool = True
    custom: frozenset[str] = frozenset()

    @property
    def functions(self) -> dict[str, Mapping[str, Any]]:
        """The JSON Schema of the parameters of each function, by name."""
        return {t["function"]["name"]: t["function"].get("parameters") or {} for t in self.tools}

    @property
    def strict(self) -> bool:
        """Whether the calls of some function must always match its schema."""
        return any(tool["function"].get("strict") for tool in self.tools)


def check_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Validate tools and make custom ones functions. 400 naming what is wrong with them."""
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools must be at most {MAX_TOOLS}", "tools", "invalid_value")
    names: set[str] = set()
    found: list[Tool] = []
    for i, tool in enumerate(tools):
        where, kind = f"tools[{i}]", tool.get("type", "function")
        if kind not in ("function", "custom"):
            raise unsupported(f"{where}.type", f"{str(kind)[:64]!r} is not, only function and custom are")
        where, function = f"{where}.{kind}", tool.get(kind)
        if kind == "custom":
            function = custom_tools.function_of(function, where)
        if not isinstance(function, Mapping):
            raise invalid(f"{where} must be an object with a name", where, "invalid_type")
        _check_function(function, where)
        if function["name"] in names:
            message = f"{where}.name: {function['name']!r} appears twice"
            raise invalid(message, f"{where}.name", "invalid_value")
        names.add(function["name"])
        shown = tool if kind == "function" else {}
        found.append({**shown, "type": "function", "function": function})
    return tuple(found)


def _check_function(function: Mapping[str, Any], where: str) -> None:
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{where}.name must be 1 to 128 letters, digits, '_', '-' or '.'"
        raise invalid(message, f"{where}.name", "invalid_value")
    if parameters is not None:
        kind = parameters.get("type", "object") if isinstance(parameters, Mapping) else None
        if kind != "object":
            message = f"{where}.parameters must be a JSON schema of an object"
            raise invalid(message, f"{where}.parameters", "invalid_value")
    for key, kind, what in (("description", str, "a string"), ("strict", bool, "true or false")):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise invalid(f"{where}.{key} must be {what}", f"{where}.{key}", "invalid_type")


def offer_of(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> Offer:
    """Read the offer from the fields of a chat. 400 if they are malformed."""
    offered = check_tools(tools or ())
    if choice is None:
        choice = "auto" if offered else "none"
    names = {tool["function"]["name"] for tool in offered}
    forced: tuple[str, ...] = ()
    if isinstance(choice, Mapping):
        choice, forced = _named(choice, names)
    if choice not in ("auto", "none", "required", "named"):
        message = f"tool_choice must be auto, none, required or a function, not {choice[:64]!r}"
        raise invalid(message, "tool_choice", "invalid_value")
    if choice in ("required", "named") and not offered:
        raise invalid("tool_choice needs tools: give at least one", "tool_choice", "invalid_value")
    custom = frozenset(tool["custom"]["name"] for tool in tools or () if tool.get("type") == "custom")
    return Offer(offered, choice if offered else "none", forced, parallel is not False, custom)


def _named(choice: Mapping[str, Any], names: set[str]) -> tuple[str, tuple[str, ...]]:
    """Read the choice and its functions from an object such as {"type": "function", "function": {"name": ...}}."""
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode, listed = (
            (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else ("", [])
        )
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            message = "tool_choice: allowed_tools needs a mode (auto or required) and tools"
            raise invalid(message, "tool_choice", "invalid_value")
        forced = tuple(_name_of(part, names) for part in listed)
        return ("named" if mode == "required" else "auto"), forced
    if kind not in ("function", "custom"):
        message = f"tool_choice.type must be function, custom or allowed_tools, not {str(kind)[:64]!r}"
        raise invalid(message, "tool_choice", "invalid_value")
    return "named", (_name_of(choice, names),)


def _name_of(part: Any, names: set[str]) -> str:
    function = part.get("function", part.get("custom", part)) if isinstance(part, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise invalid("tool_choice must name a function", "tool_choice", "invalid_type")
    if name not in names:
        known = ", ".join(sorted(names)) or "none"
        message = f"tool_choice: there is no function {name[:64]!r} among tools ({known})"
        raise invalid(message, "tool_choice", "invalid_value")
    return name


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read the output of one call. `place` is where the prompt left off; `forced`: it can only be calls."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    functions: Mapping[str, Mapping[str, Any]]
    place: Place = "start"
    parallel: bool = True
    forced: bool = False
    custom: frozenset[str] = frozenset()
    source: str = ""  # of the ids of calls

    def stops(self, matcher: StopMatcher) -> AnswerStops:
        """Find stop strings in the content alone."""
        return stops.AnswerStops(lambda: self._parser(True), matcher)

    def parser(self, located: bool = False) -> OutputReader:
        return OutputReader(self._parser(located), self.parallel)

    def _parser(self, located: bool) -> OutputParser:
        functions = self.functions or None
        return OutputParser(self.tools, self.reasoning, functions, self.place, self.forced, located)

    def call_id(self, name: str, index: int, own: str = "", sample: int = 0) -> str:
        """The model's own id for a call of a sample, or one made of `source` in the form that the model uses."""
        if own:
            return own
        made = derived(self.source, "call", sample, index)
        template = "call_{hex}" if self.tools is None else self.tools.call_id
        return template.format(hex=made[:24], hex9=made[:9], name=name, index=index)


class OutputReader:
    """An OutputParser that drops calls after the first unless they may be `parallel`."""

    def __init__(self, parser: OutputParser, parallel: bool) -> None:
        self._parser = parser
        self._parallel = parallel

    @property
    def places(self) -> list[int]:
        return self._parser.places

    def feed(self, text: str) -> list[Event]:
        return self._wanted(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return self._wanted(self._parser.finish())

    def _wanted(self, events: list[Event]) -> list[Event]:
        return events if self._parallel else [e for e in events if not getattr(e, "index", 0)]


def reading_of(formats: Formats, offer: Offer, prompt: Rendered) -> Reading | None:
    """Decide how to read an answer to `prompt`; None if it is plain text.

    400 for a call that cannot be forced.
    """
    tools = None if offer.choice == "none" else formats.tools
    forced = offer.choice in ("required", "named")
    if tools is None and (forced or (offer.choice == "auto" and offer.strict)):
        why = "the format of this model's calls is not known (--tool-call-parser names one)"
        raise unsupported("tool_choice" if forced else "tools", why)
    reasoning = formats.reasoning
    if tools is None and reasoning is None:
        return None
    place: Place = "start"
    if reasoning is not None:
        place = reasoning.place(prompt.turn, prompt.continued)
    functions = offer.functions
    if forced and offer.forced:
        functions = {name: functions[name] for name in offer.forced}
    return Reading(tools, reasoning, functions, place, offer.parallel, forced, offer.custom)


def with_tools(
    params: SamplingParams, formats: Formats, offer: Offer, reading: Reading | None
) -> tuple[SamplingParams, str | None]:
    """Add the offer's constraint on the answer to the parameters. Also returns the field it comes from, if any.

    A constraint of the body applies to the text after the reasoning; if tools may be called, to answers that are
    not calls. A forced call replaces it.
    """
    if reading is None:
        return params, None
    changed: dict[str, Any] = {"skip_special_tokens": False} if formats.special else {}
    own = params.structured_outputs
    if own is not None and own.select and not reading.forced:
        return msgspec.structs.replace(params, **changed), None
    form, field = _form(reading, offer, own)
    if form is not None:
        if reading.place != "answer":
            form = constraint.after_reasoning(form, reading.reasoning, reading.place == "reasoning")
        given = {} if own is None else {name: getattr(own, name) for name in _KEPT}
        changed["structured_outputs"] = StructuredOutputsParams(
            structural_tag={"type": "structural_tag", "format": form}, **given
        )
    return msgspec.structs.replace(params, **changed), field


_KEPT = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def _form(
    reading: Reading, offer: Offer, own: StructuredOutputsParams | None
) -> tuple[Form | None, str | None]:
    """Find the required form of the answer after the reasoning, and the field that asks for it."""
    functions, tools, reasoning = offer.functions, reading.tools, reading.reasoning
    chosen = {name: functions[name] for name in offer.forced} if offer.forced else functions
    if reading.forced and tools is not None:
        single = offer.choice == "named" and len(chosen) == 1
        return constraint.required_calls(tools, chosen, offer.parallel and not single), "tools"
    if own is None:
        if tools is not None and (offer.strict or offer.forced):
            return constraint.free_with_calls(tools, chosen, offer.parallel, reasoning), "tools"
        return None, None
    try:
        answer = constraint.form_of(own)
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"the structural tag is malformed: {error}", "structured_outputs") from error
    if reading.place != "answer":
        answer = constraint.as_answer(answer, reasoning)
    if tools is not None:
        calls = constraint.required_calls(tools, chosen, offer.parallel)
        return {"type": "or", "elements": [calls, answer]}, None
    return (answer, None) if reasoning is not None else (None, None)
