"""The OpenAPI document: routes that describe themselves with the schemas of msgspec structs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from quire.serve.errors import ErrorBody, encode
from quire.serve.openai.models import ModelList, ServedModelCard

ERRORS = (400, 401, 404, 408, 413, 415, 422, 499, 500, 503, 504)

# The schema of one server-sent event.
EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
_TEMPLATE = "#/components/schemas/{name}"


def add_get(
    app: FastAPI, path: str, handler: Callable[..., Awaitable[Response]], answer: Any, summary: str
) -> None:
    """A GET route; `answer` is the type of its JSON, or None for an empty body."""
    content = {} if answer is None else {"application/json": {"schema": reference(answer)}}
    app.add_api_route(
        path, handler, summary=summary, response_class=Response, responses=responses_of(content)
    )


def json_response(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


def reference(kind: Any) -> dict[str, Any]:
    """The schema of a type, by reference if it is a struct."""
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_TEMPLATE)
    return schema


def responses_of(content: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Success with `content`, and every error that the server answers with."""
    error = {"description": "Error", "content": {"application/json": {"schema": {}}}}
    found: dict[int | str, dict[str, Any]] = dict.fromkeys(ERRORS, error)
    found[200] = {"description": "Success", "content": content}
    return found


def document(app: FastAPI, requests: Sequence[type], answers: Sequence[type]) -> dict[str, Any]:
    """FastAPI's document with the schemas of bodies of requests and answers."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        types = (ErrorBody, ModelList, ServedModelCard, *requests, *answers)
        _, schemas = msgspec.json.schema_components(types, ref_template=_TEMPLATE)
        components = found.setdefault("components", {})
        for kind in requests:
            _allow_null(schemas[kind.__name__])
        components.setdefault("schemas", {}).update(schemas)
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = found
    return app.openapi_schema


def _allow_null(schema: dict[str, Any]) -> None:
    """Say that null is absent: every optional field may be null."""
    for name, given in schema["properties"].items():
        if name in schema.get("required", ()):
            continue
        choices = given.get("anyOf", [given])
        if {"type": "null"} not in choices:
            schema["properties"][name] = {"anyOf": [*choices, {"type": "null"}]}
