"""What the notebooks of SGLang's documentation start servers with."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
import urllib.request
from typing import Any

from quire.errors import EngineError
from quire.program.language.runtime import free_port

POLL_SECONDS = 0.05


def launch_server_cmd(
    command: str, host: str = "0.0.0.0", port: int | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server by its launch line, on a free port unless one is given. Returns the process and the port."""
    words = shlex.split(command.replace("\\\n", " "))
    if words[:1] in (["python"], ["python3"]):
        words[0] = sys.executable
    port = port or free_port()
    return subprocess.Popen([*words, "--port", str(port)]), port


def wait_for_server(
    base_url: str, timeout: float | None = 600.0, process: subprocess.Popen[bytes] | None = None
) -> None:
    """Wait until a server answers. EngineError: its process has ended, or the time is over."""
    until = time.monotonic() + (timeout or float("inf"))
    while time.monotonic() < until:
        if process is not None and process.poll() is not None:
            raise EngineError(f"the server ended with status {process.returncode}: see its messages above")
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=5):
                return
        except OSError:  # not listening yet, or not ready
            time.sleep(POLL_SECONDS)
    raise EngineError(f"the server did not start in {timeout:g} s")


def terminate_process(process: subprocess.Popen[bytes]) -> None:
    """End a server and wait until it has."""
    process.terminate()
    process.wait()


def print_highlight(text: Any) -> None:
    """Print what a notebook would show in colour."""
    print(text)
