"""Frames over pipes and sockets between processes: a length, then bytes. Knows no message."""

from __future__ import annotations

import os
import struct

LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def write_frame(fd: int, data: bytes) -> None:
    """Raises BrokenPipeError or ConnectionError if the reader has gone."""
    left = memoryview(framed(data))
    while left:
        left = left[os.write(fd, left) :]


def read_frame(fd: int, most: int | None = None) -> bytes | None:
    """The content of the next frame; None if the stream ends before its end, or it has over `most` bytes."""
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
