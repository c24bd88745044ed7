"""Reading a model's files, which are untrusted: only regular files are opened, and none is read beyond a limit.

And writing files that are whole or not there.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from quire.errors import ModelError

MAX_JSON = 16 << 20  # bytes of a config file


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises ModelError for what cannot be read and for pipes, devices and directories."""
    try:
        # Without O_NONBLOCK the open of a pipe waits until somebody writes to it.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except (OSError, ValueError) as error:  # a name with a zero byte or a surrogate is a ValueError
        raise ModelError(f"{path!s:.300}: cannot be read: {_reason(error)}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ModelError(
            f"{path}: cannot be read: not a regular file; replace it with a copy of the file itself"
        )
    return file


def read_bytes(path: Path, most: int) -> bytes:
    """A file of at most `most` bytes. Raises ModelError."""
    with open_regular(path) as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {_reason(error)}") from error
    if len(data) > most:
        raise ModelError(f"{path}: larger than {most} bytes, the most that is read of such a file")
    return data


def read_text(path: Path, most: int) -> str:
    """A file of at most `most` bytes as UTF-8 text. Raises ModelError."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8: {error}") from error


def read_json(path: Path, of: type = dict, most: int = MAX_JSON) -> Any:
    """A JSON object (or another type, `of`) from a file of at most `most` bytes. Raises ModelError, naming the file."""
    data = read_bytes(path, most)
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, of):
        raise ModelError(f"{path}: not a JSON {'object' if of is dict else of.__name__}")
    return value


class replaced:
    """A context with a path to write to, which takes the place of `path` once it is whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._new = path, path.with_name(f".{path.name}.new")

    def __enter__(self) -> Path:
        return self._new

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            os.replace(self._new, self._path)
        else:
            self._new.unlink(missing_ok=True)


def map_file(path: Path, least: int = 1) -> tuple[mmap.mmap, int]:
    """A file of at least `least` bytes, mapped for reading, and its size. Raises ModelError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < max(least, 1):
            raise ModelError(f"{path}: {size} bytes are too few for such a file; fetch it again")
        try:
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), size
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be mapped: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def unnamed_file(size: int) -> int:
    """Make a file without a name: nothing is left of it when its processes have ended, however they end."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("quire")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd
