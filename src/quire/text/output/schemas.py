"""Schemas of offered functions' parameters, as far as writing and reading calls needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError

Functions = Mapping[str, Mapping[str, Any]]

# Keywords of a schema that are notes for people.
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}


def schemas(functions: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Map function names to parameters, from OpenAI's shape (`{"type": "function", "function": {...}}`)."""
    found: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(functions):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{i}] must be a function with a name", "tools")
        parameters = function.get("parameters")
        found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


def property_of(schema: Any, key: str) -> Any:
    """Return the schema of one property, None if there is none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def kind_of(parameters: Mapping[str, Any] | None, key: str) -> str:
    """Tell how an argument between tags is written.

    "string": plain text. "quoted": plain text or a JSON string. "json": any JSON value. Without a schema for the
    key it is "json" if the function is unknown, else "string".
    """
    if parameters is None:
        return "json"
    schema = property_of(parameters, key)
    return (
        ("string" if schema is None else "json") if not isinstance(schema, Mapping) else kind_of_value(schema)
    )


def kind_of_value(schema: Mapping[str, Any]) -> str:
    """Tell the kind as `kind_of` does, from the schema of the value itself."""
    kind = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and kind in (None, "string", ["string"]):
        texts = all(isinstance(value, str) and value for value in values)
        return "string" if texts and set(schema) <= _NOTES | {"type", "enum", "const"} else "json"
    if kind not in ("string", ["string"]):
        return "json"
    plain = set(schema) - _NOTES <= {"type", "minLength", "maxLength"}
    return "string" if plain else "quoted"


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Close an object's schema to properties that it does not name, unless it says otherwise."""
    found = {**schema, "type": "object"}
    if not schema:
        found["properties"] = {}
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """List (name, schema, required) of each property, required ones first. Each schema carries the definitions."""
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
