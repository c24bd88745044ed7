"""Read the constraint on an answer from the fields of OpenAI, vLLM and SGLang that can set one."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.serve.errors import HttpError, invalid
from quire.serve.openai.protocol import SamplingFields

# Fields that hold a constraint directly, with its name in StructuredOutputsParams.
PLAIN = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "response_schema": "json",
    "format": "json",
}
FIELDS = ("response_format", "structured_outputs", *PLAIN)


def constrained_by(body: SamplingFields) -> str | None:
    """Name the field that constrains the answer, if any. 400 if two fields do."""
    given = [name for name in FIELDS if getattr(body, name) not in (None, {"type": "text"})]
    given = [name for name in given if name != "format" or body.format]
    if len(given) > 1:
        message = f"{given[0]} and {given[1]} both constrain the answer: give one"
        raise invalid(message, given[1], "invalid_value")
    return given[0] if given else None


def constraint_of(body: SamplingFields) -> StructuredOutputsParams | None:
    """Read the constraint on the answer, or None. 400 naming the field at fault."""
    field = constrained_by(body)
    if field is None:
        if body.guided_whitespace_pattern is not None:
            message = "guided_whitespace_pattern needs guided_json"
            raise invalid(message, "guided_whitespace_pattern", "invalid_value")
        return None
    value = getattr(body, field)
    try:
        if field == "response_format":
            return response_format(value)
        if field == "structured_outputs":
            return _read(value)
        pattern = body.guided_whitespace_pattern
        if (field, value) == ("format", "json"):
            return StructuredOutputsParams(json_object=True, whitespace_pattern=pattern)
        return StructuredOutputsParams(**{PLAIN[field]: value, "whitespace_pattern": pattern})
    except RequestError as error:
        raise at_field(error, field) from error


def at_field(error: RequestError, field: str) -> HttpError:
    """Make a 400 that names the field the caller sent."""
    message = str(error).removeprefix("structured_outputs ").removeprefix("structured_outputs: ")
    return invalid(f"{field}: {message}", field, "invalid_value")


def _read(value: dict[str, Any]) -> StructuredOutputsParams | None:
    """vLLM's `structured_outputs`; null members are absent."""
    given = {name: item for name, item in value.items() if item is not None}
    for name in ("_backend", "_backend_was_auto", "disable_fallback"):
        given.pop(name, None)
    if unknown := set(given) - set(StructuredOutputsParams.__struct_fields__):
        name = f"structured_outputs.{min(unknown)}"
        raise invalid(f"Unknown field: {name}", name, "unknown_parameter")
    try:
        return msgspec.convert(given, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        raise invalid(f"structured_outputs: {error}", "structured_outputs", "invalid_type") from error


def response_format(wanted: dict[str, Any]) -> StructuredOutputsParams | None:
    """OpenAI's `response_format`, with vLLM's structural tags. RequestError if it is malformed."""
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        if wanted.get("schema") is not None:
            return StructuredOutputsParams(json=_schema(wanted, "schema"))
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=wanted)
    if kind == "json_schema":
        return StructuredOutputsParams(json=_schema(wanted.get("json_schema"), "json_schema.schema"))
    kinds = "text, json_object, json_schema or structural_tag"
    raise RequestError(f"type {str(kind)[:64]!r} is not supported; use {kinds}", "response_format")


def text_format(wanted: dict[str, Any]) -> dict[str, Any]:
    """Turn the `text.format` of the responses API into a `response_format`, whose schema is one level further down."""
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}


def _schema(named: Any, where: str) -> Any:
    if not isinstance(named, dict) or not isinstance(named.get("schema"), (dict, bool)):
        raise RequestError(f"{where} must be a JSON schema (an object)", "response_format")
    return named["schema"]
