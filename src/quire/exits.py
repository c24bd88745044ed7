"""How a command ends that cannot go on: its status and the one line that says why; places that it could not write."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from quire.engine.log import json_line, logs_are_json
from quire.errors import ConfigError, QuireError, ResourceError
from quire.flags.arguments import rewritten

CLOSED_PIPE = 128 + signal.SIGPIPE  # the status that a shell shows for it


def report(error: QuireError | OSError | MemoryError, prog: str, args: Sequence[str]) -> int:
    """Print an error of the program `prog` as one line; return the exit status. Raises what is no message for a user.

    `args` say whether the line is JSON.
    """
    if isinstance(error, BrokenPipeError):
        _discard_output()
        return CLOSED_PIPE
    if isinstance(error, QuireError):
        _print(re.sub(r"\[Errno -?\d+\] ", "", str(error)), prog, args)
        return 2 if isinstance(error, ConfigError) and not isinstance(error, ResourceError) else 1
    message = _system_message(error)
    if message is None:
        raise error
    _discard_output()
    _print(message, prog, args)
    return 1


def check_place(option: str, path: Path, is_file: bool) -> None:
    """Raise ConfigError if a file or a directory cannot be written at `path`, which `option` names; tries it."""
    try:
        if is_file and path.exists():
            path.open("ab").close()
            return
        place = path.parent if is_file else path
        while not is_file and not place.exists() and place != place.parent:
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        flag = "--" + option.replace("_", "-")
        raise ConfigError(f"{flag} {path}: {error.strerror}: choose a place that can be written") from error


def _discard_output() -> None:
    """Let the interpreter's last flush of standard output go nowhere: writing to it has failed."""
    with suppress(OSError, ValueError):  # in a test it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _system_message(error: OSError | MemoryError) -> str | None:
    """Say what to change about the system if one of its limits was met; None for other errors."""
    if isinstance(error, MemoryError):
        return f"out of memory: {error or 'an allocation failed'}; see `quire plan`, and `ulimit -v`"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error}: raise the limit on open files (ulimit -n)"
    if error.errno == errno.ENOMEM:
        return f"{error}: see `quire plan`, and `ulimit -v`"
    if error.errno in (errno.ENOSPC, errno.EROFS, errno.EDQUOT):
        return f"{error}: choose a place that can be written"
    return None if error.filename is None else f"{error.filename}: {error.strerror}"


def _print(message: str, prog: str, args: Sequence[str]) -> None:
    """Print the error that ends the process: as JSON if the log is, or would have been."""
    words = " ".join(rewritten(args)).replace("=", " ")
    as_json = logs_are_json() or "--log-format json" in words
    print(json_line(message) if as_json else f"{prog}: error: {message}", file=sys.stderr)
