"""Runs what a page of the docs shows: its server at a free port, its requests there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import urllib.request

ADDRESS = "http://127.0.0.1:8000"


def serve(line: str) -> tuple[subprocess.Popen[str], str]:
    """Start a page's server at a free port; return it and its address."""
    command = [sys.executable, "-m", "quire.cli", *shlex.split(line)[1:], "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log = ""
    while not (found := re.search(r"serving .* at (http://\S+)", log)):
        said = process.stderr.readline()
        assert said, log
        log += said
    return process, found[1]


def curl(line: str) -> str:
    """Ask as curl would: the URL, and perhaps a body of JSON."""
    words = shlex.split(line)[1:]
    body = words[words.index("-d") + 1].encode() if "-d" in words else None
    request = urllib.request.Request(words[0], body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())
