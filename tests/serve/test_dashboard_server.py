"""The page on a real server: open without a key, its feed behind the key, and no viewer keeps it from ending."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.running import Server, start
from tests.waiting import wait_until

KEY = {"Authorization": "Bearer k"}


@pytest.fixture
def server() -> Iterator[Server]:
    running = start(api_key=["k"], shutdown_timeout=1000.0)
    yield running
    running.stop()


def first_snapshot(client: httpx.Client) -> dict[str, object]:
    with client.stream("GET", "/dashboard/events", headers=KEY) as answer:
        assert answer.status_code == 200
        line = next(answer.iter_lines())
    found: dict[str, object] = json.loads(line.removeprefix("data: "))
    return found


def test_the_page_is_open_and_its_numbers_are_not(server: Server) -> None:
    with server.client as client:
        page = client.get("/")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for name in (
            "app.css",
            "parts.css",
            "app.js",
            "api.js",
            "chat.js",
            "live.js",
            "draw.js",
            "icon.svg",
            "reference",
        ):
            assert client.get(f"/dashboard/{name}").status_code == 200
        assert client.get("/docs", follow_redirects=True).url.path == "/dashboard/reference"
        for path in ("events", "history", "about"):
            assert client.get(f"/dashboard/{path}").status_code == 401
        assert client.delete("/dashboard/requests/x").status_code == 401
        assert not [path for path in client.get("/openapi.json").json()["paths"] if "dashboard" in path]


def test_the_numbers_are_the_engines(server: Server) -> None:
    with server.client as client:
        before = first_snapshot(client)
        assert (before["model"], before["healthy"], before["generation_tokens"]) == ("scripted", True, 0)
        body = {"model": "scripted", "prompt": "hi", "max_tokens": 7, "ignore_eos": True}
        client.post("/v1/completions", json=body, headers=KEY).raise_for_status()
        after = first_snapshot(client)
        assert after["generation_tokens"] == 7
        assert after["num_running"] == 0
        assert after["num_used_blocks"] == 0
        assert after["finished"] == {"stop": 0, "length": 1, "repetition": 0, "abort": 0, "error": 0}


def test_a_viewer_does_not_keep_the_server_from_ending(server: Server) -> None:
    seen: list[str] = []
    watching = threading.Event()

    def watch() -> None:
        with server.client as client, client.stream("GET", "/dashboard/events", headers=KEY) as answer:
            for line in answer.iter_lines():
                seen.append(line)
                watching.set()

    thread = threading.Thread(target=watch)
    thread.start()
    assert watching.wait(60)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    thread.join()
    assert json.loads([line for line in seen if line][-1].removeprefix("data: "))["draining"] is True


def test_the_page_knows_the_model_the_history_and_can_stop_a_request() -> None:
    server = start(model="scripted:delay=0.1", api_key=["k"])
    try:
        watch_and_stop(server)
    finally:
        server.stop()


def watch_and_stop(server: Server) -> None:
    with server.client as client:
        about = client.get("/dashboard/about", headers=KEY).json()
        assert about["model"].startswith("scripted")
        assert about["defaults"]["temperature"] >= 0
        assert client.delete("/dashboard/requests/nobody", headers=KEY).status_code == 404
        ended: list[httpx.Response] = []

        def ask() -> None:
            body = {"prompt": "hi", "max_tokens": 1000, "ignore_eos": True}
            with server.client as other:
                ended.append(other.post("/v1/completions", json=body, headers=KEY))

        thread = threading.Thread(target=ask)
        thread.start()
        rows: Any = wait_until(lambda: first_snapshot(client)["requests"])
        assert rows[0]["prompt"]
        assert client.delete(f"/dashboard/requests/{rows[0]['id']}", headers=KEY).status_code == 204
        thread.join()
        assert "was stopped" in ended[0].json()["error"]["message"]
        wait_until(lambda: client.get("/dashboard/history", headers=KEY).json()["rings"]["300"])
