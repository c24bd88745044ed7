"""`quire ps`: lists this user's servers with what they hold and do."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from quire.cli import Command
from quire.config import option
from quire.meter import in_bytes
from quire.serve.records import Record, read_records

SECONDS = 2.0  # that a server has to answer


@dataclass(frozen=True, slots=True, kw_only=True)
class PsOptions:
    """Options of `quire ps`."""

    json: bool = option(False, "Print JSON instead of a table.")


def run(options: PsOptions) -> None:
    found = [describe(record) for record in read_records()]
    if options.json:
        print(json.dumps(found, indent=1))
        return
    if not found:
        print("no server of this user runs here")
        return
    table = Table("model", "address", "pid", "memory", "running", "waiting", "for")
    for row in found:
        requests = ["no answer" if row[name] is None else str(row[name]) for name in ("running", "waiting")]
        memory = "" if row["memory_bytes"] is None else in_bytes(row["memory_bytes"])
        address, length = row["address"], _duration(row["uptime_seconds"])
        table.add_row(", ".join(row["models"]), address, str(row["pid"]), memory, *requests, length)
    Console().print(table)


def describe(record: Record) -> dict[str, Any]:
    """Say what a server holds and does; what it does not tell is None."""
    metrics = _metrics(record.url)
    counts = {
        name: _metric(metrics, f"{record.metrics_prefix}:num_requests_{name}")
        for name in ("running", "waiting")
    }
    return {
        "models": record.names,
        "address": record.url,
        "pid": record.pid,
        "memory_bytes": _memory(record.pid),
        **counts,
        "uptime_seconds": round(time.time() - record.since, 1),
    }


class _Unix(http.client.HTTPConnection):
    """A connection to the socket file `path`."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(SECONDS)
        self.sock.connect(self._path)


def _metrics(url: str) -> str:
    """Fetch a server's metrics, which need no key; "" if it does not answer."""
    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    if url.startswith("unix:"):
        connection = _Unix(url.removeprefix("unix:"))
    elif parts.scheme == "https":  # whose certificate names another host
        unverified = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(
            str(parts.hostname), parts.port, timeout=SECONDS, context=unverified
        )
    else:
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=SECONDS)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.read().decode("utf-8", "replace") if answer.status == 200 else ""
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def _metric(text: str, name: str) -> int | None:
    """Read a gauge in the text of metrics."""
    for line in text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            return int(float(line.rpartition(" ")[2]))
    return None


def _memory(pid: int) -> int | None:
    """Add up the memory of a process and its children; pages that they share count once."""
    try:
        total = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return None
    inner = [_memory(int(child)) or 0 for found in children for child in found]
    return (int(total[1]) * 1024 if total else 0) + sum(inner)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    named = ((days, "d"), (hours, "h"), (minutes, "min"), (rest, "s"))
    return " ".join([f"{n} {unit}" for n, unit in named if n][:2]) or "0 s"


COMMAND = Command(run, PsOptions, uses=frozenset())
