"""FrameReader over a channel: whole, in order, to the last; nobody waits for a side that does not read."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.client.engine_process import EngineProcess
from quire.engine.ipc import Abort, EngineFailed, encode
from quire.engine.wire import Channel, ChannelClosedError, FrameReader, framed, open_pair, read_frame

FRAMES = st.lists(st.binary(max_size=40), max_size=8)


def pair() -> tuple[Channel, Channel]:
    ours, theirs = open_pair()
    return Channel(ours.detach()), Channel(theirs.detach())


def received(channel: Channel, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        channel.wait(10_000)
        found += channel.receive()
    return found


@given(FRAMES, st.data())
def test_frames_are_put_together_from_any_pieces(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(framed, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    reader = FrameReader()
    assert [frame for piece in pieces for frame in reader.take(piece)] == frames
    assert not reader.take(framed(b"x")[:-1])
    assert reader.take(b"x") == [b"x"]


def test_nobody_waits_for_a_side_that_does_not_read() -> None:
    one, other = pair()
    frames = [bytes([i]) * 300_000 for i in range(30)] + [b"last"]
    for frame in frames:
        one.send(frame)
    other.send(b"back")
    assert one.receive() == [b"back"]
    found: list[bytes] = []
    while len(found) < len(frames):
        assert one.receive() == []  # which sends on what was kept
        found += other.receive()
    assert found == frames
    assert other.receive() == []
    one.close()
    other.close()


def test_waiting_ends_with_a_frame_or_after_its_time() -> None:
    one, other = pair()
    other.wait(1)
    assert other.receive() == []
    later = threading.Timer(0.01, one.send, [b"x"])
    later.start()
    assert received(other, 1) == [b"x"]
    later.join()
    one.send(bytes(5_000_000))
    while not (found := other.receive()):
        one.wait(10_000)  # until it can send on
        assert one.receive() == []
    assert len(found[0]) == 5_000_000
    one.close()
    other.close()


def test_what_was_kept_can_be_sent_at_the_end() -> None:
    one, other = pair()
    one.send(bytes(3_000_000))
    one.send(b"last")
    reader = threading.Thread(target=one.close, args=(10.0,))
    reader.start()
    assert received(other, 2)[1] == b"last"
    other.wait(10_000)
    with pytest.raises(ChannelClosedError):
        other.receive()
    other.close()
    reader.join()


def test_a_side_that_does_not_hang_up_is_not_waited_for() -> None:
    one, other = pair()
    one.send(b"last")
    one.close(0.01)
    assert other.receive() == [b"last"]
    with pytest.raises(ChannelClosedError):
        other.receive()
    other.close()
    one, other = pair()
    one.send(bytes(3_000_000))
    with pytest.raises(TimeoutError):
        one.close(0.01)
    other.close()


def test_the_last_frame_reaches_a_client_that_still_writes() -> None:
    ours, theirs = open_pair()
    channel = Channel(theirs.detach())
    channel.send(encode(EngineFailed("EngineError", "the last frame")))
    closing = threading.Thread(target=channel.close, args=(10.0,))

    async def client() -> EngineFailed | None:
        process = await asyncio.create_subprocess_exec("true")
        loop = asyncio.get_running_loop()
        _, line = await loop.create_unix_connection(partial(EngineProcess, process), sock=ours)
        closing.start()
        poller = select.poll()
        poller.register(ours, select.POLLRDHUP)
        assert poller.poll(10_000)  # the engine sends no more, and the loop has read nothing yet
        for _ in range(10):
            line.send(Abort("a request"))
        await line.end()
        return None if line.events.empty() else line.events.get_nowait()

    found = asyncio.run(client())
    closing.join()
    assert found == EngineFailed("EngineError", "the last frame")


def test_a_side_that_has_gone_is_noticed() -> None:
    one, other = pair()
    other.close()
    with pytest.raises(ChannelClosedError):
        one.receive()
    with pytest.raises(ChannelClosedError):
        one.send(b"x")
    one.close()


def test_an_end_is_not_passed_on_to_other_processes() -> None:
    one, other = socket.socketpair()
    one.set_inheritable(True)
    channel = Channel(one.fileno())
    assert not os.get_inheritable(one.fileno())
    channel.send(b"x")
    assert read_frame(other.fileno()) == b"x"
    other.close()
    one.detach()
    channel.close()
