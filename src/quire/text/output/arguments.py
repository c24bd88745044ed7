"""Writes the arguments of a call in each syntax, as structural tags that admit what a JSON Schema allows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.formats.shapes import LiteralCall, NestedCall, ParameterCall, TypeMark
from quire.text.output.schemas import kind_of, kind_of_value, listed_values, properties_of, resolved

Form = dict[str, Any]

_TEXT: Form = {"type": "any_text"}
_EMPTY: Form = {"type": "regex", "pattern": ""}
# The native syntaxes express these keywords of nested values; a schema with others is written as JSON.
_OBJECT = {"type", "properties", "required", "additionalProperties", "title", "description", "default"}
_LIST = {"type", "items", "title", "description", "default"}
MAX_DEPTH = 16
LARK = "x-lark-grammar"
"""LARK is a keyword of a string's schema: the Lark grammar of the text, for tools of OpenAI's type custom."""


def tag(begin: str, content: Form, end: str | list[str]) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def one_of(forms: Sequence[Form]) -> Form:
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": list(forms)}


def sequence(forms: Sequence[Form]) -> Form:
    return forms[0] if len(forms) == 1 else {"type": "sequence", "elements": list(forms)}


def optional(form: Form) -> Form:
    return {"type": "optional", "content": form}


def literal(text: str) -> Form:
    return {"type": "const_string", "value": text}


def json_value(schema: Any) -> Form:
    """Allow the JSON that a schema allows. LARK in a string's schema is the grammar of its text."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get(LARK), str):
            return sequence(
                [literal('"'), {"type": "grammar", "grammar": schema[LARK], "quoted": True}, literal('"')]
            )
        inner = schema.get("properties")
        if isinstance(inner, Mapping) and len(inner) == 1:
            (name, part), *_ = inner.items()
            if isinstance(part, Mapping) and LARK in part:
                return sequence([literal(f"{{{json.dumps(name)}: "), json_value(part), literal("}")])
    return {"type": "json_schema", "json_schema": schema}


def _listed(items: Sequence[tuple[Form, bool]], separator: str) -> Form:
    """Join items by a separator: the required ones, which come first, then any of the others in order."""

    def rest(begin: int) -> list[Form]:
        return [optional(sequence([literal(separator), form])) for form, _ in items[begin:]]

    num_required = sum(required for _, required in items)
    if num_required:
        first = [items[0][0]]
        for form, _ in items[1:num_required]:
            first += [literal(separator), form]
        return sequence(first + rest(num_required))
    starts = [sequence([form, *rest(i + 1)]) for i, (form, _) in enumerate(items)]
    return optional(one_of(starts)) if starts else _EMPTY


def python_arguments(schema: Mapping[str, Any]) -> Form:
    """Write `key=value, ...`."""
    items = [
        (sequence([literal(f"{name}="), json_value(part)]), required)
        for name, part, required in properties_of(schema)
    ]
    return _listed(items, ", ")


def parameter_arguments(body: ParameterCall, schema: Mapping[str, Any]) -> Form:
    """Write one pair of tags per argument."""
    elements: list[Form] = []
    for name, part, required in properties_of(schema):
        kind = kind_of(schema, name)
        begin = f"{body.key_begin}{name}{body.key_end[0]}"
        begin += "".join(f"\n{text}" for text in body.key_end[1:])
        if body.types:
            begin += _type_mark(body.types, kind, resolved(part, schema)).text
        content = text_value(resolved(part, schema)) if kind == "text" else json_value(part)
        form = tag(begin + body.pad, content, f"{body.pad}{body.value_end}{body.gap}")
        elements.append(form if required else optional(form))
    return sequence(elements) if elements else _EMPTY


def _type_mark(types: tuple[TypeMark, ...], kind: str, schema: Any) -> TypeMark:
    """Choose the mark of a value's type: plain text, or JSON of the schema's type."""
    wanted = schema.get("type") if isinstance(schema, Mapping) else None
    fitting = [mark for mark in types if mark.raw is (kind == "text")]
    return next((mark for mark in fitting if mark.type == wanted), fitting[-1])


def text_value(schema: Mapping[str, Any]) -> Form:
    """Allow plain text (`kind_of` says "text", so there are no other keywords than these)."""
    values = listed_values(schema)
    if values is not None:
        return one_of([literal(value) for value in values])
    if "minLength" in schema or "maxLength" in schema:
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        return {"type": "regex", "pattern": f"[^<\\]\\n]{{{low},{high}}}"}
    return _TEXT


def literal_arguments(body: LiteralCall, schema: Mapping[str, Any], depth: int = 0) -> Form:
    """Write `key:value,...`."""
    items = [
        (sequence([literal(f"{name}:"), _literal_value(body, part, depth)]), required)
        for name, part, required in properties_of(schema)
    ]
    return _listed(items, ",")


def _literal_value(body: LiteralCall, schema: Any, depth: int) -> Form:
    if not isinstance(schema, Mapping):
        return json_value(schema)
    if kind_of_value(schema, schema) == "text":
        content = text_value(resolved(schema, schema))
        if content == _TEXT:
            return tag(body.quote, _TEXT, body.quote)
        return sequence([literal(body.quote), content, literal(body.quote)])
    if _is_nested_object(schema, depth):
        inner = literal_arguments(body, schema, depth + 1)
        return sequence([literal("{"), inner, literal("}")])
    if _is_nested_list(schema, depth):
        item = _literal_value(body, schema["items"], depth + 1)
        items: Form = {
            "type": "tags_with_separator",
            "tags": [tag("", item, "")],
            "separator": ",",
            "at_least_one": False,
        }
        return sequence([literal("["), items, literal("]")])
    return json_value(schema)


def nested_arguments(body: NestedCall, schema: Mapping[str, Any], depth: int = 0) -> Form:
    """Write `<key>value</key>...`."""
    elements: list[Form] = []
    for name, part, required in properties_of(schema):
        begin, end = f"{body.prefix}<{name}>", f"{body.prefix}</{name}>"
        form = tag(begin, _nested_value(body, part, depth), end)
        elements.append(form if required else optional(form))
    return sequence(elements) if elements else _EMPTY


def _nested_value(body: NestedCall, schema: Any, depth: int) -> Form:
    if not isinstance(schema, Mapping):
        return json_value(schema)
    if kind_of_value(schema, schema) == "text":
        return text_value(resolved(schema, schema))
    if _is_nested_object(schema, depth) and any(required for _, _, required in properties_of(schema)):
        return nested_arguments(body, schema, depth + 1)
    if _is_nested_list(schema, depth):
        item = _nested_value(body, schema["items"], depth + 1)
        return {
            "type": "tags_with_separator",
            "tags": [tag(f"{body.prefix}<{body.item}>", item, f"{body.prefix}</{body.item}>")],
            "separator": "",
            "at_least_one": True,
        }
    return json_value(schema)


def _is_nested_object(schema: Mapping[str, Any], depth: int) -> bool:
    """Whether an object is fully described by its properties."""
    names = schema.get("properties")
    return (
        schema.get("type") == "object"
        and isinstance(names, Mapping)
        and bool(names)
        and set(schema) <= _OBJECT
        and schema.get("additionalProperties") in (None, False)
        and all(name.replace("_", "").replace("-", "").isalnum() for name in names)
        and depth < MAX_DEPTH
    )


def _is_nested_list(schema: Mapping[str, Any], depth: int) -> bool:
    """Whether a list is fully described by the schema of its items."""
    return (
        schema.get("type") == "array"
        and isinstance(schema.get("items"), Mapping)
        and set(schema) <= _LIST
        and depth < MAX_DEPTH
    )
