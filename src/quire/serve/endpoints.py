"""What an endpoint with a body is: its path, what answers it, and the types of both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.serve.service import Service
from quire.serve.stream import Answer


@dataclass(frozen=True, slots=True)
class Generating:
    """An endpoint that runs prompts and may stream."""

    path: str
    make: Callable[[Service, HttpRequest], Awaitable[Answer]]
    body: type
    answer: Any
    summary: str


@dataclass(frozen=True, slots=True)
class Plain:
    """An endpoint that answers a body with JSON, or with bytes if it is `binary` and the body asks for them."""

    path: str
    make: Callable[[Service, HttpRequest], Awaitable[bytes | Response]]
    body: type
    answer: Any
    summary: str
    binary: bool = False


Endpoint = Generating | Plain
