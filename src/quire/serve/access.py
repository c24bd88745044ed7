"""One log line per HTTP request, when its answer starts, with the id that the answer has."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

# uvicorn's own name and arguments, so that filters and configurations made for it apply.
log = logging.getLogger("uvicorn.access")


class AccessLog:
    """ASGI middleware around all others. Without `enabled`, it passes everything on."""

    def __init__(self, app: ASGIApp, enabled: bool) -> None:
        self._app = app
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._enabled or not log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                _write(scope, message["status"], state.get("request_id"))
            await send(message)

        await self._app(scope, receive, answer)


def _write(scope: Scope, status: int, request_id: str | None) -> None:
    client, path = get_client_addr(scope), get_path_with_query_string(scope)  # type: ignore[arg-type]
    method, version = scope["method"], scope["http_version"]
    log.info(
        '%s - "%s %s HTTP/%s" %d',
        client,
        method,
        path,
        version,
        status,
        extra={
            "fields": {} if request_id is None else {"request_id": request_id},
            "parts": {"client": client, "method": method, "path": path, "status": status},
        },
    )
