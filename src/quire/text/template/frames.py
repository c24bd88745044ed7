"""Frames between a program and its template process: MessagePack behind a length."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from quire.sockets import receive_exactly, set_deadline

_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first request. `memory` bounds the bytes that the process may add; `seconds` bounds each request."""

    memory: int
    seconds: float


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Compile a template and keep it under `key`."""

    key: str
    source: str


class Render(msgspec.Struct, frozen=True, tag=True):
    """Render the template kept under `key`. `now` is the local time in ISO format."""

    key: str
    variables: dict[str, Any]
    now: str


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The rendered text, or `error`. `unknown`: no template has the key. `raised` names the
    exception that the template ended with. `begins` is where in the text the template last asked for
    add_generation_prompt.

    For a compiled template: whether it reads content as parts, and only as parts.
    """

    text: str = ""
    error: str | None = None
    unknown: bool = False
    raised: str = ""
    begins: int | None = None
    reads_parts: bool = False
    needs_parts: bool = False


Asked = Setup | Compile | Render
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def send(connection: socket.socket, message: Asked | Answer, deadline: float | None = None) -> None:
    """Send one frame. Raises TimeoutError past the deadline (of time.monotonic), OSError if nobody reads."""
    data = _encoder.encode(message)
    set_deadline(connection, deadline)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_request(connection: socket.socket) -> Asked:
    """Wait for the next request. Raises EOFError at the end."""
    return _requests.decode(_receive(connection, None))


def receive_answer(connection: socket.socket, deadline: float) -> Answer:
    """Wait for the answer. Raises TimeoutError past the deadline, EOFError or OSError if the process ended."""
    return _answers.decode(_receive(connection, deadline))


def _receive(connection: socket.socket, deadline: float | None) -> bytearray:
    (size,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, deadline))
    return receive_exactly(connection, size, deadline)
