"""Reads the bodies of requests, within bounds on their size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from quire.serve.errors import ErrorInfo, HttpError
from quire.serve.stream import Disconnected
from quire.serve.threads import within

BODY_TIMEOUT = 60.0


async def read_body(http: HttpRequest, limit: int) -> bytes:
    """Read a body of at most `limit` bytes. Raises HttpError 408 or 413, or Disconnected."""
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    try:
        return await within(BODY_TIMEOUT, _collect(http, limit))
    except asyncio.TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT:g} s"
        info = ErrorInfo(message, "timeout_error", None, "timeout")
        raise HttpError(408, info, {"Connection": "close"}) from None


async def _collect(http: HttpRequest, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async for part in http.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise Disconnected("the client disconnected") from None
    return b"".join(parts)


def _too_large(limit: int) -> HttpError:
    message = f"the body is larger than {limit} bytes (--max-body-bytes)"
    info = ErrorInfo(message, "invalid_request_error", None, "body_too_large")
    return HttpError(413, info, {"Connection": "close"})
