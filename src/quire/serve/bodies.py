"""Reads the bodies of requests, within bounds on their size and time."""

from __future__ import annotations

import asyncio

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from quire.serve.errors import ErrorInfo, HttpError, invalid
from quire.serve.stream import Disconnected
from quire.serve.threads import within

# The largest batches of token ids are of this order.
MAX_VALUES = 1 << 20
# Objects, lists and members of objects cost more each.
MAX_CONTAINERS = 1 << 17
# A text this short cannot hold too many values.
SMALL_BYTES = 1 << 17
# One slice is counted at a time, so that a thread that counts does not hold the interpreter lock for long.
_SLICE = 1 << 20


def check_values(body: bytes) -> None:
    """Raise HttpError 400 if the JSON text has more values than MAX_VALUES, or too many objects and lists."""
    if len(body) <= SMALL_BYTES:
        return
    values, containers = _count(body)
    if values > MAX_VALUES or containers > MAX_CONTAINERS:
        values, containers = _count(body, outside_strings=True)
    if values > MAX_VALUES:
        raise _too_many(f"{MAX_VALUES} values")
    if containers > MAX_CONTAINERS:
        raise _too_many(f"{MAX_CONTAINERS} objects, lists and fields of objects")


def _too_many(what: str) -> HttpError:
    return invalid(f"the body has more than {what}: send less in one request", None, "invalid_value")


def _count(body: bytes, outside_strings: bool = False) -> tuple[int, int]:
    """Count commas, and colons with opening brackets; in the whole text or outside of its strings."""
    values = containers = start = 0
    inside = False
    while start < len(body):
        end = min(start + _SLICE, len(body))
        part = body[start:end]
        if outside_strings:
            odd = (len(part) - len(part.rstrip(b"\\"))) % 2
            part = body[start : end + odd]  # do not cut an escape in two
            start = end + odd
            part, inside = _without_strings(part, inside)
        else:
            start = end
        values += part.count(b",")
        containers += part.count(b":") + part.count(b"{") + part.count(b"[")
    return values, containers


def _without_strings(part: bytes, inside: bool) -> tuple[bytes, bool]:
    """Return the bytes of `part` outside of strings, and whether it ends inside one, if it starts `inside` one."""
    if b"\\" in part:
        part = part.replace(b"\\\\", b"xx").replace(b'\\"', b"xx")
    letters = np.frombuffer(part, np.uint8)
    within = np.bitwise_xor.accumulate(letters == ord('"')) ^ inside
    return letters[~within].tobytes(), bool(within[-1])


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
