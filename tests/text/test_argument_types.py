"""Arguments between tags take their type from the function's schema, whatever the text or its mark looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.text.formats.registry import TOOL_FORMATS, tool_format
from quire.text.formats.shapes import ParameterCall, TypeMark
from quire.text.output.parser import parse

DEFINITIONS = {
    "Text": {"type": "string"},
    "Grade": {"enum": ["a", "1"]},
    "Count": {"type": "integer"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "odd/name~": {"type": "string"},
}
OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TEXTS = ("02134", "true", '{"a": 1}', "１２３", "٣", "1e5", "1", "null")
AS_TEXT = [*TEXTS]
AS_LITERAL = ["02134", True, {"a": 1}, "１２３", "٣", 1e5, 1, None]


def tools(schema: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def value(form: str, mark: str, text: str, schema: Any) -> Any:
    """What the format's reader makes of one argument, written with this mark of its type."""
    found = tool_format(form)
    assert found is not None
    body = next(body for body in found.bodies if isinstance(body, ParameterCall))
    begin, end = found.section or ("", "")
    written = (
        f"{begin}{found.begin[0] if found.begin else ''}{body.before}f{body.name_end}"
        + (f"1{body.number_end}" if body.number_end else "")
        + f"{body.key_begin}x{body.key_end[0]}{''.join(body.key_end[1:])}{mark}"
        + f"{body.pad}{text}{body.pad}{body.value_end}{body.after}{found.end}{end}"
    )
    whole = parse(written, form, None, tools(schema))
    assert [call.complete for call in whole.calls] == [True], (form, written, whole)
    return json.loads(whole.calls[0].arguments)["x"]


def marks_of(form: str) -> tuple[TypeMark, ...]:
    found = tool_format(form)
    assert found is not None
    return next((body.types for body in found.bodies if isinstance(body, ParameterCall)), ())


def is_tagged(form: str) -> bool:
    found = tool_format(form)
    return found is not None and any(isinstance(body, ParameterCall) for body in found.bodies)


TAGGED = [form for form in TOOL_FORMATS if is_tagged(form)]
PLAIN = [
    (form, mark.text) for form in TAGGED for mark in marks_of(form) or (TypeMark(""),) if mark.raw is None
]


@pytest.mark.parametrize(("form", "mark"), PLAIN)
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "string"}, AS_TEXT),
        ({"type": ["string"]}, AS_TEXT),
        ({"$ref": "#/$defs/Text"}, AS_TEXT),
        ({"$ref": "#/$defs/odd~1name~0"}, AS_TEXT),
        ({"allOf": [{"$ref": "#/$defs/Text"}], "description": "d"}, AS_TEXT),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, AS_TEXT),
        ({"type": "string", "pattern": "^.*$"}, AS_TEXT),
        ({"$ref": "#/$defs/Grade"}, AS_TEXT),
        (OPTIONAL_TEXT, [*TEXTS[:-1], None]),
        ({"type": ["string", "null"]}, [*TEXTS[:-1], None]),
        ({"oneOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, [*TEXTS[:-1], None]),
        ({"anyOf": [{"$ref": "#/$defs/Grade"}, {"type": "null"}]}, [*TEXTS[:-1], None]),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, [*TEXTS[:6], 1, "null"]),
        ({"enum": ["1", 2]}, [*TEXTS[:5], 1e5, *TEXTS[6:]]),
        ({"enum": [1, "a"]}, ["02134", "true", '{"a": 1}', "１２３", "٣", 1e5, 1, "null"]),
        ({"$ref": "#/$defs/Count"}, [2134, *AS_LITERAL[1:]]),
        ({"$ref": "#/$defs/Loop"}, [2134, *AS_LITERAL[1:]]),
        ({"$ref": "elsewhere.json"}, AS_LITERAL),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [2134, *AS_LITERAL[1:]]),
        ({}, AS_LITERAL),
    ],
    ids=str,
)
def test_the_schema_gives_the_type(form: str, mark: str, schema: Any, values: list[Any]) -> None:
    assert [value(form, mark, text, schema) for text in TEXTS] == values


@pytest.mark.parametrize(
    ("form", "mark"), [(form, mark) for form in TAGGED for mark in marks_of(form) if mark.raw is not None]
)
@pytest.mark.parametrize(
    ("schema", "text", "raw", "json_value"),
    [
        ({"type": "integer"}, "42", 42, 42),
        ({"type": "string"}, "42", "42", "42"),
        ({"type": "string"}, "null", "null", "null"),
        ({"type": "string"}, '{"a":1}', '{"a":1}', '{"a":1}'),
        (OPTIONAL_TEXT, "42", "42", "42"),
        (OPTIONAL_TEXT, "null", "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "42", 42, 42),
        ({"$ref": "#/$defs/Count"}, "42", 42, 42),
        ({"type": "object"}, '{"a":1}', {"a": 1}, {"a": 1}),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "42", "42", 42),  # both fit: the mark decides
    ],
)
def test_the_schema_wins_over_the_mark(
    form: str, mark: TypeMark, schema: Any, text: str, raw: Any, json_value: Any
) -> None:
    assert value(form, mark.text, text, schema) == (raw if mark.raw else json_value)


def test_a_schema_that_refers_to_itself_many_times_ends() -> None:
    schema = {"anyOf": [{"$ref": "#/properties/x"}] * 64}
    assert value("qwen3_coder", "", "5", schema) == 5
