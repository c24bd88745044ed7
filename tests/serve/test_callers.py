"""Users and operators: what a key may see and end, and which web pages a browser may call for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from quire.serve.callers import Keys
from quire.sockets import is_local
from tests.serve.running import Server, start

USER, OTHER, OPERATOR = ({"Authorization": f"Bearer {key}"} for key in ("alice", "bob", "root"))
HERE, THERE = ("127.0.0.1", 5), ("192.0.2.1", 5)


@pytest.mark.parametrize(
    ("keys", "key", "client", "known", "operator"),
    [
        (Keys(), "", HERE, True, True),
        (Keys(), "", None, True, True),
        (Keys(), "", THERE, True, False),
        (Keys(["u"]), "u", HERE, True, False),
        (Keys(["u"]), "x", HERE, False, False),
        (Keys(["u"], ["o"]), "o", THERE, True, True),
        (Keys([], ["o"]), "", HERE, True, False),
        (Keys([], ["o"]), "o", HERE, True, True),
    ],
)
def test_who_calls(keys: Keys, key: str, client: Any, known: bool, operator: bool) -> None:
    for name, value in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
        caller = keys.caller(Headers({name: value}), client)
        assert (caller.owner is not None, caller.operator) == (known, operator)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("my.localhost", True),
        ("0.0.0.0", False),
        ("192.0.2.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_local_names(host: str, local: bool) -> None:
    assert is_local(host) == local


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start(
        model="scripted:delay=0.05", api_key=["alice", "bob"], admin_api_key=["root"], enable_sleep_mode=True
    )
    yield running
    running.stop()


def rows(client: httpx.Client, key: dict[str, str]) -> list[str]:
    with client.stream("GET", "/dashboard/events", headers=key) as answer:
        line = next(answer.iter_lines())
    return [row["id"] for row in json.loads(line.removeprefix("data: "))["requests"]]


def test_a_user_sees_and_stops_requests_of_their_own(server: Server) -> None:
    body = {"prompt": "!say " + "word " * 200, "max_tokens": 400, "stream": True}
    with (
        server.client as client,
        client.stream("POST", "/v1/completions", json=body, headers=USER) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        (mine,) = rows(client, USER)
        assert rows(client, OTHER) == []
        assert rows(client, OPERATOR) == [mine]
        assert client.delete(f"/dashboard/requests/{mine}", headers=OTHER).status_code == 404
        assert rows(client, USER) == [mine]
        assert client.delete(f"/dashboard/requests/{mine}", headers=USER).status_code == 204
        assert any("this request was stopped" in line for line in lines)


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/sleep", "/wake_up"])
def test_what_acts_on_all_needs_an_operator(server: Server, path: str) -> None:
    with server.client as client:
        refused = client.post(path, headers=USER)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "operators_only"
        assert "--admin-api-key" in refused.json()["error"]["message"]
        assert client.post(path).status_code == 401
        assert client.post(path, headers=OPERATOR).status_code in (200, 400)  # a scripted engine never sleeps


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    running = start(model="scripted")
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://{host}"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost:80"}, 200),
        ({"Origin": "http://{host}", "Content-Type": "text/plain"}, 415),
    ],
)
def test_a_server_without_a_key_answers_its_own_pages(
    open_server: Server, headers: dict[str, str], status: int
) -> None:
    host = open_server.url.removeprefix("http://")
    body = json.dumps({"prompt": "!say ok!end", "max_tokens": 2})
    sent = {"Content-Type": "application/json"} | {k: v.format(host=host) for k, v in headers.items()}
    with open_server.client as client:
        assert client.post("/v1/completions", content=body, headers=sent).status_code == status


def test_a_body_of_a_page_says_its_type(open_server: Server) -> None:
    origin = {"Origin": open_server.url}
    with open_server.client as client:
        body = json.dumps({"prompt": "!say ok!end", "max_tokens": 2}).encode()
        assert client.post("/v1/completions", content=body).status_code == 200
        assert client.post("/v1/completions", content=body, headers=origin).status_code == 415


def test_origins_open_it() -> None:
    server = start(model="scripted", allowed_origins=["https://good.example"])
    try:
        with server.client as client:
            answer = client.get("/v1/models", headers={"Origin": "https://good.example", "Host": "x.example"})
            assert answer.headers["access-control-allow-origin"] == "https://good.example"
    finally:
        server.stop()
