"""Connections between ranks: who knows the secret gets in, and nobody else, whatever they send."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from quire.devices.exchanges import make_exchange, peers_over
from quire.engine.wire import LENGTH
from quire.errors import ConfigError, EngineError
from quire.ranks import connections as links
from quire.ranks.connections import MAGIC, Hello, Links, NoEngineError, connect, own_host
from quire.ranks.residual import HostStage

SECRET = b"known to all"


@pytest.fixture
def server() -> Iterator[Links]:
    made = Links("127.0.0.1", 0, SECRET)
    yield made
    made.close()


def test_ranks_find_each_other_by_kind_and_number(server: Links) -> None:
    hello = Hello("stage", 3, ("10.0.0.7", 99), "the same")
    with connect(server.address, SECRET, hello, 60) as mine:
        found = server.take("stage", 3, 60)
        assert found is not None
        with found[0] as theirs:
            assert found[1] == hello
            mine.sendall(b"after the hello")
            assert theirs.recv(64) == b"after the hello"
    assert server.take("peer", 3, 0.05) is None


def test_without_the_secret_nobody_gets_in(server: Links, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NoEngineError, match="--distributed-secret-file the same"):
        connect(server.address, b"guessed", Hello("control", 1), 0)
    assert server.take("control", 1, 0.05) is None
    assert "does not know the secret" in caplog.text


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), bytes(4096)])
def test_what_strangers_send_does_no_harm(server: Links, sent: bytes) -> None:
    with socket.create_connection(server.address) as stranger:
        stranger.settimeout(60)
        assert stranger.recv(len(MAGIC)) == MAGIC
        with suppress(OSError):  # the other side may have ended it
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    connect(server.address, SECRET, Hello("control", 1), 60).close()
    found = server.take("control", 1, 60)
    assert found is not None
    found[0].close()


@pytest.mark.parametrize(
    "frame",
    [LENGTH.pack(1 << 30), LENGTH.pack(3) + b"\xff\xff\xff", LENGTH.pack(6) + msgspec.msgpack.encode(["x"])],
)
def test_hellos_are_bounded_and_checked(server: Links, frame: bytes) -> None:
    with socket.create_connection(server.address, timeout=60) as rank:
        links._prove_to(rank, SECRET, time.monotonic() + 60)
        rank.sendall(frame)
        rank.shutdown(socket.SHUT_WR)
        assert rank.recv(1) == b""


def test_strangers_who_fill_the_room_keep_no_rank_out(
    server: Links, caplog: pytest.LogCaptureFixture
) -> None:
    strangers = [socket.create_connection(server.address, timeout=60) for _ in range(2 * links.MOST_UNKNOWN)]
    try:
        for stranger in strangers:
            with suppress(OSError):
                stranger.sendall(b"x")
        connect(server.address, SECRET, Hello("control", 1), 60).close()
        found = server.take("control", 1, 60)
        assert found is not None
        found[0].close()
    finally:
        for stranger in strangers:
            stranger.close()
    refusals = [record for record in caplog.records if "were refused" in record.message]
    assert len(refusals) <= 2


def test_a_byte_now_and_then_is_no_proof(server: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is the whole proof's, not each byte's."""
    monkeypatch.setattr(links, "SLOW", 0.3)
    with socket.create_connection(server.address, timeout=60) as stranger:
        assert stranger.recv(len(MAGIC) + links.NONCE)
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.05):
                with suppress(OSError):
                    stranger.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        finally:
            ended.set()
            thread.join()


def test_the_door_stays_open_when_descriptors_are_short(
    server: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")] * 3

    def short(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", short)
    for number in (1, 2):
        connect(server.address, SECRET, Hello("control", number), 60).close()
        found = server.take("control", number, 60)
        assert found is not None
        found[0].close()
    assert not failures


def test_an_engine_must_know_the_secret_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pose() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(MAGIC + bytes(links.NONCE))
                connection.recv(4096)
                connection.sendall(bytes(links.PROOF))

        threading.Thread(target=pose, daemon=True).start()
        with pytest.raises(EngineError, match="does not know the secret of this machine"):
            connect(listener.getsockname(), SECRET, Hello("control", 1), 60)


def test_where_nobody_listens_there_is_no_engine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(NoEngineError, match="no engine answers at 127"):
        connect(address, SECRET, Hello("control", 1), 0)
    with pytest.raises(ConfigError, match="--master-addr"):
        Links("203.0.113.1", 0, SECRET)
    assert own_host("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("kind", ["tcp", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_add_in_the_order_of_ranks(kind: str, size: int) -> None:
    if kind == "gloo":
        pytest.importorskip("torch.distributed", reason="gloo comes with PyTorch")
    pairs = {(a, b): pair_of_sockets() for a in range(size) for b in range(a + 1, size)}
    rng = np.random.default_rng(1)
    sizes = (1, 1000, (1 << 18) + 7)
    parts = [[rng.standard_normal(n).astype(np.float32) for n in sizes] for _ in range(size)]
    wanted = [[part.copy() for part in parts[0]]]
    for other in parts[1:]:
        for total, part in zip(wanted[0], other, strict=True):
            total += part

    def run(rank: int) -> None:
        exchange = make_exchange(kind, rank, size, 120)  # type: ignore[arg-type]
        own = {b: pair[0] for (a, b), pair in pairs.items() if a == rank}
        own |= {a: pair[1] for (a, b), pair in pairs.items() if b == rank}
        exchange.connect(own, 120)
        peers = peers_over(exchange, rank, size)
        for part in parts[rank]:
            peers.all_reduce(part)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pair in pairs.values():
        for end in pair:
            end.close()
    for found in parts:
        assert [part.tobytes() for part in found] == [part.tobytes() for part in wanted[0]]


def pair_of_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        return first, listener.accept()[0]


def test_a_rank_that_is_gone_or_silent_ends_an_exchange() -> None:
    mine, theirs = pair_of_sockets()
    exchange = make_exchange("tcp", 0, 2, 0.3)
    exchange.connect({1: mine}, 60)
    peers = peers_over(exchange, 0, 2)
    x = np.zeros(4, np.float32)
    with pytest.raises(RuntimeError, match="rank 1 has not answered"):
        peers.all_reduce(x)
    theirs.close()
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        peers.all_reduce(x)
    peers.abort(1)
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        peers.all_reduce(x)
    mine.close()


def test_hidden_states_pass_whole_or_not_at_all() -> None:
    mine, theirs = pair_of_sockets()
    before, stage = (HostStage(receives, width=3, max_tokens=4) for receives in (False, True))
    before.connect({1: mine}, 60)
    stage.connect({0: theirs}, 60)
    hidden = np.arange(12, dtype=np.float32).reshape(4, 3)
    before.send(hidden)
    before.send(hidden[:1])
    assert stage.receive(4).tolist() == hidden.tolist()
    assert stage.receive(1).tolist() == hidden[:1].tolist()
    before.send(np.zeros((5, 3), np.float32))  # more than a step has
    with pytest.raises(RuntimeError, match="the previous stage has ended"):
        stage.receive(5)
    mine.close()
