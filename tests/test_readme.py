"""Every command line that the README shows runs as it stands, on a tiny model in the place of path/to/model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINES = re.findall(r"^quire .*", (ROOT / "README.md").read_text(), re.MULTILINE)


def command(line: str, model: str) -> list[str]:
    words = shlex.split(line, comments=True)[1:]
    return [
        sys.executable,
        "-m",
        "quire.cli",
        *(model if word == "path/to/model" else word for word in words),
    ]


def test_the_readme_shows_the_main_commands() -> None:
    assert {line.split()[1] for line in LINES} >= {"serve", "generate", "chat", "plan"}


@pytest.mark.parametrize("line", [line for line in LINES if line.split()[1] != "serve"])
def test_a_line_runs(line: str, tiny_model: Callable[..., str]) -> None:
    result = subprocess.run(
        command(line, tiny_model()), input="hello\n/quit\n", capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("line", [line for line in LINES if line.split()[1] == "serve"])
def test_a_line_serves(line: str, tiny_model: Callable[..., str]) -> None:
    model = tiny_model(max_position_embeddings=8192)
    process = subprocess.Popen(
        [*command(line, model), "--port", "0"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stderr is not None
        log = ""
        while not (found := re.search(r"serving .* at (http://\S+)", log)):
            text = process.stderr.readline()
            assert text, log
            log += text
        adapters = re.findall(r"(\w+)=quire-stories-lora", line)
        body = {"model": adapters[0] if adapters else model, "prompt": "Once upon a time", "max_tokens": 5}
        request = urllib.request.Request(
            f"{found[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 5
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
