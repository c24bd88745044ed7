"""One engine process as its client sees it: the socket to it, and the times of its start."""

from __future__ import annotations

import signal
from asyncio.subprocess import Process
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from quire.engine.ipc import Endpoint, Failed


@dataclass(slots=True)
class Line:
    """One engine process and the socket to it; a restart replaces both."""

    endpoint: Endpoint
    socket: zmq.asyncio.Socket
    process: Process
    failure: Failed | None = None

    def close(self) -> None:
        self.socket.close(linger=0)
        self.endpoint.close()


@dataclass(slots=True)
class Startup:
    """The last start in seconds by phase; `total` is the time that passed."""

    phases: dict[str, float] = field(default_factory=dict)
    total: float = 0.0


def startup_of(began: float, loading: float, phases: dict[str, float], now: float) -> Startup:
    """All phases from the call until now; unattributed time becomes "other", so that they add up."""
    parts = {"starting the engine process": loading - began, **phases}
    parts["other"] = (now - began) - sum(parts.values())
    return Startup(parts, now - began)


def status_of(process: Process) -> str:
    code = process.returncode
    if code is None:
        return "still running"
    if code == -signal.SIGKILL:
        return "killed by signal 9, as Linux does if memory runs out"
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
