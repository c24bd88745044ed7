"""`quire ps` beside real servers, as a user types it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import quire
from tests.serve.running import Server, start


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "quire"


@pytest.fixture
def servers(place: Path, tmp_path: Path) -> Iterator[list[Server]]:
    """One that needs a key, and one at a socket file."""
    started = [
        start(api_key=("a-key-that-nobody-sees",), served_model_name=("one", "other")),
        start(uds=str(tmp_path / "socket"), metrics_prefix="vllm"),
    ]
    yield started
    for server in started:
        server.stop()


def listed() -> list[dict[str, Any]]:
    done = quire("ps", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_servers_are_listed_until_they_end(servers: list[Server], place: Path) -> None:
    found = listed()
    assert [row["models"][0] for row in found] == ["one", "scripted"]
    for row, server in zip(found, servers, strict=True):
        assert (row["address"], row["pid"]) == (server.url, server.process.pid)
        assert (row["running"], row["waiting"]) == (0, 0)
        assert row["memory_bytes"] is None or row["memory_bytes"] > 1 << 20
        assert row["uptime_seconds"] >= 0
    table = quire("ps").stdout
    assert "one, other" in table
    records = list(place.iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in records] == [0o600] * 2
    assert not any("nobody-sees" in path.read_text() for path in records)
    assert "nobody-sees" not in table
    servers[0].stop()
    assert [row["models"] for row in listed()] == [["scripted"]]
    assert len(list(place.iterdir())) == 1
    os.killpg(servers[1].process.pid, signal.SIGKILL)
    servers[1].wait()
    assert listed() == []
    assert list(place.iterdir()) == []


def test_a_server_that_does_not_answer_is_still_listed(servers: list[Server]) -> None:
    os.kill(servers[0].process.pid, signal.SIGSTOP)
    try:
        stopped = listed()[0]
        assert (stopped["pid"], stopped["running"]) == (servers[0].process.pid, None)
        assert "no answer" in quire("ps").stdout.replace("\n", " ")
    finally:
        os.kill(servers[0].process.pid, signal.SIGCONT)


def test_records_of_others_and_broken_ones_do_not_count(place: Path) -> None:
    assert quire("ps").stdout == "no server of this user runs here\n"
    place.mkdir()
    record = {
        "names": ["m"],
        "url": "http://127.0.0.1:9",
        "metrics_prefix": "quire",
        "host": socket.gethostname(),
    }
    record |= {"pid": os.getpid(), "began": 1, "since": 0.0}
    (place / "reused.json").write_text(json.dumps(record))  # another process has its number now
    (place / "elsewhere.json").write_text(json.dumps(record | {"host": "another"}))
    (place / "huge.json").write_text(json.dumps(record | {"pid": 2**70}))
    (place / "broken.json").write_text("{")
    done = quire("ps", "--json")
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert "broken.json is no record of a server" in done.stderr
    assert {path.name for path in place.iterdir()} == {"elsewhere.json", "broken.json"}


def test_a_place_that_cannot_be_written_costs_the_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    server = start()
    try:
        assert "quire ps will not list this server" in server.log
    finally:
        assert server.stop() == 0
