"""Connections between the ranks of an engine, which prove to each other that they know its secret.

Knows sockets and who connects; knows no command and no array. Each side sends a random challenge and answers the
other's with an HMAC (RFC 2104) of both. Until a peer has done so, no more than a hundred bytes of it are read.
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Literal

import msgspec

from quire.engine.log import Tally
from quire.engine.wire import LENGTH, framed
from quire.errors import ConfigError, EngineError, ResourceError
from quire.sockets import receive_exactly

log = logging.getLogger("quire.engine")

Kind = Literal["control", "peer", "stage"]
Address = tuple[str, int]
Bytes = bytes | bytearray

MAGIC = b"quire ranks 1\n"
NONCE = 32
PROOF = 32
MOST_HELLO = 4096
SLOW = 10.0
"""A peer must prove itself within SLOW seconds, all in all."""
MOST_UNKNOWN = 64
"""At most MOST_UNKNOWN connections prove themselves at the same time: a new one ends the oldest."""
LOG_INTERVAL = 10.0
"""Refused connections are logged once in LOG_INTERVAL seconds."""
LINGER = 10.0
"""A port may still belong to an engine that ended up to LINGER seconds ago."""
KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 3000))
"""With KEEPALIVE the kernel notices a lost machine within three seconds."""


class NoEngineError(EngineError):
    """Nobody answers where the engine should be."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who connects, for what, and where it can be reached itself. `agreement`: what it is about to compute."""

    kind: Kind
    rank: int
    address: Address = ("", 0)
    agreement: str = ""


_hello = msgspec.msgpack.Decoder(Hello)


class Links:
    """Listens for other ranks, and keeps their connections until they are taken."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        """ConfigError: nothing can listen there."""
        self._listener = _listen(host, port)
        self._secret = secret
        self._found: dict[tuple[Kind, int], tuple[socket.socket, Hello]] = {}
        self._changed = threading.Condition()
        self._unknown: deque[socket.socket] = deque()  # have not proved themselves, oldest first
        self._refused = Tally(LOG_INTERVAL)
        self.closed = False
        threading.Thread(target=self._accept, name="quire-links", daemon=True).start()

    @property
    def address(self) -> Address:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def take(self, kind: Kind, rank: int, seconds: float) -> tuple[socket.socket, Hello] | None:
        """Wait for a rank's connection; None if it makes none in time."""
        with self._changed:
            self._changed.wait_for(lambda: (kind, rank) in self._found or self.closed, seconds)
            return self._found.pop((kind, rank), None)

    def close(self) -> None:
        """Stop listening, and close what nobody has taken."""
        with self._changed:
            self.closed = True
            for connection, _ in self._found.values():
                connection.close()
            self._found.clear()
            self._changed.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while not self.closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or out of descriptors for a while
                time.sleep(0.1)
                continue
            with self._changed:
                if len(self._unknown) == MOST_UNKNOWN:
                    with suppress(OSError):
                        self._unknown.popleft().shutdown(socket.SHUT_RDWR)
                self._unknown.append(connection)
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        try:
            hello = _proved_by(connection, self._secret, time.monotonic() + SLOW)
            tune(connection)
        except (OSError, EOFError, EngineError, msgspec.MsgspecError) as error:
            self._refuse(connection, error)
            return
        with self._changed:
            if connection in self._unknown:
                self._unknown.remove(connection)
            if self.closed or (hello.kind, hello.rank) in self._found:
                connection.close()
                return
            self._found[hello.kind, hello.rank] = connection, hello
            self._changed.notify_all()

    def _refuse(self, connection: socket.socket, error: Exception) -> None:
        """Close a connection that has not proved itself, and log now and then how many there were."""
        with self._changed:
            if connection in self._unknown:
                self._unknown.remove(connection)
            connection.close()
            count = self._refused.add()
        if count:
            log.warning("%d connections to the ranks of this engine were refused; the last: %s", count, error)


def connect(address: Address, secret: bytes, hello: Hello, seconds: float) -> socket.socket:
    """Connect to the links of another rank. NoEngineError: nobody answers there in time.

    EngineError: what answers is something else.
    """
    deadline, host = time.monotonic() + seconds, f"{address[0]}:{address[1]}"
    while True:
        try:
            connection = socket.create_connection(address, timeout=SLOW)
        except OSError as error:
            if time.monotonic() > deadline:
                raise NoEngineError(f"no engine answers at {host}: {error}") from error
            time.sleep(0.1)
            continue
        try:
            _prove_to(connection, secret, time.monotonic() + SLOW)
            connection.sendall(framed(msgspec.msgpack.encode(hello)))
            tune(connection)
            return connection
        except EngineError:
            connection.close()
            raise
        except (OSError, EOFError) as error:
            connection.close()
            if time.monotonic() > deadline:
                raise NoEngineError(
                    f"the engine at {host} refuses the connection ({error}): is the content of "
                    "--distributed-secret-file the same on all machines?"
                ) from error
            time.sleep(0.1)


def tune(connection: socket.socket) -> None:
    """Send at once, wait without limit, and notice a lost machine."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def own_host(towards: str) -> str:
    """Find the address of this machine on the way to another one."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
        except OSError as error:
            raise ConfigError(f"--master-addr {towards} cannot be reached: {error}") from error
        return str(probe.getsockname()[0])


def _listen(host: str, port: int) -> socket.socket:
    family, deadline = socket.AF_INET6 if ":" in host else socket.AF_INET, time.monotonic() + LINGER
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=MOST_UNKNOWN)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise ResourceError(
                    f"the ranks cannot be awaited at {host}:{port}: {error.strerror}; change --master-addr or "
                    "--master-port"
                ) from error
            time.sleep(0.1)


def _proved_by(connection: socket.socket, secret: bytes, until: float) -> Hello:
    """Return the peer's Hello, once it has proved to know the secret."""
    mine = secrets.token_bytes(NONCE)
    connection.settimeout(SLOW)
    connection.sendall(MAGIC + mine)
    answer = receive_exactly(connection, NONCE + PROOF, until)
    theirs, proof = answer[:NONCE], answer[NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"connects", mine, theirs)):
        raise EngineError("it does not know the secret")
    connection.sendall(_proof(secret, b"accepts", mine, theirs))
    (size,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size, until))
    if size > MOST_HELLO:
        raise EngineError(f"it begins with {size} bytes")
    return _hello.decode(receive_exactly(connection, size, until))


def _prove_to(connection: socket.socket, secret: bytes, until: float) -> None:
    begin = receive_exactly(connection, len(MAGIC) + NONCE, until)
    if not begin.startswith(MAGIC):
        raise EngineError("what answers there is no engine of this version of Quire")
    theirs, mine = begin[len(MAGIC) :], secrets.token_bytes(NONCE)
    connection.sendall(mine + _proof(secret, b"connects", theirs, mine))
    if not hmac.compare_digest(
        receive_exactly(connection, PROOF, until), _proof(secret, b"accepts", theirs, mine)
    ):
        raise EngineError(
            "the engine does not know the secret of this machine: check --distributed-secret-file"
        )


def _proof(secret: bytes, role: bytes, first: Bytes, second: Bytes) -> bytes:
    return hmac.digest(secret, role + first + second, "sha256")
