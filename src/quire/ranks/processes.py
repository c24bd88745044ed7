"""The other ranks as the engine sees them: their processes, their connections, and the reports of their exits."""

from __future__ import annotations

import logging
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Protocol

import msgspec

from quire.config import EngineConfig
from quire.engine.wire import read_frame, write_frame
from quire.errors import EngineError
from quire.ranks.commands import MOST_REPORT, RankAnswer, RankFailed, RankReady, decode_report
from quire.ranks.connections import Address, Hello

log = logging.getLogger("quire.engine")

LAST_LINES = 12
"""The error about a rank's end shows the last LAST_LINES lines of its log."""
RANK_MODULE = "quire.ranks.worker"
BEAT = 0.4
"""A rank gives a sign of life every BEAT seconds."""
SILENCE = 2.0
"""A rank counts as hung after SILENCE seconds without a sign of life."""
COMPILING = 60.0
"""COMPILING seconds are enough where ranks compile kernels in their own process."""
NO_ENGINE = 3
"""A rank that found no engine exits with status NO_ENGINE."""
FAREWELL = 0.5
"""A rank's process ends within FAREWELL seconds of its connection."""


class RankJoin(msgspec.Struct, frozen=True, array_like=True):
    """How a process becomes a rank: read from its standard input.

    The engine is at `address`. `memory` is the file that the ranks of the stage share; None: they exchange messages.
    """

    config: EngineConfig
    rank: int
    address: Address
    secret: bytes
    memory: int | None


decode_join = msgspec.msgpack.Decoder(RankJoin).decode


class RankProcess:
    """A process that was started here to be a rank, and the last lines of its log."""

    def __init__(self, join: RankJoin, on_end: Callable[[], None]) -> None:
        self.rank = join.rank
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", RANK_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=() if join.memory is None else (join.memory,),
        )
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: `obituary` says why
            write_frame(self._process.stdin.fileno(), msgspec.msgpack.encode(join))
        self._reader = threading.Thread(target=self._read_log, name=f"quire-rank-{self.rank}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, args=(on_end,), daemon=True).start()

    @property
    def status(self) -> int | None:
        """Return the process's exit status; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def obituary(self) -> str:
        """Report the process's exit, with its last log lines. If only its connection ended, it is killed."""
        try:
            code = self._process.wait(FAREWELL)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join(FAREWELL)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        lines = "".join(f"\n  {line}" for line in self._lines)
        return f"{how}{'; its last lines:' if lines else ''}{lines}"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _read_log(self) -> None:
        stderr: IO[bytes] | None = self._process.stderr
        assert stderr is not None
        with stderr:
            for line in stderr:
                self._lines.append(line.decode(errors="replace").rstrip())
                sys.stderr.write(f"rank {self.rank}: {self._lines[-1]}\n")

    def _watch(self, on_end: Callable[[], None]) -> None:
        self._process.wait()
        on_end()


class RankHost(Protocol):
    """Runs a rank that this engine started."""

    def kill(self) -> None:
        """Kill the rank without waiting."""

    def obituary(self) -> str:
        """Wait for the rank's end and report it."""

    def stop(self) -> None:
        """End the rank, and release all that it holds."""


class Member:
    """One of the other ranks, here or elsewhere. `process` is there if this engine started it."""

    def __init__(self, rank: int, on_end: Callable[[int], None], silence: float = SILENCE) -> None:
        self.rank, self.host = rank, ""
        self._silence = silence
        self.process: RankHost | None = None
        self.address: Address = ("", 0)
        self.ended, self._answered = threading.Event(), threading.Event()
        self._connection: socket.socket | None = None
        self._on_end = on_end
        self._sending = threading.Lock()
        self._answers: queue.SimpleQueue[RankAnswer | None] = queue.SimpleQueue()
        self._heard = 0.0
        self._ready = self._silent = self._asked = False
        self._said = ""
        self._listener: threading.Thread | None = None

    def join(self, connection: socket.socket, hello: Hello) -> None:
        """Mark the rank as connected."""
        self._connection, self.address, self.host = connection, hello.address, connection.getpeername()[0]
        self._listener = threading.Thread(target=self._listen, name=f"quire-member-{self.rank}", daemon=True)
        self._listener.start()

    def send(self, frame: bytes) -> None:
        """Send a frame. EngineError: the rank has ended."""
        connection = self._connection
        if connection is None:
            raise EngineError(self.obituary())
        try:
            with self._sending:
                write_frame(connection.fileno(), frame)
        except OSError:
            raise EngineError(self.obituary()) from None

    def wait_ready(self) -> bool:
        """Wait until the rank has loaded its share; False if it has ended."""
        self._answered.wait()
        return not self.ended.is_set()

    def ask(self, frame: bytes) -> None:
        """Send a command that the rank answers. It may read files for long, so until then it never counts as silent."""
        self._asked = True
        self.send(frame)

    def answer(self) -> RankAnswer:
        """Wait for the rank's answer. EngineError: it has ended."""
        found = self._answers.get()
        self._heard, self._asked = time.monotonic(), False
        if found is None:
            self._answers.put(None)
            raise EngineError(self.obituary())
        return found

    def end(self) -> None:
        """Mark the rank as ended."""
        if not self.ended.is_set():
            self.ended.set()
            self._answered.set()
            self._answers.put(None)
            self._on_end(self.rank)

    def check(self, now: float) -> None:
        """Stop the rank if it has been silent for too long."""
        if self._ready and not (self._asked or self.ended.is_set()) and now - self._heard > self._silence:
            self._silent = True
            self.stop()

    def excuse(self, seconds: float) -> None:
        """Do not count the last seconds as silence."""
        self._heard += seconds

    def obituary(self) -> str:
        """Report the rank's exit, by its own words if it had any."""
        if self._listener is not None:
            self._listener.join(FAREWELL)
        where = f" at {self.host}" if self.host and self.process is None else ""
        if self._silent:
            return f"rank {self.rank}{where} gave no sign of life for {self._silence:.0f} s and was stopped"
        if self.process is not None and not self._said:
            return f"rank {self.rank} {self.process.obituary()}"
        return f"rank {self.rank}{where} {self._said or 'closed its connection'}"

    def stop(self) -> None:
        """End the rank's process, or the connection with which it ends."""
        if self.process is not None:
            self.process.kill()
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stop()
        if self.process is not None:
            self.process.stop()
        if self._connection is not None:
            with self._sending:
                self._connection.close()

    def _listen(self) -> None:
        """Read the rank's reports until it ends."""
        assert self._connection is not None
        fd = self._connection.fileno()
        try:
            while (frame := read_frame(fd, MOST_REPORT)) is not None:
                self._heard = time.monotonic()
                report = decode_report(frame)
                if isinstance(report, RankReady):
                    self._ready = True
                    self._answered.set()
                elif isinstance(report, RankAnswer):
                    self._answers.put(report)
                elif isinstance(report, RankFailed):
                    self._said = f"failed: {report.error}"
        except msgspec.MsgspecError as error:
            self._said = f"sent what cannot be read: {error}"
        except OSError:  # as if it had closed its connection
            log.info("rank %d", self.rank, exc_info=True)
        self.end()


def watch(members: Sequence[Member], stopped: threading.Event) -> None:
    """Look for silent members until `stopped`. Time in which this process itself did not run does not count."""
    last = time.monotonic()
    while not stopped.wait(BEAT):
        now = time.monotonic()
        late = now - last - BEAT
        for member in members:
            if late > BEAT:
                member.excuse(late)
            member.check(now)
        last = now
