"""A server of its own as the backend of programs."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any, TypeVar

from quire.errors import EngineError
from quire.program.language.endpoint import RuntimeEndpoint

HOST = "127.0.0.1"
POLL = 0.05  # seconds between looks whether the server is up
# NAMES maps SGLang's names of options to `quire serve`'s, where they differ.
NAMES = {
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "mem_fraction_static": "gpu_memory_utilization",
    "tokenizer_path": "tokenizer",
    "tp_size": "tensor_parallel_size",
}

R = TypeVar("R", bound="Runtime")


class Runtime(RuntimeEndpoint):
    """`quire serve MODEL` in a process, until `shutdown` or the end of this process.

    `options` are `quire serve`'s with underscores; SGLang's names of them work too. EngineError: the server
    does not start; its own messages are on standard error.
    """

    def __init__(self, model_path: str = "", *, launch_timeout: float = 300.0, **options: Any) -> None:
        port = options.pop("port", None) or free_port()
        command = self._command(model_path, options)
        self._process = subprocess.Popen([*command, "--host", HOST, "--port", str(port)])
        self._end = weakref.finalize(self, _stop, self._process)
        self.url = f"http://{HOST}:{port}"
        super().__init__(self.url, options.get("api_key"))
        self._wait(port, launch_timeout)

    def _command(self, model_path: str, options: Mapping[str, Any]) -> list[str]:
        """Make the command that serves a model, without host and port."""
        words = [model_path] if model_path else []
        for name, value in options.items():
            words += arguments(NAMES.get(name, name), value)
        return [sys.executable, "-c", "from quire.cli import main; main()", "serve", *words]

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the server."""
        self._end()

    def _wait(self, port: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not _is_up(port):
            code = self._process.poll()
            if code is not None or time.monotonic() > until:
                self.shutdown()
                why = f"did not start in {seconds:g} s" if code is None else f"ended with status {code}"
                raise EngineError(f"the server {why}: see its messages above")
            time.sleep(POLL)


def arguments(name: str, value: Any) -> list[str]:
    """Write an option of Python as words of a command line."""
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]


def _is_up(port: int) -> bool:
    with closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection:
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False


def free_port() -> int:
    """Find a port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
