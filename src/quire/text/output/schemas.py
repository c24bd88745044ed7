"""Schemas of offered functions' parameters, as far as writing and reading calls needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError

Functions = Mapping[str, Mapping[str, Any]]

# Keywords of a schema that say nothing of a value.
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment", "$defs", "definitions"}
_TYPES = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}
MAX_STEPS = 256  # schemas that are looked at for one value


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


def resolved(schema: Any, root: Any) -> Any:
    """Follow a schema that is only a reference into `root`, or one schema under allOf, anyOf or oneOf."""
    for _ in range(MAX_STEPS):
        inner = schema
        if isinstance(schema, Mapping) and len(names := set(schema) - _NOTES) == 1:
            (name,) = names
            if name == "$ref":
                inner = _referred(schema[name], root)
            elif (
                name in ("allOf", "anyOf", "oneOf")
                and isinstance(schema[name], list)
                and len(schema[name]) == 1
            ):
                inner = schema[name][0]
        if inner is schema:
            break
        schema = inner
    return schema


def _referred(pointer: object, root: Any) -> Any:
    """Return the part of `root` that a local reference names; None if there is none."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    for name in pointer[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def admits(schema: Any, root: Any, value: Any, exactly: bool) -> bool:
    """Whether a value has a type that a schema names and, if `exactly`, is one of the values that it names.

    What it does not name is admitted. At most MAX_STEPS of the schemas in it are looked at.
    """
    left = MAX_STEPS

    def fits(schema: Any) -> bool:
        nonlocal left
        left -= 1
        if not isinstance(schema, Mapping) or left < 0:
            return schema is not False and left >= 0
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if isinstance(kinds, list) and kinds and not any(kind in _types_of(value) for kind in kinds):
            return False
        values = listed_values(schema)
        if isinstance(values, list) and not any(
            _types_of(known) & _types_of(value) and (known == value or not exactly) for known in values
        ):
            return False
        some = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
        every = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        return (
            ("$ref" not in schema or fits(_referred(schema["$ref"], root)))
            and all(any(fits(part) for part in parts) for parts in some)
            and all(fits(part) for part in every)
        )

    return fits(schema)


def listed_values(schema: Mapping[str, Any]) -> Any:
    """Return the values that a schema names, by enum or const; None if it names none."""
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def _types_of(value: Any) -> set[str]:
    """Return the names of a JSON value's types."""
    return _TYPES.get(type(value), set())


def kind_of(parameters: Mapping[str, Any] | None, key: str) -> str:
    """Tell how an argument between tags is written: as "text", or as "json".

    Without a schema for the key it is "json" if the function is unknown, else "text".
    """
    if parameters is None:
        return "json"
    schema = property_of(parameters, key)
    if not isinstance(schema, Mapping):
        return "text" if schema is None else "json"
    return kind_of_value(schema, parameters)


def kind_of_value(schema: Mapping[str, Any], root: Any) -> str:
    """Tell the kind as `kind_of` does, from the schema of the value itself: plain texts are written as they are."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return "json"
    kind = schema.get("type")
    values = listed_values(schema)
    if isinstance(values, list) and values and kind in (None, "string", ["string"]):
        texts = all(isinstance(value, str) and value for value in values)
        return "text" if texts and set(schema) <= _NOTES | {"type", "enum", "const"} else "json"
    plain = set(schema) - _NOTES <= {"type", "minLength", "maxLength"}
    return "text" if plain and kind in ("string", ["string"]) else "json"


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
