"""Who calls: a user or an operator by their API key, and which web pages a browser may call for."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from quire.sockets import is_local

_is_local = lru_cache(maxsize=1024)(is_local)  # a client asks more than once


class Caller(NamedTuple):
    """`owner` names the key, "" where none is needed; None is a stranger. An `operator` may act on all users.

    A `router` asks for its own clients.
    """

    owner: str | None
    operator: bool
    router: bool = False


class Keys:
    """API keys, stored as digests.

    Without a user's key everybody is the user "". Without any key, operators are those who call from this machine;
    with users' keys alone, there is none. A server without a key is `private` unless options open it: it answers only
    web pages of its own, and on a `loopback` address only to a local name (against DNS rebinding). `routers` have keys
    of their own.
    """

    def __init__(
        self,
        users: Iterable[str] = (),
        operators: Iterable[str] = (),
        private: bool = False,
        loopback: bool = False,
        routers: Iterable[str] = (),
    ) -> None:
        self._operators = [_digest(key.encode()) for key in operators]
        self._users = [_digest(key.encode()) for key in users]
        self.routers = [_digest(key.encode()) for key in routers]
        self.private, self._loopback = private and not self._users, loopback

    @property
    def operators_only(self) -> str:
        """Tell what a caller of an operator's endpoint needs."""
        if self._operators or self._users:
            return "this acts on all users: send an operator's key (--admin-api-key)"
        return (
            "this acts on all users: call it from the server's own machine, or start it with --admin-api-key"
        )

    def caller(self, headers: Headers, client: tuple[str, int] | None) -> Caller:
        """Find who sends `Authorization: Bearer KEY` or `x-api-key: KEY` from a client's address (None: a socket file).

        Compares with each key in constant time.
        """
        if not self._users and not self._operators and not self.routers:
            return Caller("", client is None or _is_local(client[0]))
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given.encode("latin-1", "replace"))
        if _among(digest, self.routers):
            return Caller("", False, True)
        if not self._users and not self._operators:
            return Caller("", client is None or _is_local(client[0]))
        operator, user = _among(digest, self._operators), _among(digest, self._users)
        if operator or user:
            return Caller(digest.hex()[:16], operator)
        return Caller(None if self._users else "", False)

    def foreign(self, headers: Headers) -> str | None:
        """Tell why a browser's request is refused: it comes from another site's page."""
        if not self.private:
            return None
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return f"pages of {origin[:99]!r} may not call this server: allow it by --allowed-origins, or set --api-key"
        if host and self._loopback and not _is_local(urlsplit(f"//{host}").hostname or ""):
            return (
                f"this server is not {host[:99]!r}: give --allowed-origins or --api-key to serve other names"
            )
        return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _among(digest: bytes, known: list[bytes]) -> bool:
    found = False
    for one in known:
        found |= hmac.compare_digest(digest, one)
    return found
