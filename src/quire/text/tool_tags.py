"""Constraints that make a model write tool calls in its format, as structural tags. Knows no compiler and no tokens.

The notation is that of `quire.grammar.tags`. A call that keeps to such a constraint is read back whole by
`quire.text.tools`, and its arguments are valid under the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.params import StructuredOutputsParams
from quire.text.calls import Functions, kind_of
from quire.text.formats import (
    Channels,
    JsonCall,
    NamedCall,
    ParameterCall,
    PythonCall,
    ReasoningFormat,
    ToolFormat,
    tool_format,
)
from quire.text.tools import schemas

Form = dict[str, Any]

_TEXT: Form = {"type": "any_text"}
_SPACE: Form = {"type": "regex", "pattern": r"[ \n]{0,4}"}


def call_constraint(
    tools: Sequence[Mapping[str, Any]], form: str | ToolFormat = "hermes", parallel: bool = False
) -> StructuredOutputsParams:
    """For `SamplingParams(structured_outputs=...)`: the output is calls of these tools (OpenAI's shape) alone.

    Raises ConfigError for a format that is not known, RequestError for what is no function.
    """
    form = tool_format(form) if isinstance(form, str) else form
    calls = required_calls(form, schemas(tools), parallel)
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": calls})


def required_calls(form: ToolFormat, functions: Functions, parallel: bool) -> Form:
    """Nothing but calls of these functions: at least one, or with `parallel` False just one."""
    if form.channels is not None:
        return _one_of([_channel_call(form.channels, name, functions[name]) for name in functions])
    opening, closing = _wrapper(form)
    tags = [_call(form, name, functions[name]) for name in functions]
    calls: Form = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": ", " if _is_listed(form) else form.joint,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return _tag(opening, calls, closing) if opening else calls


def free_with_calls(form: ToolFormat, functions: Functions, parallel: bool) -> Form:
    """Any text, and where a call begins, a call of one of these functions."""
    if form.channels is not None:
        answer = _tag(form.channels.channel + "final" + form.channels.message, _TEXT, "")
        return _one_of([answer, required_calls(form, functions, parallel)])
    opening, _ = _wrapper(form)
    if opening and opening != "[":
        tags = [required_calls(form, functions, parallel)]
        triggers = [form.section[0] if form.section else form.begin[0]]
    elif opening:  # a list of Python calls has no marker but its first name
        calls = required_calls(form, functions, parallel)["content"]["tags"]
        tags = [{**tag, "begin": "[" + tag["begin"], "end": ")]"} for tag in calls]
        triggers = [tag["begin"] for tag in tags]
    else:
        tags = [_call(form, name, functions[name]) for name in functions]
        triggers = ['{"name": "'] if _begin(form) == "" else [form.begin[0]]
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "stop_after_first": not parallel,
    }


def after_reasoning(form: Form, reasoning: ReasoningFormat | None, opened: bool) -> Form:
    """`form`, once the reasoning is over: that which the prompt has `opened`, or one that may come."""
    if reasoning is None:
        return form
    if reasoning.channels is not None:
        channels = reasoning.channels
        begin = channels.channel + channels.reasoning + channels.message
        thoughts: Form = {
            "type": "optional",
            "content": _tag(begin, _TEXT, channels.ends[0] + channels.start + "assistant"),
        }
        return {"type": "sequence", "elements": [thoughts, form]}
    thoughts = _tag("" if opened else reasoning.begin[0], _TEXT, list(reasoning.end))
    if not opened:
        thoughts = {"type": "optional", "content": thoughts}
    return {"type": "sequence", "elements": [thoughts, _SPACE, form]}


def as_answer(form: Form, channels: Channels | None) -> Form:
    """`form` as the text of an answer: in the channel for answers, where there are channels."""
    return form if channels is None else _tag(channels.channel + "final" + channels.message, form, "")


def form_of(params: StructuredOutputsParams) -> Form:
    """A constraint as a part of a structural tag."""
    if params.json is not None:
        return {"type": "json_schema", "json_schema": json.loads(str(params.json))}
    if params.json_object is not None:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if params.regex is not None:
        return {"type": "regex", "pattern": params.regex}
    if params.choice is not None:
        return _one_of([{"type": "const_string", "value": choice} for choice in params.choice])
    if params.grammar is not None:
        return {"type": "grammar", "grammar": params.grammar}
    tag: Form = json.loads(str(params.structural_tag))
    if "format" in tag:
        inner: Form = tag["format"]
        return inner
    tags = [
        _tag(part["begin"], {"type": "json_schema", "json_schema": part.get("schema", True)}, part["end"])
        for part in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _tag(begin: str, content: Form, end: str | list[str]) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _one_of(forms: Sequence[Form]) -> Form:
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": list(forms)}


def _literal(text: str) -> Form:
    return {"type": "const_string", "value": text}


def _json(schema: Any) -> Form:
    return {"type": "json_schema", "json_schema": schema}


def _is_listed(form: ToolFormat) -> bool:
    body = form.bodies[0]
    return isinstance(body, PythonCall) or (isinstance(body, JsonCall) and body.listed)


def _begin(form: ToolFormat) -> str:
    """The marker written before each call; none where a call needs none."""
    return form.begin[0] if form.marked else ""


def _wrapper(form: ToolFormat) -> tuple[str, str]:
    """What is written before and after all calls."""
    if form.section is not None:
        return form.section
    return (_begin(form) + "[", "]" + form.end * bool(_begin(form))) if _is_listed(form) else ("", "")


def _channel_call(form: Channels, name: str, schema: Mapping[str, Any]) -> Form:
    begin = f"{form.channel}commentary to={form.calls}{name} <|constrain|>json{form.message}"
    return _tag(begin, _json(closed(schema)), "")


def _call(form: ToolFormat, name: str, schema: Mapping[str, Any]) -> Form:
    """One call with the markers around it."""
    body = form.bodies[0]
    begin, end = (_begin(form) + form.pad, form.pad + form.end) if not _is_listed(form) else ("", "")
    if not _begin(form):
        begin = end = ""
    if isinstance(body, JsonCall):
        return _tag(f'{begin}{{"name": {json.dumps(name)}, "{body.key}": ', _json(closed(schema)), "}" + end)
    if isinstance(body, NamedCall):
        between, content = body.pad + body.between[0] + body.pad, _json(closed(schema))
        begin += body.before + body.prefix + name
        if body.numbered:
            number: Form = {"type": "regex", "pattern": ":[0-9]{1,2}"}
            content, between = {"type": "sequence", "elements": [number, _literal(between), content]}, ""
        return _tag(begin + between, content, (body.pad + body.after if body.after else "") + end)
    if isinstance(body, PythonCall):
        return _tag(f"{name}(", _python_arguments(closed(schema)), ")")
    arguments = _tagged_arguments(body, schema)
    opening = f"{begin}{body.before}{name}{body.name_end}\n"
    return _tag(opening, arguments, body.after + end)


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object without properties other than those named, unless it speaks of them."""
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "properties" in schema and "additionalProperties" not in schema:
        return {**schema, "additionalProperties": False}
    return dict(schema)


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """(name, schema, required) of each property, required ones first. Definitions go along with each."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = [
        (name, {**part, **shared} if isinstance(part, Mapping) else part, name in required)
        for name, part in properties.items()
    ]
    found += [(name, True, True) for name in required if name not in properties]
    return sorted(found, key=lambda item: not item[2])


def _python_arguments(schema: Mapping[str, Any]) -> Form:
    """`key=value, ...`: required ones, then any of the others."""
    items = _properties(schema)
    written = [
        {"type": "sequence", "elements": [_literal(f"{name}="), _json(part)]} for name, part, _ in items
    ]

    def rest(begin: int) -> list[Form]:
        return [
            {"type": "optional", "content": {"type": "sequence", "elements": [_literal(", "), part]}}
            for part in written[begin:]
        ]

    num_required = sum(required for _, _, required in items)
    if num_required:
        first = [written[0]]
        for part in written[1:num_required]:
            first += [_literal(", "), part]
        return {"type": "sequence", "elements": first + rest(num_required)}
    starts: list[Form] = [
        {"type": "sequence", "elements": [part, *rest(i + 1)]} for i, part in enumerate(written)
    ]
    return {"type": "optional", "content": _one_of(starts)} if starts else {"type": "regex", "pattern": ""}


def _tagged_arguments(body: ParameterCall, schema: Mapping[str, Any]) -> Form:
    elements: list[Form] = []
    for name, part, required in _properties(schema):
        begin = f"{body.key_begin}{name}{body.key_end[0]}"
        begin += "".join(f"\n{tag}" for tag in body.key_end[1:]) + body.pad
        content = _text_of(part) if kind_of(schema, name) == "string" else _json(part)
        tag = _tag(begin, content, f"{body.pad}{body.value_end}\n")
        elements.append(tag if required else {"type": "optional", "content": tag})
    return {"type": "sequence", "elements": elements} if elements else {"type": "regex", "pattern": ""}


def _text_of(schema: Mapping[str, Any]) -> Form:
    """A text that is written as it is (`kind_of` says "string", so these keywords are all there are)."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return _one_of([_literal(value) for value in values])
    if "minLength" in schema or "maxLength" in schema:
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        return {"type": "regex", "pattern": f"[^<\\n]{{{low},{high}}}"}
    return _TEXT
