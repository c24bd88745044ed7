"""The HTTP client of routers and benches: connections are kept, replaced and closed, and nothing is read ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from quire.serve.upstream import MOST_BUFFERED, Address, Lost, Upstream, message

GET = message(b"GET / HTTP/1.1\r\nhost: x\r\n")
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def over(talk: Talk, ask: Callable[[Upstream], Awaitable[None]], unix: Path | None = None) -> int:
    """Run `ask` against a server of `talk`, which is called with each request; returns the number of connections."""
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await talk(reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run() -> None:
        if unix is not None:
            server = await asyncio.start_unix_server(serve, unix)
            upstream = Upstream(Address("localhost", 80, unix=str(unix)))
        else:
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            upstream = Upstream(Address(*server.sockets[0].getsockname()[:2]))
        await asyncio.wait_for(ask(upstream), 120)
        upstream.close()
        server.close()
        await asyncio.sleep(0.05)

    asyncio.run(run())
    return count


@pytest.mark.parametrize("unix", [False, True])
def test_a_connection_is_used_again(unix: bool, tmp_path: Path) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n" + WHOLE)

    async def ask(upstream: Upstream) -> None:
        for _ in range(5):
            assert await upstream.whole(GET) == (200, b"abc")
        assert not upstream.live

    assert over(talk, ask, tmp_path / "socket" if unix else None) == 1


def test_one_that_the_server_has_closed_is_replaced_unless_it_had_begun_to_answer() -> None:
    answers = [WHOLE, b"", WHOLE, b"HTT"]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = answers.pop(0)
        writer.write(said)
        if said != WHOLE:
            writer.close()

    async def ask(upstream: Upstream) -> None:
        assert await upstream.whole(GET) == (200, b"abc")
        assert await upstream.whole(GET) == (200, b"abc")  # at the second try
        with pytest.raises(Lost, match="was closed") as lost:
            await upstream.whole(GET)
        assert lost.value.cause == "killed"

    assert over(talk, ask) == 2


@pytest.mark.parametrize(
    ("said", "body"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nabc", b"abc"),  # it ends with the connection
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabc", None),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", None),
        (b"SMTP 220\r\n\r\n", None),
        (b"", None),
    ],
)
def test_what_is_no_whole_answer_is_lost(said: bytes, body: bytes | None) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async def ask(upstream: Upstream) -> None:
        if body is None:
            with pytest.raises(Lost):
                await upstream.whole(GET)
        else:
            assert await upstream.whole(GET) == (200, body)

    assert over(talk, ask) == 1


def test_no_more_is_read_than_a_slow_reader_takes() -> None:
    size, sent = 64 * MOST_BUFFERED, 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(bytes(MOST_BUFFERED))
            sent += MOST_BUFFERED
            await writer.drain()

    async def ask(upstream: Upstream) -> None:
        async with upstream.asked(GET) as connection:
            while not connection.paused:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert sent < size
            assert len(await connection.rest()) == size

    over(talk, ask)


def test_leaving_early_ends_the_answer_and_a_sink_gets_it_at_once() -> None:
    gone = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await reader.read(1)  # until the client leaves
        gone.set()

    async def ask(upstream: Upstream) -> None:
        found: list[bytes] = []
        async with upstream.asked(GET, found.append) as connection:
            while not found:
                await asyncio.sleep(0.01)
            assert upstream.live == {connection}
        await gone.wait()
        assert (found, upstream.live) == ([b"abc"], set())

    over(talk, ask)


def test_nobody_listens() -> None:
    async def ask() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        with pytest.raises(Lost, match="no connection") as lost:
            await Upstream(Address("127.0.0.1", port)).whole(GET)
        assert lost.value.cause == "refused"

    asyncio.run(ask())
