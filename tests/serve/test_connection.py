"""Raw sockets: heads without end, half-sent heads, upgrades, old clients, more connections than descriptors."""

from __future__ import annotations

import asyncio
import functools
import json
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import pytest
import uvicorn

from quire.serve.connection import MAX_HEAD_BYTES, MAX_PIPELINED, Connection, Room
from quire.serve.system_limits import raise_descriptor_limit
from tests.serve.running import Server

BODY = json.dumps({"model": "scripted", "prompt": "hello", "max_tokens": 3}).encode()


def connect(server: Server) -> socket.socket:
    url = urlsplit(server.url)
    return socket.create_connection((url.hostname, url.port), timeout=120)


def answer(connection: socket.socket) -> bytes:
    """All bytes until the server closes."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def send_on(connection: socket.socket, piece: bytes, total: int) -> None:
    """Send `piece` again and again, until the server stops reading."""
    try:
        for _ in range(total // len(piece)):
            connection.sendall(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nx: ", b"a" * 4096),
        (b"GET /health HTTP/1.1\r\n", b"a: b\r\n" * 500),
        (b"GET /", b"a" * 4096),
        (b"", b"\r\n" * 500),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a" * 4096),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 500),
    ],
    ids=["value", "lines", "path", "empty lines", "chunk extension", "trailers"],
)
def test_a_head_without_end_ends(server: Server, start: bytes, piece: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(start)
        send_on(connection, piece, 100 * MAX_HEAD_BYTES)
        try:
            found = answer(connection)
        except ConnectionResetError:
            found = b""
    assert found == b"" or found.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


@pytest.mark.parametrize(("spare", "status"), [(0, b"200"), (-1, b"431")], ids=["largest", "too large"])
def test_the_largest_head(server: Server, spare: int, status: bytes) -> None:
    head = b"GET /ping HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: %b\r\n\r\n"
    fill = b"a" * (MAX_HEAD_BYTES - len(head) + 2 - spare)
    with connect(server) as connection:
        connection.sendall(head % fill)
        assert answer(connection).split()[1] == status


def test_a_large_body_is_no_head(server: Server) -> None:
    text = "a" * (3 * MAX_HEAD_BYTES)
    found = server.post("/tokenize", {"prompt": text})
    assert found.json()["count"] == len(text)


def test_many_pipelined_requests_are_answered_or_refused(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(
            b"GET /ping HTTP/1.1\r\n\r\n" * 8 + b"GET /ping HTTP/1.1\r\nconnection: close\r\n\r\n"
        )
        assert answer(connection).count(b"HTTP/1.1 200") == 9
    with connect(server) as connection:
        connection.sendall(b"GET /ping HTTP/1.1\r\n\r\n" * (MAX_PIPELINED + 20))
        assert answer(connection).count(b"HTTP/1.1 200") <= MAX_PIPELINED


@pytest.mark.parametrize("chunked", [False, True])
def test_an_offered_upgrade_leaves_the_request_as_it_is(server: Server, chunked: bool) -> None:
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(BODY)
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"
            + length
            + b"\r\n\r\n"
        )
        time.sleep(0.05)
        connection.sendall(body + b"GET /ping HTTP/1.1\r\nconnection: close\r\n\r\n")
        found = answer(connection)
    assert found.count(b"HTTP/1.1 200") == 2
    assert b'"text_completion"' in found


def test_connect_is_refused(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"CONNECT example.org:443 HTTP/1.1\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 400 ")


def test_http_1_0_keeps_a_connection_that_asks_for_it(server: Server) -> None:
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(b"GET /version HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            found = b""
            while not found.endswith(b"}"):  # head and body may come apart
                found += connection.recv(65536)
            assert found.startswith(b"HTTP/1.1 200")
            assert b"connection: keep-alive" in found.lower()
        connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert b"connection: close" in answer(connection).lower()


@pytest.mark.parametrize("asked", [b"", b"connection: keep-alive\r\n"])
def test_http_1_0_streams_without_chunks(server: Server, asked: bytes) -> None:
    """RFC 9112, 6.1: no transfer-encoding; the end of the connection ends the answer."""
    for path, body in (
        ("/v1/completions", b'{"prompt": "x", "max_tokens": 5, "stream": true}'),
        (
            "/v1/messages",
            b'{"model": "scripted", "max_tokens": 5, "stream": true, "messages": '
            b'[{"role": "user", "content": "x"}]}',
        ),
    ):
        with connect(server) as connection:
            connection.sendall(
                b"POST %s HTTP/1.0\r\n%scontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (path.encode(), asked, len(body), body)
            )
            head, _, events = answer(connection).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        lines = [line for line in events.split(b"\n") if line]
        assert all(line.startswith((b"data: ", b"event: ", b": ")) for line in lines), lines
        assert b"[DONE]" in events or b"message_stop" in events


# --- in this process, with little time and room


async def plain(scope: object, receive: object, send: Callable[[object], Awaitable[None]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def over(room: Room, talk: Callable[[int], Awaitable[None]], head_seconds: float) -> None:
    """Run `talk(port)` against a server of `plain`."""

    async def run() -> None:
        kind = functools.partial(Connection, room=room, head_seconds=head_seconds)
        config = uvicorn.Config(plain, http=kind, lifespan="off", log_config=None, ws="none")  # type: ignore[arg-type]
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            await server.startup([listener])
            await asyncio.wait_for(talk(listener.getsockname()[1]), 120)
            await server.shutdown([listener])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nx", b"HTTP/1.1 408 "),
        (b"GET / HTTP/1.1\r\n\r\nGET / HT", b"HTTP/1.1 200 OK"),
        (b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc", b"HTTP/1.1 200 OK"),
    ],
    ids=["nothing", "half a head", "half a second head", "half a body"],
)
def test_what_does_not_arrive_is_not_waited_for(sent: bytes, found: bytes) -> None:
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await writer.drain()
        assert (await reader.read()).startswith(found)
        writer.close()

    over(Room(-1), talk, 0.2)


def test_connections_beyond_the_descriptors_are_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    room = Room(0)
    room.limit = 3

    async def talk(port: int) -> None:
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            writer.close()
        reader, writer = open_ones[0]
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, writer in open_ones:
            writer.close()

    over(room, talk, 120)
    assert [r.levelname for r in caplog.records if "refused" in r.message] == ["WARNING"]


def test_the_limit_on_open_files_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        assert raise_descriptor_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("silent", [False, True])
def test_a_head_leaves_with_its_body_and_waits_for_no_later_one(silent: bool) -> None:
    writes: list[bytes] = []

    class Wire(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            writes.append(bytes(data))

        def close(self) -> None:
            writes.append(b"closed")

        def get_extra_info(self, name: str, default: object = None) -> object:
            return default

        def is_closing(self) -> bool:
            return b"closed" in writes

    async def app(scope: object, receive: object, send: Callable[[object], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if silent:
            await asyncio.sleep(0.05)
            assert len(writes) == 1
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await send({"type": "http.response.body", "body": b"second", "more_body": False})

    async def ask() -> None:
        config = uvicorn.Config(app, log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        connection = Connection(config=config, server_state=state, app_state={}, room=Room(100))
        connection.connection_made(Wire())
        connection.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        await asyncio.gather(*state.tasks)

    asyncio.run(ask())
    head = [b"first" not in write and b"HTTP/1.1 200" in write for write in writes]
    assert head == [silent, *[False] * (2 + silent)]
    assert [b"second" in write for write in writes].count(True) == 1
    assert writes[-1] == b"closed"
