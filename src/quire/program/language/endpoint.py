"""A server as the backend of programs."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from quire.errors import (
    EngineError,
    OverloadedError,
    ProgramError,
    QuireError,
    RequestError,
    SessionExpiredError,
)
from quire.program.frames import Frames

SECONDS = 600.0


class RuntimeEndpoint:
    """The server at `base_url`. `verify` is a file with the CA certificates, or False to check none."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | bool | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"base_url must begin with http:// or https://, got {base_url!r}", "base_url")
        if chat_template_name is not None:
            raise RequestError(
                "chat_template_name is not supported: the server has the model's own template (--chat-template)",
                "chat_template_name",
            )
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._tls = _tls(verify) if parts.scheme == "https" else None

    def run_program(self, program: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Run a program on the server and yield its events; with "stream" as they come. Leaving early ends it there."""
        connection, answer = self._ask("POST", "/v1/programs", json.dumps(dict(program)).encode())
        try:
            if program.get("stream"):
                yield from _events(answer)
            else:
                whole = json.loads(_read(answer))
                yield from whole["steps"]
                yield {
                    "event": "done",
                    **{name: whole[name] for name in ("text", "variables", "session", "usage")},
                }
        finally:
            connection.close()

    def end_session(self, session: str) -> None:
        """Forget the state that the server kept of a program."""
        list(self.run_program({"session": session}))

    @cached_property
    def _frames(self) -> Frames:
        found = self._json("/v1/programs")
        around = {role: (before, after) for role, (before, after) in found["roles"].items()}
        return Frames(around, found["default_system"], tuple(found["stop"]), found["bos"])

    def role_frames(self) -> Frames:
        """Return the texts by which the chat template of the server's model frames messages."""
        return self._frames

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        connection, answer = self._ask("POST", "/reset_prefix_cache")
        answer.read()
        connection.close()
        return True

    def flush_cache(self) -> bool:
        """Forget all cached prefixes, under SGLang's name."""
        return self.reset_prefix_cache()

    def cache_prefix(self, prefix: str) -> None:
        """Compute a text, so that what begins with it starts sooner."""
        list(self.run_program({"steps": [{"type": "text", "text": prefix}, {"type": "compute"}]}))

    def get_model_name(self) -> str:
        """Return the name of the server's model."""
        return str(self._json("/v1/models")["data"][0]["id"])

    def _json(self, path: str) -> dict[str, Any]:
        connection, answer = self._ask("GET", path)
        try:
            found: dict[str, Any] = json.loads(_read(answer))
        finally:
            connection.close()
        return found

    def _ask(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request and read the head of the answer. Raises the error that the server answers with."""
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=SECONDS)
        else:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=SECONDS, context=self._tls
            )
        try:
            connection.request(method, self._path + path, body, self._headers)
            answer = connection.getresponse()
            if answer.status == 200:
                return connection, answer
            error = _error(answer.status, answer.read())
        except (OSError, http.client.HTTPException) as failure:
            error = EngineError(f"the server at {self._host}:{self._port} does not answer: {failure}")
        connection.close()
        raise error


def _read(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read()
    except (OSError, http.client.HTTPException) as failure:
        raise ProgramError(f"the server went away: {failure}") from failure


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, up to its end mark. Raises the error that ends it."""
    try:
        for line in answer:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: "):
                continue
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise _error(500, data)
            yield event
    except (OSError, http.client.HTTPException) as failure:
        raise ProgramError(f"the server went away: {failure}") from failure
    raise ProgramError("the server went away before the program ended")


def _error(status: int, body: bytes) -> QuireError:
    try:
        found = json.loads(body)["error"]
        message, code, param = str(found["message"]), found.get("code"), found.get("param")
    except (ValueError, TypeError, KeyError):
        return EngineError(f"the server answered {status}: {body[:200]!r}")
    if code == "session_not_found":
        return SessionExpiredError(message, "session")
    if code == "program_failed":
        return ProgramError(message)
    if status == 503:
        return OverloadedError(message)
    return RequestError(message, param) if 400 <= status < 500 else ProgramError(message)


def _tls(verify: str | bool | None) -> ssl.SSLContext:
    if verify is False:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    return ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
