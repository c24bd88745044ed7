"""Log lines as text or JSON, one line per record, with their fields. Knows no engine, no HTTP."""

from __future__ import annotations

import logging
import logging.config
import math
import re
import time
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_json = msgspec.json.Encoder()


def _given(record: logging.LogRecord, name: str) -> dict[str, object]:
    """Return the caller's `extra={name: {...}}`: further `fields`, or `parts`, the message for programs."""
    given = getattr(record, name, None)
    return given if isinstance(given, dict) else {}


# Characters that could end a line, or move a terminal's cursor, as texts of users may hold them.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    r"""Write control characters as `\n` or `\x1b`, so that no text forges a line of a log."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class TextFormatter(logging.Formatter):
    """`12:00:01.234 INFO quire.serve: message key=value ...`; lines of a traceback are indented."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {record.name}: {record.getMessage()}"
        line = escaped(line + "".join(f" {key}={value}" for key, value in _given(record, "fields").items()))
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n  {escaped(one)}" for one in trace)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, its parts, fields, the traceback as one string."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(_given(record, "parts") | _given(record, "fields"))
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return _json.encode(entry).decode()


class Tally:
    """Counts what may happen often, to be logged once in `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._count, self._next = seconds, 0, -math.inf

    def add(self) -> int:
        """Count one. Return how many there were since the last return, or 0 before it is time to log again."""
        self._count += 1
        now = time.monotonic()
        if now < self._next:
            return 0
        count, self._count, self._next = self._count, 0, now + self._seconds
        return count


def logs_are_json() -> bool:
    """Tell whether this process was set up to log JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def json_line(message: str) -> str:
    """Return a line for an error that ends the process."""
    return JsonFormatter().format(logging.LogRecord("quire", logging.ERROR, "", 0, message, None, None))


def set_up_logging(format: LogFormat, level: LogLevel) -> None:
    """Send all records of this process, libraries included, to standard error in `format`."""
    formatter = JsonFormatter if format == "json" else TextFormatter
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"()": formatter}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"handlers": ["stderr"], "level": "WARNING"},
            "loggers": {"quire": {"level": level.upper()}},
        }
    )
