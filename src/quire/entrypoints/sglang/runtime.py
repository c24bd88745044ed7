"""`Runtime`: a server in a child process, as the backend of programs and over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import closing
from typing import Any

from quire.config import ModelConfig
from quire.engine.source import model_directory
from quire.entrypoints.sglang.launch_server import DEFAULTS
from quire.errors import EngineError
from quire.program.language import RuntimeEndpoint
from quire.text.tokenizer import Tokenizer

MODULE = "quire.entrypoints.sglang.launch_server"
POLL_SECONDS = 0.05
LAST_PORT = 65535


class Runtime(RuntimeEndpoint):
    """A server with SGLang's options, ready for use; `shutdown`, or the end of the program, ends it.

    The server listens on the first free port from `port` on. Raises EngineError if it does not start within
    `launch_timeout` seconds; its own error is on standard error.
    """

    def __init__(self, *, log_level: str = "error", launch_timeout: float = 300.0, **options: Any) -> None:
        host = str(options.pop("host", DEFAULTS["host"]))
        port = _free_port(host, int(options.pop("port", DEFAULTS["port"])))
        self.url = f"http://{host}:{port}"
        self.generate_url = f"{self.url}/generate"
        self._tokenizer = str(options.get("tokenizer_path") or options.get("model_path") or "")
        flags = as_flags({"host": host, "port": port, "log_level": log_level, **options})
        self._process = subprocess.Popen([sys.executable, "-m", MODULE, *flags])
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process)
        super().__init__(self.url, options.get("api_key"))
        try:
            self._wait(launch_timeout)
        except BaseException:
            self.shutdown()
            raise

    @property
    def endpoint(self) -> RuntimeEndpoint:
        """The backend of programs, which is this object."""
        return self

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the server."""
        self._end()

    def generate(self, prompt: str | list[str], sampling_params: Any = None, **more: Any) -> str:
        """The answer of /generate as JSON text; `more` are fields of its body."""
        return json.dumps(self._posted("/generate", text=prompt, sampling_params=sampling_params, **more))

    def encode(self, prompt: str | list[str]) -> str:
        """The answer of /encode as JSON text."""
        return json.dumps(self._posted("/encode", text=prompt))

    async def async_generate(self, prompt: str, sampling_params: Any = None) -> AsyncIterator[str]:
        """The output in the pieces in which it comes."""
        body = {"text": prompt, "sampling_params": sampling_params, "stream": True}
        texts = self._streamed("/generate", body)
        while (piece := await asyncio.to_thread(next, texts, None)) is not None:
            yield piece

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the server's model."""
        return Tokenizer.load(model_directory(ModelConfig(model=self._tokenizer)))

    def _posted(self, path: str, **body: Any) -> Any:
        connection, answer = self._ask("POST", path, json.dumps(body).encode())
        with closing(connection):
            return json.loads(answer.read())

    def _streamed(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        connection, answer = self._ask("POST", path, json.dumps(body).encode())
        shown = 0
        with closing(connection):
            for line in answer:
                data = line.removeprefix(b"data:").strip()
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise EngineError(str(event["error"]["message"]))
                yield event["text"][shown:]
                shown = len(event["text"])

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineError(
                    f"the server ended with status {self._process.returncode}; its error is above"
                )
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:  # not listening yet, or not ready
                time.sleep(POLL_SECONDS)
        raise EngineError(f"the server did not start within {seconds:g} s: raise launch_timeout")


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Options of Python as a launch line. None and False are left out."""
    found: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None or value is False:
            continue
        if value is True:
            found.append(flag)
        elif name == "lora_paths" and isinstance(value, Mapping):
            found += [flag, *(f"{adapter}={path}" for adapter, path in value.items())]
        elif isinstance(value, (list, tuple)):
            found += [flag, *map(str, value)]
        else:
            found += [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return found


def _free_port(host: str, first: int) -> int:
    """The first port from `first` on that nobody listens on. EngineError if there is none."""
    for port in range(first, LAST_PORT + 1):
        with closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise EngineError(f"no port from {first} on is free at {host}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child process: first with a chance to clean up."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
