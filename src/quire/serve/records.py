"""Records of this user's servers: each writes one while it runs, and `quire ps` reads them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from quire.errors import ModelError
from quire.files import read_bytes

log = logging.getLogger("quire.serve")
MAX_BYTES = 1 << 20


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A server: its model's names, its address, its process and since when it runs. `began` tells processes apart."""

    names: tuple[str, ...]
    url: str
    metrics_prefix: str
    host: str
    pid: int
    began: int | None
    since: float


@contextmanager
def recorded(names: Sequence[str], url: str, metrics_prefix: str) -> Iterator[None]:
    """Keep a record of this process while the block runs. A place that cannot be written costs the record alone."""
    pid, host = os.getpid(), socket.gethostname()
    if url.startswith("unix:"):
        url = f"unix:{os.path.abspath(url.removeprefix('unix:'))}"
    record = Record(
        names=tuple(names),
        url=url,
        metrics_prefix=metrics_prefix,
        host=host,
        pid=pid,
        began=process_start(pid),
        since=time.time(),
    )
    path = folder() / f"{host}-{pid}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(record))
    except OSError as error:
        log.info("quire ps will not list this server: %s: %s", path, error.strerror)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def folder() -> Path:
    """Name the directory of the records, $XDG_RUNTIME_DIR/quire or what stands for it."""
    given, usual = os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"
    if os.path.isabs(given):
        return Path(given, "quire")
    return (
        Path(usual, "quire") if os.path.isdir(usual) else Path(os.path.expanduser("~/.cache/quire/servers"))
    )


def read_records() -> list[Record]:
    """Read the records of servers that run on this machine; remove those whose process has ended."""
    found = []
    for path in sorted(folder().glob("*.json")):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            record = msgspec.json.decode(read_bytes(path, MAX_BYTES), type=Record)
        except (OSError, ModelError, msgspec.MsgspecError) as error:
            log.warning("%s is no record of a server: %s", path, error)
            continue
        if record.host != socket.gethostname():
            continue  # of another machine or container that shares this directory
        if _runs(record):
            found.append(record)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda record: record.since)


def _runs(record: Record) -> bool:
    try:
        os.kill(record.pid, 0)
    except (OSError, OverflowError):
        return False
    return process_start(record.pid) == record.began


def process_start(pid: int) -> int | None:
    """Read when a process started, in ticks since the boot; None if the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
