"""A stand-in for the hub on loopback: repositories of real shape, redirects, ranges, refusals, broken transfers."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from huggingface_hub import constants

from tests.tiny import write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECES, PAUSE = 8, 0.05  # a slow transfer: its pieces, and the seconds after each
LARGE = (".safetensors", ".gguf", ".bin")


class HubServer(ThreadingHTTPServer):
    """Serves the folders of `models` by their ids. `refused` gives ids a status and an error code of the hub.

    `sizes` replaces the sizes that the hub tells. `sent` counts the bytes that left it, by file; files in `broken` end
    in the middle; with `slow` they come in pieces.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: dict[str, Path] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.sizes: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.broken: set[str] = set()
        self.slow, self.pause = False, Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self, *endings: str) -> int:
        return sum(count for file, count in self.sent.items() if file.endswith(endings))


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
        else:
            name, rest = "/".join(parts[:2]), parts[2:]
        status, code = self.server.refused.get(name, (404, "RepoNotFound"))
        if name not in self.server.models or name in self.server.refused:
            return self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})
        folder = self.server.models[name]
        if parts[0] == "api":
            return self._about(name, folder, rest)
        return self._file(folder, "/".join(rest[2:]), "/".join(parts), rest[0] == "stored")

    def _about(self, name: str, folder: Path, rest: list[str]) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        sizes = [
            self.server.sizes.get(file, path.stat().st_size) for file, path in zip(names, files, strict=True)
        ]
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if rest[:1] == ["tree"]:
            found: Any = [
                {"type": "file", "path": file, "size": size, "oid": "0" * 40}
                for file, size in zip(names, sizes, strict=True)
            ]
        else:
            siblings = [{"rfilename": file, "size": size} for file, size in zip(names, sizes, strict=True)]
            found = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _file(self, folder: Path, file: str, path: str, stored: bool) -> None:
        if not (folder / file).is_file():
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        data = (folder / file).read_bytes()
        about = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if file.endswith(LARGE) and not stored:  # elsewhere, as large files are
            about |= {"X-Linked-ETag": about["ETag"], "X-Linked-Size": str(len(data))}
            return self._send(
                302, b"", about | {"Location": f"{self.server.url}/{path.replace('/resolve/', '/stored/')}"}
            )
        asked = self.headers.get("Range")
        if asked is None:
            return self._send(200, data, about, file)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data) - 1) + 1, len(data))
        about["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return self._send(206, data[start:end], about, file)

    def _send(self, status: int, data: bytes, headers: dict[str, str], file: str = "") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if file in self.server.broken:
            data, self.close_connection = data[: len(data) // 2], True
        step = -(-len(data) // PIECES) if self.server.slow and data else max(1, len(data))
        for start in range(0, len(data), step):
            self.wfile.write(data[start : start + step])
            self.wfile.flush()
            self.server.pause.wait(PAUSE if self.server.slow else 0)
        if file:
            self.server.sent[file] = self.server.sent.get(file, 0) + len(data)


@contextmanager
def hub_server(folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> Iterator[HubServer]:
    """A stand-in with the model owner/real, of this config, that this process and those that it starts ask.

    What they fetch they keep in `cache` in the folder.
    """
    server = HubServer()
    server.models["owner/real"] = write_checkpoint(folder / "real", **config)
    _use(server, folder / "cache", monkeypatch)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def quire(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user types it."""
    command = [sys.executable, "-m", "quire.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)


def _use(server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HF_ENDPOINT",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_HUB_DISABLE_XET",
        "HF_HUB_DISABLE_PROGRESS_BARS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
