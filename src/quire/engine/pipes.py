"""Frames over pipes between a process and the one that started it: a length, then bytes. Knows no message."""

from __future__ import annotations

import os
import struct

LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def write_frame(fd: int, data: bytes) -> None:
    """Raises BrokenPipeError if the reader has gone."""
    left = memoryview(framed(data))
    while left:
        left = left[os.write(fd, left) :]


def read_frame(fd: int) -> bytes | None:
    """The content of the next frame; None if the stream ends before or within it."""
    header = _read(fd, LENGTH.size)
    return None if header is None else _read(fd, LENGTH.unpack(header)[0])


def leave_with_parent(fd: int) -> None:
    """Exit, even in the middle of a step, when the other end of the pipe closes. Runs on a thread of its own."""
    while os.read(fd, 4096):
        pass
    os._exit(0)


def _read(fd: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)
