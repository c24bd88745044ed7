"""docs/tutorial.md: every block runs, in order, as a user types it, on the model inside the package."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_server import quire
from tests.pages import ADDRESS, curl, serve

PAGE = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def run_python(code: str) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for said in re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE):
        assert said in done.stdout
    assert done.stdout.strip()


def test_every_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        place = tmp_path / name
        place.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(place))
    (_, first), *blocks = BLOCKS
    server, url = serve(first.strip())
    said: dict[str, str] = {}
    try:
        for kind, text in blocks:
            here = text.replace(ADDRESS, url)
            if kind == "python":
                run_python(here)
                continue
            for line, shown in zip(here.splitlines(), text.splitlines(), strict=True):
                if line.startswith("curl"):
                    said[shown] = curl(line)
                else:
                    ran = quire(*shlex.split(line)[1:])
                    assert ran.returncode == 0, f"{line}: {ran.stderr}"
                    said[shown] = ran.stdout
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert server.returncode == 0
    answers = [json.loads(text) for line, text in said.items() if "/v1/completions" in line]
    base, adapter = (answer["choices"][0]["text"] for answer in answers)
    assert base != adapter
    assert "quire-stories" in said["quire ps"]
