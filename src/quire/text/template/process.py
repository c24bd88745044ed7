"""Has templates compiled and rendered in a process of their own, within a time and a memory limit.

Whatever a template does to that process, it ends in an error for its own request. The process is started ahead of
time and replaced when it is lost.
"""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import threading
import time
import weakref
from datetime import datetime
from typing import Any

from quire.errors import EngineError, ModelError, RequestError
from quire.text.template.frames import Answer, Asked, Compile, Render, Setup, receive_answer, send

MEMORY_MIB = 256
SECONDS = 5.0
# START_SECONDS is the time a process may take to start.
START_SECONDS = 60.0


class TemplateProcess:
    """Renders one template at a time; threads may share it. The limits hold for each request alone."""

    def __init__(self, seconds: float = SECONDS, memory_mib: int = MEMORY_MIB) -> None:
        self._setup = Setup(memory_mib << 20, seconds)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._end: weakref.finalize[..., TemplateProcess] | None = None
        self._starting = False
        self._start()

    def compile(self, name: str, source: str) -> Answer:
        """Compile a template; tells how it reads content. Raises ModelError if it is invalid or too costly."""
        with self._lock:
            answer = self._ask(Compile(_key(source), source))
        if answer.error is not None:
            raise ModelError(f"chat template {name!r}: {answer.error}")
        return answer

    def render(self, source: str, variables: dict[str, Any], now: datetime) -> Answer:
        """Render a template that compiles. `error` of the answer is set if it fails or goes past a limit."""
        key = _key(source)
        with self._lock:
            answer = self._ask(Render(key, variables, now.isoformat()))
            if answer.unknown:
                compiled = self._ask(Compile(key, source))
                answer = compiled if compiled.error else self._ask(Render(key, variables, now.isoformat()))
        return answer

    def close(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end()
        self._connection = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "quire.text.template.worker"]
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = ours
        self._end = weakref.finalize(self, _end, process, ours)
        self._starting = True
        send(ours, self._setup)

    def _wait_for_start(self, connection: socket.socket) -> None:
        try:
            receive_answer(connection, time.monotonic() + START_SECONDS)
        except (EOFError, OSError) as error:
            self.close()
            raise EngineError("the process that renders chat templates does not start") from error
        self._starting = False

    def _ask(self, request: Asked) -> Answer:
        if self._connection is None:
            self._start()
        assert self._connection is not None
        if self._starting:
            self._wait_for_start(self._connection)
        deadline = time.monotonic() + self._setup.seconds
        try:
            send(self._connection, request, deadline)
            return receive_answer(self._connection, deadline)
        except TimeoutError:
            why = f"takes more than {self._setup.seconds:g} seconds"
        except (EOFError, OSError):
            why = f"needs more than {self._setup.memory >> 20} MiB of memory, or crashes"
        except BaseException:
            self.close()  # the next answer would belong to this request
            raise
        self.close()
        self._start()
        return Answer(error=why)


def _key(source: str) -> str:
    return hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


def refusal(answer: Answer) -> RequestError:
    """Make the error of a render, as a client sees it."""
    return RequestError(f"the chat template {answer.error}", "messages")
