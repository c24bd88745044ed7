"""Starts real servers with the scripted core, as a program: `python -m tests.serve.running '{"port": 0}'`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from quire.serve.options import split_options
from quire.serve.server import serve
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
MAKER = "tests.serve.scripted"


@dataclass
class Server:
    """A server process, its URL and its log so far."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)
    reader: threading.Thread = field(default_factory=threading.Thread)

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if (" at http" in line and "serving" in line) or " at unix:" in line:
                self.url = line.rpartition(" at ")[2].split('"')[0].strip()
                self.ready.set()
        self.ready.set()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def lines_with(self, *parts: str) -> list[str]:
        """The lines with all `parts`, once there is one: the log is written beside the answers."""
        return wait_until(lambda: [line for line in [*self.lines] if all(part in line for part in parts)])

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        """One request with its own connection."""
        with self.client as client:
            return client.post(path, **{"json": body, **options})

    @property
    def engine_pid(self) -> int:
        """The child that runs the engine."""
        (pid,) = self.children("engine.process")
        return pid

    def children(self, module: str) -> list[int]:
        """The children that run a module; others check constraints and render templates."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in found if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def stop(self) -> int:
        """Stop at once, as by two signals; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            time.sleep(0.05)
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self, seconds: float = 60) -> int:
        """The exit status, once it has ended."""
        try:
            status = self.process.wait(seconds)
            self.reader.join()
            assert self.process.stderr is not None
            self.process.stderr.close()
            return status
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not stop\n{self.log}") from None


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a streamed answer, but for the word that ends OpenAI's."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def start(*, maker: str = MAKER, python: str | Path = sys.executable, **options: Any) -> Server:
    """A server that is ready. Options are those of the engine and the server."""
    settings = {"port": 0, "model": "scripted", **options}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", "tests.serve.running", json.dumps([maker, settings])]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    server = Server(process)
    server.reader = threading.Thread(target=server.read, daemon=True)
    server.reader.start()
    if not server.ready.wait(300) or not server.url:
        process.kill()
        server.wait()
        raise AssertionError(f"the server did not start\n{server.log}")
    return server


def main() -> int:
    maker, settings = json.loads(sys.argv[1])
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    return serve(*split_options(settings), maker=maker)


if __name__ == "__main__":
    sys.exit(main())
