"""Endpoints with a body, and the dialects that installed distributions add to the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
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


@dataclass(frozen=True, slots=True)
class Dialect:
    """Another server's API, as a distribution registers it under the entry point `quire.endpoints`.

    An endpoint takes the place of Quire's own with the same path. `add_routes` adds the routes without a body.
    """

    endpoints: tuple[Endpoint, ...] = ()
    add_routes: Callable[[FastAPI, Service], None] | None = None
