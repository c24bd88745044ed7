"""Makes constraints, as structural tags, by which a model calls tools in its format. Knows no compiler and no tokens.

`quire.grammar.tags` defines the notation. A call that keeps to such a constraint is read back whole by
`quire.text.output.parser`, and its arguments are valid under the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.params import StructuredOutputsParams
from quire.text.formats.registry import tool_format
from quire.text.formats.shapes import (
    Channels,
    JsonCall,
    KeyedCall,
    LiteralCall,
    NamedCall,
    NestedCall,
    ParameterCall,
    PythonCall,
    ReasoningFormat,
    ToolFormat,
)
from quire.text.output.arguments import (
    Form,
    json_value,
    literal,
    literal_arguments,
    nested_arguments,
    one_of,
    optional,
    parameter_arguments,
    python_arguments,
    sequence,
    tag,
)
from quire.text.output.schemas import Functions, closed, schemas

_TEXT: Form = {"type": "any_text"}
_SPACE: Form = {"type": "regex", "pattern": r"[ \n]{0,4}"}
_NUMBER: Form = {"type": "regex", "pattern": "[0-9]{1,2}"}


def call_constraint(
    tools: Sequence[Mapping[str, Any]], form: str | ToolFormat = "hermes", parallel: bool = False
) -> StructuredOutputsParams:
    """Make a constraint for `SamplingParams(structured_outputs=...)`: only calls of these tools (OpenAI's shape).

    Raises ConfigError for an unknown format, RequestError for a tool that is no function.
    """
    found = tool_format(form) if isinstance(form, str) else form
    assert found is not None
    calls = required_calls(found, schemas(tools), parallel)
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": calls})


def required_calls(form: ToolFormat, functions: Functions, parallel: bool) -> Form:
    """Require calls of these functions and nothing else: one, or with `parallel` one or more."""
    if form.channels is not None:
        return one_of([_channel_call(form.channels, name, functions[name]) for name in functions])
    opening, closing = _wrapper(form)
    calls: Form = {
        "type": "tags_with_separator",
        "tags": [_call(form, name, functions[name]) for name in functions],
        "separator": ", " if _is_listed(form) else form.joint,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return tag(opening, calls, closing) if opening else calls


def free_with_calls(
    form: ToolFormat, functions: Functions, parallel: bool, reasoning: ReasoningFormat | None = None
) -> Form:
    """Allow any text in which every call that begins is a valid call of one of these functions."""
    calls = required_calls(form, functions, parallel)
    if form.channels is not None or form.recipients is not None:
        return one_of([as_answer(_TEXT, form), calls])
    if reasoning is not None and reasoning.answer_begin:
        return one_of([calls, sequence([as_answer(_TEXT, reasoning), optional(calls)])])
    opening, _ = _wrapper(form)
    if opening and opening != "[":
        tags = [calls]
        triggers = [form.section[0] if form.section else form.begin[0]]
    elif opening:  # a list without a marker begins with its first call
        first = calls["content"]["tags"]
        tags = [{**part, "begin": "[" + part["begin"], "end": part["end"] + "]"} for part in first]
        triggers = [part["begin"] for part in tags]
    else:
        tags = calls["tags"]
        triggers = ['{"name": "'] if _begin(form) == "" else [form.begin[0]]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": not parallel}


def after_reasoning(form: Form, reasoning: ReasoningFormat | None, opened: bool) -> Form:
    """Put `form` after the reasoning that the prompt has `opened`, or that may come."""
    if reasoning is None or reasoning.recipients is not None:
        return form
    if reasoning.channels is not None:
        channels = reasoning.channels
        ends = channels.ends[0] + channels.start + "assistant"
        if opened:
            return sequence([tag("", _TEXT, ends), form])
        begin = channels.channel + channels.reasoning + channels.message
        return sequence([optional(tag(begin, _TEXT, ends)), form])
    thoughts = tag("" if opened else reasoning.begin[0], _TEXT, list(reasoning.end))
    before = sequence([thoughts, _SPACE])
    return sequence([before if opened else optional(before), form])


def as_answer(form: Form, around: ToolFormat | ReasoningFormat | None) -> Form:
    """Put `form` into what encloses an answer: a channel, a recipient, or markers."""
    if around is None:
        return form
    if around.channels is not None:
        channels = around.channels
        return tag(channels.channel + channels.answer + channels.message, form, "")
    if around.recipients is not None:
        return tag(around.recipients.answer + "\n", form, "")
    if not isinstance(around, ReasoningFormat) or not around.answer_begin:
        return form
    begin, end = literal(around.answer_begin[0]), literal(around.answer_end[0])
    return sequence([optional(sequence([begin, _SPACE])), form, optional(sequence([_SPACE, end]))])


def form_of(params: StructuredOutputsParams) -> Form:
    """Turn a constraint into a part of a structural tag."""
    if params.json is not None:
        return json_value(json.loads(str(params.json)))
    if params.json_object is not None:
        return json_value({"type": "object"})
    if params.regex is not None:
        return {"type": "regex", "pattern": params.regex}
    if params.choice is not None:
        return one_of([literal(choice) for choice in params.choice])
    if params.grammar is not None:
        return {"type": "grammar", "grammar": params.grammar}
    given: Form = json.loads(str(params.structural_tag))
    if "format" in given:
        inner: Form = given["format"]
        return inner
    tags = [
        tag(part["begin"], json_value(part.get("schema", True)), part["end"]) for part in given["structures"]
    ]
    return {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}


def _is_listed(form: ToolFormat) -> bool:
    body = form.bodies[0]
    if isinstance(body, PythonCall):
        return body.bracketed
    return isinstance(body, KeyedCall) or (isinstance(body, JsonCall) and body.listed)


def _begin(form: ToolFormat) -> str:
    """Return the marker before each call, if there is one."""
    return form.begin[0] if form.marked and form.begin else ""


def _wrapper(form: ToolFormat) -> tuple[str, str]:
    """Return the texts before and after all calls."""
    if form.section is not None:
        return form.section[0] + form.section_pad, form.section_pad + form.section[1]
    if _is_listed(form):
        return _begin(form) + "[", "]" + form.end * bool(_begin(form))
    body = form.bodies[0]
    if isinstance(body, PythonCall):
        return form.begin[0] + form.pad, form.pad + form.end
    return "", ""


def _channel_call(form: Channels, name: str, schema: Mapping[str, Any]) -> Form:
    begin = f"{form.channel}commentary to={form.calls}{name} <|constrain|>json{form.message}"
    return tag(begin, json_value(closed(schema)), "")


def _call(form: ToolFormat, name: str, schema: Mapping[str, Any]) -> Form:
    """Write one call with the markers around it."""
    body, schema = form.bodies[0], closed(schema)
    begin, end = _begin(form) + form.pad, form.pad + form.end
    if _is_listed(form) or isinstance(body, PythonCall) or not _begin(form):
        begin = end = ""
    if isinstance(body, JsonCall):
        return _json_call(body, begin, end, name, schema)
    if isinstance(body, KeyedCall):
        return tag(f"{{{json.dumps(name)}: ", json_value(schema), "}")
    if isinstance(body, NamedCall):
        between, content = body.pad + body.between[0] + body.pad, json_value(schema)
        begin += body.before + body.prefix + name
        if body.numbered:
            content, between = sequence([literal(":"), _NUMBER, literal(between), content]), ""
        return tag(begin + between, content, (body.pad + body.after if body.after else "") + end)
    if isinstance(body, PythonCall):
        return tag(f"{name}(", python_arguments(schema), ")")
    if isinstance(body, LiteralCall):
        return tag(f"{begin}{body.before}{name}{{", literal_arguments(body, schema), "}" + end)
    if isinstance(body, NestedCall):
        return tag(begin + name + body.name_end, nested_arguments(body, schema), body.after + end)
    return _parameter_call(body, begin, end, name, schema)


def _json_call(body: JsonCall, begin: str, end: str, name: str, schema: Mapping[str, Any]) -> Form:
    named = f'"{body.name_key}": {json.dumps(name)}, "{body.key}": '
    if not body.id_key:
        return tag(f"{begin}{{{named}", json_value(schema), "}" + end)
    content = sequence([_NUMBER, literal(f'", {named}'), json_value(schema)])
    return tag(f'{begin}{{"{body.id_key}": "', content, "}" + end)


def _parameter_call(body: ParameterCall, begin: str, end: str, name: str, schema: Mapping[str, Any]) -> Form:
    opening = f"{begin}{body.before}{name}{body.name_end}"
    arguments = parameter_arguments(body, schema)
    if body.number_end:
        arguments = sequence([_NUMBER, literal(body.number_end + body.gap), arguments])
        return tag(opening, arguments, body.after + end)
    return tag(opening + body.gap, arguments, body.after + end)
