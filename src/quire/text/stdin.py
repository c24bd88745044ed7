"""Reads text from standard input: UTF-8, or an error that says where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from quire.errors import RequestError


def read_text(stream: BinaryIO) -> str:
    """Read all of the stream. RequestError if it is not UTF-8."""
    return _decode(stream.read())


def read_lines(stream: BinaryIO) -> Iterator[str]:
    """Yield the lines of the stream as they come. RequestError at the first that is not UTF-8."""
    for line in stream:
        yield _decode(line)


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8: byte 0x{data[error.start]:02x} at position {error.start}"
        ) from error
