"""The router over stand-ins for replicas: every fault in mid-stream and before, and what the client sees."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.stand_in import KEY, Loop, Running, StandIn, router
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@pytest.fixture
def replicas(loop: Loop) -> Iterator[list[StandIn]]:
    made = [StandIn() for _ in range(3)]
    for one in made:
        loop.run(one.open())
    yield made
    for one in made:
        one.hangs, one.silent = False, 0.0
        loop.run(one.close())


SILENCE = 2  # seconds after which a replica that says nothing is left, where a test has such a one


@pytest.fixture
def fault() -> str:
    """What a replica or a client does, in tests that say so."""
    return ""


@pytest.fixture
def routed(replicas: list[StandIn], fault: str) -> Iterator[Running]:
    addresses = [word for one in replicas for word in ("--replica", one.url)]
    patience = SILENCE if fault in ("silent", "frozen", "unread") else 120
    options = ("--policy", "round_robin", "--silence-timeout", str(patience), "--admin-api-key", "boss")
    with router(*addresses, *options) as running:
        wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 3)
        yield running


def stream(running: Running, path: str = "/v1/completions", **fields: Any) -> str:
    body = {"model": "stories", "prompt": "Once", "stream": True, "seed": 7, **fields}
    headers = {"x-request-id": "same"}
    with running.client as client, client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        return "".join(answer.iter_text())


FAULTS = ("killed", "cut", "half", "moved", "moved engine", "silent", "frozen")
PATHS = ("/v1/messages", "/v1/responses", "/v1/programs")


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        *(("/v1/completions", fault) for fault in FAULTS),
        *((path, "killed") for path in PATHS),
        ("/v1/programs", "frozen"),
    ],
)
def test_a_stream_goes_on_where_it_stopped(
    routed: Running, replicas: list[StandIn], path: str, fault: str
) -> None:
    whole = stream(routed, path)
    for one in replicas:
        one.faults = [(fault, 5)]
        one.computed = 0
    replicas[0].faults = replicas[1].faults = []
    replicas[2].faults = [(fault, 5)]
    texts = [stream(routed, path).replace(": keep-alive\n\n", "") for _ in range(3)]
    assert texts == [whole] * 3
    assert not [word for word in (": t ", ": s ", "moved") if word in whole]
    assert routed.metric("quire_route_moves_total") == 1
    if path != "/v1/programs":  # resumed: no token was computed twice
        assert sum(one.computed for one in replicas) == 61  # the one that was lost, twice
        assert sum(one.paths().count("/internal/resume") for one in replicas) == 1


def test_a_stream_survives_five_moves_and_no_more(routed: Running, replicas: list[StandIn]) -> None:
    whole = stream(routed, max_tokens=60)
    replicas[0].faults = [("moved", 4)] * 2
    replicas[1].faults = [("moved", 4)] * 2
    replicas[2].faults = [("moved", 4)]
    assert stream(routed, max_tokens=60).replace(": keep-alive\n\n", "") == whole
    for one in replicas:
        one.faults = [("moved", 4)] * 9
    text = stream(routed, max_tokens=60)
    assert whole.startswith(text.partition('data: {"error"')[0].replace(": keep-alive\n\n", ""))
    assert "moved 5 times" in text
    assert "[DONE]" not in text


def test_two_dead_engines_are_enough(routed: Running, replicas: list[StandIn]) -> None:
    for one in replicas:
        one.faults = [("moved engine", 3)]
    assert "2 engines died" in stream(routed)
    assert sum(len(one.seen) for one in replicas) == 2
    for one in replicas:
        one.faults = [("engine", 0)]
        one.seen.clear()
    wait_until(lambda: routed.metric('quire_route_replicas{what="up"}') == 3)
    answer = httpx.post(f"{routed.url}/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert sum(len(one.seen) for one in replicas) == 2


@pytest.mark.parametrize("fault", ["killed", "half", "engine", "silent", "frozen"])
def test_a_whole_answer_is_asked_for_again(routed: Running, replicas: list[StandIn], fault: str) -> None:
    replicas[1].faults = [(fault, 0)]
    for _ in range(3):
        answer = httpx.post(
            f"{routed.url}/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "me"}, timeout=120
        )
        assert answer.status_code == 200
        assert answer.json()["id"] == "me"
    assert routed.metric("quire_route_retries_total") == 1


def test_busy_replicas_are_asked_once_and_then_say_when_to_come_back(
    routed: Running, replicas: list[StandIn]
) -> None:
    for one in replicas:
        one.status = 503
    answer = httpx.post(f"{routed.url}/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "7"
    assert "secret" not in answer.text
    assert [len(one.seen) for one in replicas] == [1, 1, 1]


def test_streams_wait_while_all_are_dead(routed: Running, replicas: list[StandIn], loop: Loop) -> None:
    whole = stream(routed, max_tokens=100)
    for one in replicas:
        one.pause = 1.0
    with routed.client as client:
        body = {"model": "stories", "prompt": "Once", "stream": True, "seed": 7, "max_tokens": 100}
        with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "same"}) as answer:
            parts = answer.iter_text()
            text = next(parts)
            for one in replicas:
                loop.run(one.close())
            while ": keep-alive" not in text:
                text += next(parts)
            for one in replicas:
                one.pause = 0.002
                loop.run(one.open())
            text += "".join(parts)
    assert text.replace(": keep-alive\n\n", "") == whole
    assert ": keep-alive" in text


def test_unlike_replicas_continue_only_when_they_say_so(loop: Loop) -> None:
    first, second = StandIn(faults=[("killed", 5)]), StandIn(kind="class-b")
    loop.run(first.open())
    addresses = ["--replica", first.url]
    loop.run(second.open())
    second.healthy = False
    addresses += ["--replica", second.url]
    for across in ("allow", "refuse"):
        with router(
            *addresses,
            "--failover-across",
            across,
            "--failover-timeout",
            "1.5" if across == "refuse" else "60",
        ) as running:
            wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 1)
            second.healthy = True
            wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 2)
            assert "class class-b" in running.log
            text = ""
            for _ in range(2):
                text += stream(running)
            if across == "allow":
                assert ": quire crossed class-b\n\n" in text
                assert running.metric('quire_route_moves_total{cause="crossed"}') == 1
            else:
                assert "crossed" not in text
                assert "no replica" in text
        first.faults = [("killed", 5)]
        second.healthy = False
        loop.run(first.open())
    for one in (first, second):
        loop.run(one.close())


def test_a_client_reaches_nothing_but_the_api(routed: Running, replicas: list[StandIn]) -> None:
    base = routed.url
    inside = ("/internal/load", "/internal/resume", "//internal/load", "/v1/../internal/load")
    for path in (*inside, "/sleep", "/reset_prefix_cache", "/stats", "/v1/load_lora_adapter"):
        for method in ("GET", "POST"):
            assert httpx.request(method, base + path).status_code in (404, 405), path
    assert httpx.get(f"{base}/replicas").status_code in (401, 403)
    assert httpx.post(f"{base}/drain?replica=0").status_code in (401, 403)
    sent = {
        "x-quire-route": json.dumps({"id": "evil", "owner": "victim"}),
        "x-quire-load": "{}",
        "x-gateway-destination-endpoint": "10.0.0.1:80",
        "x-forwarded-for": "10.0.0.1",
        "authorization": "Bearer mine",
        "cookie": "a=b",
        "host": "other.localhost",
    }
    body = b'{ "prompt":"a",\n "unknown" : 1e400, "structured_outputs": {"regex": "a"}}'
    answer = httpx.post(
        f"{base}/v1/completions", content=body, headers={**sent, "content-type": "application/json"}
    )
    assert answer.status_code == 200
    seen = next(one.seen[-1] for one in replicas if one.seen)
    assert seen.body == body
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert json.loads(seen.headers["x-quire-route"])["owner"] == ""
    assert json.loads(seen.headers["x-quire-route"])["id"] != "evil"
    assert not {"x-gateway-destination-endpoint", "x-forwarded-for", "cookie", "x-quire-load"} & set(
        seen.headers
    )
    assert not [name for name in answer.headers if name.startswith("x-quire")]
    assert KEY not in routed.log
    shown = httpx.get(f"{base}/metrics").text
    assert str(replicas[0].port) not in shown
    assert "127.0.0.1" not in shown


def test_operators_drain_a_replica(routed: Running, replicas: list[StandIn]) -> None:
    boss = {"authorization": "Bearer boss"}
    listed = httpx.get(f"{routed.url}/replicas", headers=boss).json()
    assert [one["address"] for one in listed] == [one.url for one in replicas]
    assert httpx.post(f"{routed.url}/drain?replica=9", headers=boss).status_code == 404
    assert httpx.post(f"{routed.url}/drain?replica=1", headers=boss).json()["state"] == "draining"
    for _ in range(6):
        stream(routed)
    assert not replicas[1].seen
    assert httpx.post(f"{routed.url}/undrain?replica=1", headers=boss).json()["state"] == "up"
    for _ in range(6):
        stream(routed)
    assert replicas[1].seen


def test_models_are_joined(loop: Loop) -> None:
    both = [StandIn(models=("a", "b")), StandIn(kind="other", models=("b", "c"))]
    for one in both:
        loop.run(one.open())
    with router("--replica", both[0].url, "--replica", both[1].url) as running:
        wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 2)
        models = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert sorted(one["id"] for one in models) == ["a", "b", "c"]
        for model, place in (("a", 0), ("c", 1)):
            for _ in range(4):
                httpx.post(f"{running.url}/v1/completions", json={"model": model, "prompt": "x"})
            assert all(json.loads(one.body)["model"] != model for one in both[1 - place].seen)
    for one in both:
        loop.run(one.close())


@pytest.mark.parametrize("fault", ["unread"])
def test_a_client_that_does_not_read_harms_no_replica(routed: Running) -> None:
    body = {"prompt": "Once", "stream": True, "max_tokens": 300, "size": 100_000}
    with routed.client as client, client.stream("POST", "/v1/completions", json=body) as answer:
        parts = answer.iter_bytes()
        text = [next(parts)]
        time.sleep(2.5 * SILENCE)
        text += parts
    assert b"".join(text).endswith(b"data: [DONE]\n\n")
    assert routed.metric("quire_route_moves_total") == 0
    assert "is not used" not in routed.log


@pytest.mark.parametrize("fault", ["", "silent"])
def test_a_list_in_a_file_changes_without_dropping_a_stream(loop: Loop, tmp_path: Any, fault: str) -> None:
    first, second = StandIn(pause=0.03, faults=[(fault, 90 if fault else 999)]), StandIn()
    for one in (first, second):
        loop.run(one.open())
    file = tmp_path / "replicas"
    file.write_text(f"# ours\n{first.url}\n")
    with router("--replicas-file", str(file)) as running:
        wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 1)
        with running.client as client:
            body = {"prompt": "Once", "stream": True, "max_tokens": 100}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                parts = answer.iter_text()
                text = next(parts)
                many = [f"http://127.0.0.1:{port}" for port in range(1, 512)]
                file.write_text("\n".join([second.url, *many]))
                wait_until(lambda: "no longer listed" in running.log)
                file.write_text("\n".join([second.url, "not an address at all"]))
                wait_until(lambda: "stays as it is" in running.log)
                file.write_text(second.url)
                stream(running)
                text += "".join(parts)
        assert "[DONE]" in text
        assert running.metric("quire_route_moves_total") == bool(fault)
        assert second.seen
    first.hangs = False
    for one in (first, second):
        loop.run(one.close())


def test_a_router_that_stops_lets_streams_end(replicas: list[StandIn]) -> None:
    with router("--replica", replicas[0].url) as routed:
        wait_until(lambda: routed.metric('quire_route_replicas{what="up"}') == 1)
        whole = stream(routed, max_tokens=30)
        replicas[0].pause = 1.0
        with routed.client as client:
            body = {"model": "stories", "prompt": "Once", "stream": True, "seed": 7, "max_tokens": 30}
            with client.stream(
                "POST", "/v1/completions", json=body, headers={"x-request-id": "same"}
            ) as answer:
                parts = answer.iter_text()
                text = next(parts)
                routed.process.terminate()
                wait_until(lambda: "no new requests" in routed.log)
                assert httpx.get(f"{routed.url}/health").status_code == 503
                refused = httpx.post(f"{routed.url}/v1/completions", json={"prompt": "a"})
                assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
                replicas[0].pause = 0.002
                text += "".join(parts)
        assert text == whole
        assert routed.process.wait(60) == 0


def said(routed: Running, sent: str) -> bytes:
    """The answers to what is sent over one connection, as it is."""
    with socket.create_connection(("127.0.0.1", httpx.URL(routed.url).port)) as raw:
        raw.settimeout(60)
        raw.sendall(sent.encode())
        raw.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: raw.recv(65536), b""))


SMUGGLED = "GET /internal/load HTTP/1.1\r\nhost: localhost\r\n\r\n"
TRICKS = [
    f"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{SMUGGLED}",
    f"transfer-encoding: chunked\r\ncontent-length: {len(SMUGGLED)}\r\n\r\n0\r\n\r\n{SMUGGLED}",
    f"content-length: 2\r\ncontent-length: {len(SMUGGLED)}\r\n\r\n{{}}{SMUGGLED}",
    f"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n{SMUGGLED}",
    f"content-length: 2\n\n{{}}{SMUGGLED}",
    "x-quire-route: {}\r\n x-folded: 1\r\ncontent-length: 2\r\n\r\n{}",
]


@pytest.mark.parametrize("rest", TRICKS)
def test_requests_that_two_readers_cut_differently_reach_no_replica_twice(
    routed: Running, replicas: list[StandIn], rest: str
) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    text = said(routed, head + rest)
    assert b'"silent"' not in text
    assert len([path for one in replicas for path in one.paths()]) <= 1
    assert {path for one in replicas for path in one.paths()} <= {"/v1/completions"}


def test_half_requests_hold_up_nobody(routed: Running, replicas: list[StandIn]) -> None:
    port = httpx.URL(routed.url).port
    half = []
    try:
        for number in range(400):
            half.append(socket.create_connection(("127.0.0.1", port)))
            body = "" if number % 2 else "host: localhost\r\ncontent-length: 999\r\n\r\n{"
            half[-1].sendall(f"POST /v1/completions HTTP/1.1\r\n{body}".encode())
        assert "[DONE]" in stream(routed)
        assert sum(len(one.seen) for one in replicas) == 1
    finally:
        for one in half:
            one.close()


LINES = "%0D%0Ax-evil:%201%0D%0A%0D%0AGET%20/internal/load"
NAMES = (
    f"a%20HTTP/1.1{LINES}",
    "a%0A",
    "a%20HTTP/1.1%0Dx-evil:1",
    "%00",
    "%FF",
    "a%3Fb=c",
    "../../internal/load",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_s_name_stays_a_name(routed: Running, replicas: list[StandIn], name: str) -> None:
    said(routed, f"GET /v1/models/{name} HTTP/1.1\r\nhost: localhost\r\n\r\n")
    for seen in [one for replica in replicas for one in replica.seen]:
        assert seen.path.startswith("/v1/models/")
        assert seen.path.isprintable()
        assert not set(" ?") & set(seen.path)
        assert "x-evil" not in seen.headers


ROUTED = '{"id":"evil","created":1,"owner":"victim"}'
HEADERS = (
    f"X-Quire-Route: {ROUTED}",
    f"x-quire-route : {ROUTED}",
    f"x_quire_route: {ROUTED}",
    f"traceparent: 00\r\n x-quire-route: {ROUTED}",
    f"traceparent: 00\rx-quire-route: {ROUTED}",
    f"traceparent: 00\nx-quire-route: {ROUTED}",
    f"traceparent: 00\0\r\nx-quire-route: {ROUTED}",
    f"connection: x-quire-route\r\nx-quire-route: {ROUTED}",
    f"trailer: x-quire-route\r\nx-quire-route: {ROUTED}",
    'x-request-id: evil","owner":"victim',
    "x-quire-moved: engine\r\nx-quire-load: {}",
    "content-type: application/json\x0b, x-quire-route: {}",
)


@pytest.mark.parametrize("header", HEADERS)
def test_no_client_writes_a_router_s_headers(routed: Running, replicas: list[StandIn], header: str) -> None:
    said(
        routed,
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{header}\r\ncontent-length: 2\r\n\r\n{{}}",
    )
    for seen in [one for replica in replicas for one in replica.seen]:
        told = json.loads(seen.headers.pop("x-quire-route"))
        assert (told["id"] == "evil", told["owner"]) == (False, "")
        assert not [name for name in seen.headers if "quire" in name]
        assert not [value for value in seen.headers.values() if set("\r\n\0") & set(value)]


ADDRESSED = (
    "http://127.0.0.1:1/internal/load",
    "http://localhost/v1/../internal/load",
    "//internal/load",
    "*",
    "a:1",
)


@pytest.mark.parametrize("target", ADDRESSED)
@pytest.mark.parametrize("method", ["GET", "POST", "CONNECT", "OPTIONS"])
def test_no_client_names_a_replica(
    routed: Running, replicas: list[StandIn], target: str, method: str
) -> None:
    text = said(
        routed, f"{method} {target} HTTP/1.1\r\nhost: {replicas[0].url[7:]}\r\ncontent-length: 0\r\n\r\n"
    )
    assert not [one for replica in replicas for one in replica.seen]
    assert b'"silent"' not in text


def test_keys_are_in_no_log_metric_or_answer(replicas: list[StandIn], tmp_path: Path) -> None:
    for name in ("user", "boss"):
        (tmp_path / name).write_text(f"secret-of-{name}\n")
    given = (
        "--api-key-file",
        str(tmp_path / "user"),
        "--admin-api-key",
        "secret-of-boss",
        "--log-level",
        "debug",
    )
    with router("--replica", replicas[0].url, "--replica", "http://127.0.0.1:1", *given) as running:
        wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 1)
        told = []
        for key in ("secret-of-user", "secret-of-boss", "secret-of-nobody", KEY):
            for headers in ({"authorization": f"Bearer {key}"}, {"authorization": key}, {"x-api-key": key}):
                for path in (
                    "/v1/completions",
                    "/v1/models",
                    "/replicas",
                    "/metrics",
                    "/internal/load",
                    "/nothing",
                ):
                    method = "POST" if path == "/v1/completions" else "GET"
                    body = b'{"prompt": "a"}' if method == "POST" else None
                    answer = httpx.request(method, running.url + path, headers=headers, content=body)
                    told += [answer.text, str(answer.headers)]
        told += [running.log, httpx.get(f"{running.url}/metrics").text]
    assert not [text for text in told if "secret-of" in text or KEY in text]
    assert {json.dumps(one.headers).count("secret-of") for one in replicas[0].seen} == {0}
