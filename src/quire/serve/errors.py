"""Errors as HTTP answers in OpenAI's shape."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from quire.errors import (
    DeviceMemoryError,
    EngineDiedError,
    EngineError,
    OverloadedError,
    ProgramError,
    PromptTooLongError,
    QuireError,
    RequestError,
    SessionExpiredError,
)
from quire.fields import fields_of

log = logging.getLogger("quire.serve")

encode = msgspec.json.Encoder().encode

# msgspec ends its messages with the path of the wrong value, as "... - at `$.messages[0].content`".
_PLACE = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>.*)`")
_MISSING = re.compile(r"missing required field `(?P<name>.*)`")


class StoppedError(EngineError):
    """The server stopped while a request ran in it."""


_MOVED: dict[type[QuireError], str] = {EngineDiedError: "engine", StoppedError: "drained"}
"""_MOVED errors tell a router to ask another replica."""


class ErrorInfo(msgspec.Struct):
    """`param` names the field at fault; `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """OpenAI's error answer."""

    error: ErrorInfo


class HttpError(QuireError):
    """Any answer but success, with its extra `headers`. `too_long`: the prompt did not fit."""

    def __init__(self, status: int, info: ErrorInfo, headers: dict[str, str] | None = None) -> None:
        super().__init__(info.message)
        self.too_long: PromptTooLongError | None = None
        self.status = status
        self.info = info
        self.headers = headers or {}

    def body(self) -> bytes:
        return encode(ErrorBody(self.info))


def invalid(message: str, param: str | None = None, code: str | None = None) -> HttpError:
    """Make a 400: the request must change."""
    return HttpError(400, ErrorInfo(message, "invalid_request_error", param, code))


def unsupported(param: str, why: str) -> HttpError:
    """Make a 400: a known field that this server does not support."""
    return invalid(f"{param} is not supported: {why}", param, "unsupported_parameter")


def unavailable(message: str, retry_after: int = 1) -> HttpError:
    """Make a 503: the same request may succeed later."""
    info = ErrorInfo(message, "server_overloaded", None, "overloaded")
    return HttpError(503, info, {"Retry-After": str(retry_after)})


def not_found(message: str, param: str | None, code: str) -> HttpError:
    return HttpError(404, ErrorInfo(message, "invalid_request_error", param, code))


def unauthorized() -> HttpError:
    message = "Incorrect or missing API key: send it as `Authorization: Bearer KEY`"
    info = ErrorInfo(message, "invalid_request_error", None, "invalid_api_key")
    return HttpError(401, info, {"WWW-Authenticate": "Bearer"})


def forbidden(message: str, code: str) -> HttpError:
    return HttpError(403, ErrorInfo(message, "permission_error", None, code))


def timed_out(seconds: float) -> HttpError:
    message = f"the request took more than {seconds:g} s (--request-timeout) and was aborted"
    return HttpError(504, ErrorInfo(message, "timeout_error", None, "timeout"))


def from_decoding(error: msgspec.MsgspecError) -> HttpError:
    """Make the error for a body that is not JSON, or does not match the endpoint's schema."""
    if not isinstance(error, msgspec.ValidationError):
        return invalid(f"the body is not valid JSON: {error}", None, "invalid_json")
    message = str(error)
    place = _PLACE.search(message)
    path = place["path"].lstrip(".") if place else ""
    text = message[: place.start()] if place else message
    if unknown := _UNKNOWN.search(text):
        name = f"{path}.{unknown['name']}" if path else unknown["name"]
        return invalid(f"Unknown field: {name}. Leave it out.", name, "unknown_parameter")
    if missing := _MISSING.search(text):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return invalid(f"Missing field: {name}", name, "missing_required_parameter")
    return invalid(f"{path or 'the body'}: {text}", path or None, "invalid_type")


def from_field(error: msgspec.ValidationError, body: type[msgspec.Struct], given: Any) -> HttpError:
    """Make the error for a body with a wrong value: in the words of its field if that is a number, flag or choice."""
    if isinstance(error.__cause__, RequestError):  # by the struct's own check
        return invalid(str(error.__cause__), error.__cause__.param, "invalid_value")
    place = _PLACE.search(str(error))
    field = fields_of(body).get(place["path"].lstrip(".")) if place else None
    if field is None or field.test is None:
        return from_decoding(error)
    refusal = field.refusal(given[field.name])
    return invalid(str(refusal), field.name, "invalid_type" if ", got " in str(error) else "invalid_value")


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors inside name the fields by the names that this API gives them."""
    try:
        yield
    except RequestError as error:
        given = error.param or ""
        if given in names:
            error.args, error.param = (f"{names[given]}{str(error).removeprefix(given)}",), names[given]
        raise


def as_http(error: Exception) -> HttpError:
    """Turn any error into an answer. Unexpected ones become a 500 and are logged with their traceback."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, SessionExpiredError):
        return not_found(str(error), error.param, "session_not_found")
    if isinstance(error, ProgramError):
        return invalid(str(error), "steps", "program_failed")
    if isinstance(error, RequestError):
        too_long = "maximum context length" in str(error)
        refusal = invalid(str(error), error.param, "context_length_exceeded" if too_long else "invalid_value")
        refusal.too_long = error if isinstance(error, PromptTooLongError) else None
        return refusal
    if isinstance(error, OverloadedError):
        return unavailable(str(error), error.retry_after)
    if isinstance(error, DeviceMemoryError):
        return unavailable(str(error), 1)
    if isinstance(error, msgspec.MsgspecError):
        return from_decoding(error)
    if isinstance(error, UnicodeDecodeError):
        return invalid(f"the body is not valid UTF-8: {error}", None, "invalid_json")
    if isinstance(error, RecursionError):
        return invalid("the body is nested too deeply", None, "invalid_json")
    if isinstance(error, QuireError):
        headers = {"X-Quire-Moved": _MOVED[type(error)]} if type(error) in _MOVED else None
        return HttpError(500, ErrorInfo(str(error), "engine_error", None, "engine_error"), headers)
    log.error("unexpected error in a request", exc_info=error)
    message = f"the server failed on this request ({type(error).__name__}); see its log"
    return HttpError(500, ErrorInfo(message, "internal_error", None, "internal_error"))
