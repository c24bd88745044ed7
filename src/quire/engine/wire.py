"""Frames between processes: a length, then bytes. Over pipes, and over the socket of the API and the engine process.

A frame goes straight from the thread that writes it to the thread that reads it. A thread in between would have to be
scheduled too, and that takes milliseconds while all cores are busy. Knows no message.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from contextlib import suppress

from quire.errors import EngineError

LENGTH = struct.Struct("<I")
BUFFER_BYTES = 1 << 20  # asked of the system, which may give less
READ_BYTES = 1 << 18


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def write_frame(fd: int, data: bytes) -> None:
    """Write a frame. Raises BrokenPipeError or ConnectionError if the reader has gone."""
    left = memoryview(framed(data))
    while left:
        left = left[os.write(fd, left) :]


def read_frame(fd: int, most: int | None = None) -> bytes | None:
    """Read the next frame; None if the stream ends before its end, or it has over `most` bytes."""
    header = _read(fd, LENGTH.size)
    if header is None:
        return None
    (size,) = LENGTH.unpack(header)
    return None if most is not None and size > most else _read(fd, size)


def leave_with_parent(fd: int) -> None:
    """Exit, even in the middle of a step, when the other end of the pipe closes. Runs on a thread of its own."""
    while os.read(fd, 4096):
        pass
    os._exit(0)


def _read(fd: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


class ChannelClosedError(EngineError):
    """The process at the other end has gone."""

    def __init__(self) -> None:
        super().__init__("the other process has closed the channel")


def open_pair() -> tuple[socket.socket, socket.socket]:
    """Open both ends of a new channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        end.setblocking(False)
    return ends


class FrameReader:
    """Puts frames together from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def take(self, data: bytes) -> list[bytes]:
        """Take `data`; return the frames that it completes."""
        rest = self._rest
        whole: bytes | bytearray = data
        if rest:
            rest += data
            whole = rest
        found, at, size = list[bytes](), 0, len(whole)
        while size - at >= LENGTH.size:
            begin = at + LENGTH.size
            end = begin + LENGTH.unpack_from(whole, at)[0]
            if end > size:
                break
            found.append(bytes(whole[begin:end]))
            at = end
        if whole is rest:
            del rest[:at]
        else:
            rest += data[at:]
        return found


class Channel:
    """One end, for a process without an event loop. What the other side does not take yet is kept."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._socket.set_inheritable(False)
        self._frames = FrameReader()
        self._unsent: deque[memoryview] = deque()

    def send(self, frame: bytes) -> None:
        """Send a frame without waiting. Raises ChannelClosedError."""
        self._unsent.append(memoryview(framed(frame)))
        self._flush()

    def receive(self) -> list[bytes]:
        """Return the frames that have arrived. Raises ChannelClosedError."""
        if self._unsent:
            self._flush()
        found: list[bytes] = []
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return found
            except ConnectionError:
                data = b""
            if not data:
                raise ChannelClosedError
            found += self._frames.take(data)
            if len(data) < READ_BYTES:
                return found

    def wait(self, milliseconds: int | None) -> None:
        """Wait until there is something to receive, or to send that was kept."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poller.poll(milliseconds)

    def close(self, seconds: float = 0.0) -> None:
        """Close; the other side has `seconds` to read to the end and hang up.

        An end that closes first breaks what the other side writes meanwhile, and a broken side may stop reading.
        Raises TimeoutError if the other side does not take what was kept.
        """
        with self._socket, suppress(ConnectionError):  # it may have gone
            if seconds:
                self._socket.settimeout(seconds)
                for part in self._unsent:
                    self._socket.sendall(part)
                self._socket.shutdown(socket.SHUT_WR)
                with suppress(TimeoutError):  # it has been sent all, and may still read it
                    while self._socket.recv(READ_BYTES):
                        pass

    def _flush(self) -> None:
        unsent = self._unsent
        while unsent:
            try:
                count = self._socket.send(unsent[0])
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise ChannelClosedError from error
            if count < len(unsent[0]):
                unsent[0] = unsent[0][count:]
            else:
                unsent.popleft()
