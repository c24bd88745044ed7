"""Turns panics of the tokenizers library into errors: Rust's panic is a BaseException, which would end the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def panics_as(make: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `make(message)` for a panic inside. Its class is found by name: no module exports it."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise make(str(error)) from error
