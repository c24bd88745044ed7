"""One engine process as its client sees it: the channel to it, and the times of its start."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from quire.cgroups import memory_groups
from quire.client.signs import SignsOfLife
from quire.engine.ipc import Command, EngineFailed, Event, decode_event, encode
from quire.engine.wire import FrameReader, framed, open_pair
from quire.errors import EngineDiedError

log = logging.getLogger("quire.client")

LAST_SECONDS = 0.5  # to wait for the last events of an ended engine


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process that waits for its launch: this end of its channel, the number of its end, and its signs of life."""

    process: Process
    ours: socket.socket
    channel: int
    life: SignsOfLife

    async def end(self) -> None:
        """End it before its launch."""
        self.ours.close()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def spawn(patient: bool, *ahead: str) -> Spawned:
    """Start a process that imports the modules `ahead` and waits for its launch. `patient`: see SignsOfLife."""
    ours, theirs = open_pair()
    life = SignsOfLife(patient)
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "quire.engine.process",
                *ahead,
                stdin=PIPE,
                start_new_session=True,
                pass_fds=(theirs.fileno(), life.descriptor),
            )
        except BaseException:
            ours.close()
            raise
        life.pid = process.pid
        return Spawned(process, ours, theirs.fileno(), life)


class EngineProcess(asyncio.Protocol):
    """One engine process and the channel to it; a restart replaces both. Use from one event loop.

    Events wait in `events` until somebody listens.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.failure: EngineFailed | None = None
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._kills = _kills()
        self._ended = asyncio.Event()
        self._frames = FrameReader()
        self._receive: Callable[[Event], None] = self.events.put_nowait
        self._transport: asyncio.Transport | None = None

    def listen(self, receive: Callable[[Event], None]) -> None:
        """Order `receive` with each event from now on."""
        self._receive = receive
        while not self.events.empty():
            receive(self.events.get_nowait())

    def send(self, command: Command) -> None:
        """Send a command, unless the engine has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(encode(command)))

    @property
    def killed_by(self) -> str | None:
        """Name what ended the process: memory that ran out, a signal; or hung, as it was."""
        if self.failure is not None and self.failure.kind == "MemoryError":
            return "memory"
        if self.process.returncode != -signal.SIGKILL:
            return None
        if self.failure is not None:
            return "hung"
        return "memory" if _kills() > self._kills else "signal"

    @property
    def status(self) -> str:
        """Say how the process ended."""
        code = self.process.returncode
        if code is None:
            return "still running"
        if self.killed_by == "memory":
            return "killed by signal 9 because memory ran out; see `quire plan`"
        if code == -signal.SIGKILL:
            return "killed by signal 9, as Linux does if memory runs out"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    async def end(self) -> None:
        """Wait until the process has ended and its last event has come."""
        await self.process.wait()
        try:
            await asyncio.wait_for(self._ended.wait(), LAST_SECONDS)
        except asyncio.TimeoutError:
            log.warning("another process holds the channel of an engine that has ended")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.take(data):
            self._receive(decode_event(frame))

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set()


@dataclass(slots=True)
class Startup:
    """The seconds of the last start by phase; `total` is the time that passed."""

    phases: dict[str, float] = field(default_factory=dict)
    total: float = 0.0


def startup_of(began: float, loading: float, phases: dict[str, float], now: float) -> Startup:
    """Collect all phases from the call until now; unattributed time becomes "other", so that they add up."""
    parts = {"starting the engine process": loading - began, **phases}
    parts["other"] = (now - began) - sum(parts.values())
    return Startup(parts, now - began)


def _kills() -> int:
    """Count the processes of this one's control group that memory has killed."""
    groups = memory_groups()
    return groups[0].kills if groups else 0


def died(why: str) -> EngineDiedError:
    """Make the error of requests that were in an engine when it ended."""
    return EngineDiedError(f"the engine failed while this request ran ({why}): send it again")
