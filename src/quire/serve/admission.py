"""Admission of every HTTP request, as the first middleware: its id, its API key, its count; HEAD like GET."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.lazy import Lazy
from quire.serve.callers import Caller, Keys
from quire.serve.dashboard.router import open_paths
from quire.serve.errors import ErrorInfo, HttpError, forbidden, not_found, unauthorized
from quire.serve.ids import REQUEST_ID, ROUTE

if TYPE_CHECKING:
    from quire.serve import routed
else:
    routed = Lazy("quire.serve.routed")

# Open without a key: probes, scrapers, and pages without data (the dashboard asks its user for the key).
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json"}) | open_paths()
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
MAX_SHOWN = 32  # names in a header, and twice as many characters of each
VERSION = "anthropic-version"

CountAnswer = Callable[[str, str, int], None]


def route_path(scope: Scope) -> str:
    """Return the path as the routes see it, without the prefix that a proxy may have left in place."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _listed(names: Iterable[str]) -> bytes:
    """Write the first names as the value of a header; characters that no name has become `?`."""
    shown = [_UNSAFE.sub("?", name)[: 2 * MAX_SHOWN] for name in islice(names, MAX_SHOWN)]
    return ", ".join(shown).encode()


def _without_body(send: Send) -> Send:
    """Send the head of an answer, and end it where its body would begin."""
    ended = False

    async def answer(message: Message) -> None:
        nonlocal ended
        if message["type"] == "http.response.body":
            if ended:
                return
            ended, message = True, {"type": "http.response.body", "body": b"", "more_body": False}
        await send(message)

    return answer


def is_anthropic(path: str, headers: Headers) -> bool:
    """Whether a client speaks Anthropic's API."""
    return path.startswith("/v1/messages") or (path.startswith("/v1/models") and VERSION in headers)


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """Limits on the headers of a request: their number and their bytes."""

    headers: int
    size: int

    def check(self, headers: Headers) -> HttpError | None:
        """Make the error for a head beyond the limits."""
        size = sum(len(name) + len(value) for name, value in headers.raw)
        if len(headers.raw) <= self.headers and size <= self.size:
            return None
        message = (
            f"the request has {len(headers.raw)} headers of {size} bytes; at most {self.headers} "
            f"(--h11-max-header-count) of {self.size} bytes (--h11-max-incomplete-event-size) are taken"
        )
        return HttpError(431, ErrorInfo(message, "invalid_request_error", None, "headers_too_large"))


class Admission:
    """Sets the caller's `state`, refuses strangers, counts answers, adds headers.

    Only operators reach the paths in `for_operators`, and only routers those in /internal. `state` gets `request_id`,
    `created`, `owner`, `operator`, `route` if a router asks, and no `resumption` yet. Answers to
    routers tell the `load`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        for_operators: Container[str],
        error_response: Callable[[Scope, HttpError], Response],
        count: CountAnswer,
        show_id: bool,
        limits: HeadLimits,
        load: Callable[[], bytes] | None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._for_operators = for_operators
        self._error_response = error_response
        self._count = count
        self._show_id = show_id
        self._limits = limits
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.match(given) else uuid.uuid4().hex
        caller = self._keys.caller(headers, scope.get("client"))
        owner, created, route, malformed = caller.owner or "", int(time.time()), None, None
        if caller.router and ROUTE in headers:
            try:
                route = routed.read_route(headers[ROUTE])
                request_id, owner, created = route.id, route.owner, route.created
            except HttpError as error:
                malformed = error
        scope.setdefault("state", {}).update(
            request_id=request_id,
            created=created,
            owner=owner,
            operator=caller.operator,
            route=route,
            resumption=None,
        )
        path, method = route_path(scope), scope["method"]
        if method == "HEAD":  # the same answer as to GET, without its body
            scope, send = {**scope, "method": "GET"}, _without_body(send)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(method, path, message["status"])
                if self._show_id:
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                if is_anthropic(path, headers):
                    message["headers"] = [*message["headers"], (b"request-id", request_id.encode())]
                if caller.router and self._load is not None:
                    message["headers"] = [*message["headers"], (b"x-quire-load", self._load())]
                if ignored := scope["state"].get("ignored"):
                    message["headers"] = [*message["headers"], (b"x-ignored-fields", _listed(ignored))]
            await send(message)

        refusal = self._limits.check(headers) or malformed or self._refusal(path, method, headers, caller)
        app = self._app if refusal is None else self._error_response(scope, refusal)
        await app(scope, receive, answer)

    def _refusal(self, path: str, method: str, headers: Headers, caller: Caller) -> HttpError | None:
        """Make the error for a caller who may not ask for this."""
        if path.startswith("/internal/") and not caller.router:
            return unauthorized() if self._keys.routers else not_found("Not Found", None, "not_found")
        if path in OPEN_PATHS or method == "OPTIONS":
            return None
        if not caller.router and (why := self._keys.foreign(headers)):
            return forbidden(why, "foreign_origin")
        if caller.owner is None:
            return unauthorized()
        if path in self._for_operators and not caller.operator:
            return forbidden(self._keys.operators_only, "operators_only")
        return None
