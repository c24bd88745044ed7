"""The commands at the top of docs/scale.md, as they stand there but for the ports."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.cluster.fleet import free_port
from tests.waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def listens(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.skipif(not shutil.which("bash") or not shutil.which("curl"), reason="needs bash and curl")
def test_three_replicas_in_two_commands(tmp_path: Path) -> None:
    start, ask = BLOCK.findall(PAGE.read_text())[:2]
    ports = {port: free_port() for port in sorted({*re.findall(r"\b800\d\b", start)})}
    assert len(ports) == 4
    for port, free in ports.items():
        start, ask = start.replace(port, str(free)), ask.replace(port, str(free))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    log = tmp_path / "log"
    with log.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-c", start], cwd=tmp_path, env=environment, stderr=file, start_new_session=True
        )
    try:
        wait_until(lambda: all(map(listens, ports.values())), 120)
        answer = subprocess.run(
            ["bash", "-c", ask], env=environment, capture_output=True, text=True, timeout=300
        )
        assert '"text_completion"' in answer.stdout, answer
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(60)
    wait_until(lambda: not any(map(listens, ports.values())))
    key = (tmp_path / "key").read_text().strip()
    assert len(key) > 40
    assert key not in log.read_text()
    assert "Traceback" not in log.read_text()
