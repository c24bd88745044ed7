"""A replica behind a router: ids and seeds as the router says, its key, and marked streams."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from quire import SamplingParams
from quire.client.metrics import Metrics, RequestTimes
from quire.serve.internal import Events, Load
from quire.types import EngineStats, Request
from tests.serve.running import Server, start
from tests.serve.test_tools import BLOCKS, CALLS, FLAT, TOOLS, say
from tests.waiting import stopped, wait_until

KEY = "the-router"
ROUTE = {"id": "asked-1", "created": 1234, "seed": 77, "owner": "abc", "resumable": True}
IDS = {"id", "item_id", "call_id", "tool_use_id", "created", "created_at", "session"}
PROMPT = "!forever tell me"
CUSTOM = {"type": "custom", "name": "clock"}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [PROMPT, "x"], "n": 2, "max_tokens": 12}),
    ("/v1/chat/completions", {"messages": say(f"<think>so</think>{CALLS}"), "tools": TOOLS, "n": 2}),
    (
        "/v1/chat/completions",
        {"messages": say(CALLS), "tools": [*TOOLS[:1], {"type": "custom", "custom": CUSTOM}]},
    ),
    ("/v1/responses", {"input": say(f"<think>so</think>Well.\n{CALLS}"), "tools": FLAT}),
    ("/v1/responses", {"input": say(CALLS), "tools": [*FLAT[:1], CUSTOM]}),
    (
        "/v1/messages",
        {
            "messages": say(f"<think>so</think>Well.\n{CALLS}"),
            "max_tokens": 300,
            "tools": BLOCKS,
            "model": "scripted",
        },
    ),
    ("/v1/programs", {"steps": [{"type": "text", "text": "a"}, {"type": "gen", "name": "b"}], "keep": True}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
]


def headers(**changed: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}", "x-quire-route": json.dumps({**ROUTE, **changed})}


LOADS = {"step", "queued", "running", "waiting", "free", "silent", "prefill_rate", "decode_rate"}


def open_server(**options: Any) -> Server:
    return start(tool_call_parser="hermes", reasoning_parser="qwen3", router_api_key=[KEY], **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = open_server(api_key=["alice"], model="scripted:delay=0.005")
    yield running
    assert running.stop() == 0
    assert "unexpected error" not in running.log, running.log


def ids_of(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [found for part in value for found in ids_of(part)]
    if not isinstance(value, dict):
        return []
    own = [value[name] for name in sorted(IDS & set(value))]
    return own + [found for part in value.values() for found in ids_of(part)]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=lambda value: value if isinstance(value, str) else "")
def test_two_replicas_asked_alike_answer_alike(
    path: str, body: dict[str, Any], server: Server, other: Server
) -> None:
    answers = []
    with server.client as one, other.client as two:
        for http in (one, two, one):
            whole = http.post(path, json=body, headers=headers())
            assert whole.status_code == 200, whole.text
            if path == "/v1/embeddings":
                answers.append((whole.content, {}))
                continue
            streamed = http.post(path, json={**body, "stream": True}, headers=headers()).raise_for_status()
            events = [
                json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")
            ]
            answers.append((whole.content, dict.fromkeys(map(str, ids_of(events)))))
    cached = ('"cached_tokens"', '"cache_read')
    if not any(word in answers[0][0].decode() for word in cached):
        assert answers[0][0] == answers[1][0]
    assert ids_of(json.loads(answers[0][0])) == ids_of(json.loads(answers[1][0]))
    assert answers[0][1] == answers[1][1] == answers[2][1]
    if path not in ("/v1/messages", "/v1/programs"):
        assert 1234 in ids_of(json.loads(answers[0][0]))
    assert (
        any("asked-1" in str(found) for found in ids_of(json.loads(answers[0][0]))) or path == "/v1/programs"
    )


@pytest.fixture(scope="module")
def other() -> Iterator[Server]:
    running = open_server()
    yield running
    assert running.stop() == 0


def test_calls_of_several_samples_and_turns_have_ids_of_their_own(other: Server) -> None:
    found = set()
    for turn in ("", "And then? "):
        body = {"messages": say(turn + CALLS), "tools": TOOLS, "n": 3}
        answer = other.post("/v1/chat/completions", json=body, headers={"x-request-id": "one"}).json()
        assert answer["id"] == "chatcmpl-one"
        found |= {call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]}
    assert len(found) == 2 * 3 * 2


def test_a_router_s_seed_is_used_where_the_body_gives_none(other: Server) -> None:
    def text(body: dict[str, Any], **route: Any) -> str:
        asked = {"prompt": ["x", "x"], "max_tokens": 40, "temperature": 1, **body}
        found = other.post("/v1/completions", json=asked, headers=headers(**route)).json()["choices"]
        assert found[0]["text"] != found[1]["text"] or "seed" in body
        return str([choice["text"] for choice in found])

    assert text({}) == text({}) != text({}, seed=78)
    assert text({"seed": 5}) == text({"seed": 5}, seed=78)


def test_only_a_router_reaches_internal_routes_and_is_believed(server: Server, http: httpx.Client) -> None:
    alice = {"authorization": "Bearer alice"}
    for path in ("/internal/replica", "/internal/load", "/internal/nothing"):
        assert http.get(path).status_code == 401
        assert http.get(path, headers=alice).status_code == 401
    about = http.get("/internal/replica", headers=headers()).json()
    assert about["models"] == {"scripted": {"adapter": False, "class": about["class"]}}
    assert about["block_bytes"] == 1024
    load = http.get("/internal/load", headers=headers())
    assert set(load.json()) == LOADS
    assert json.loads(load.headers["x-quire-load"]) == load.json()
    body = {"prompt": "x", "max_tokens": 2}
    assert http.post("/v1/completions", json=body).status_code == 401
    mine = http.post("/v1/completions", json=body, headers={**alice, "x-quire-route": json.dumps(ROUTE)})
    assert "asked-1" not in mine.text
    assert "x-quire-load" not in mine.headers
    assert http.post("/sleep", headers=headers()).status_code in (403, 404)
    for route in ("{", "[]", '{"id":"a b","created":1}', '{"id":"a","created":-1}', '{"id":7,"created":1}'):
        refused = http.post("/v1/completions", json=body, headers={**headers(), "x-quire-route": route})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "x-quire-route"


def test_a_replica_is_ready_for_constraints_before_the_first(server: Server, other: Server) -> None:
    wait_until(lambda: all(one.children("grammar_worker") for one in (server, other)))


def test_a_replica_that_is_killed_early_leaves_no_process_that_complains() -> None:
    running = open_server()
    wait_until(lambda: running.children("grammar_worker"))
    running.process.kill()
    running.wait()
    assert "Traceback" not in running.log


def test_without_a_router_s_key_there_is_nothing_internal() -> None:
    running = start()
    with running.client as http:
        assert http.get("/internal/replica", headers=headers()).status_code == 404
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers())
        assert "asked-1" not in answer.text
    assert running.stop() == 0


def marked(
    server: Server, body: dict[str, Any], path: str = "/v1/completions", timeout: float = 120
) -> Iterator[str]:
    with (
        httpx.Client(base_url=server.url, timeout=httpx.Timeout(120, read=timeout)) as http,
        http.stream("POST", path, json={**body, "stream": True}, headers=headers()) as found,
    ):
        assert found.status_code == 200
        block: list[str] = []
        for line in found.iter_lines():
            if line:
                block.append(line)
            else:
                yield "\n".join(block)
                block = []


def test_a_marked_stream_is_the_plain_one_with_comment_lines(server: Server, other: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    blocks = list(marked(server, body))
    lines = [line for block in blocks for line in block.split("\n")]
    assert {line[:4] for line in lines if line.startswith(":")} == {": t ", ": s "}
    data = [line[6:] for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    plain = other.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in data[:-1]) == plain
    signs = [json.loads(block[4:]) for block in blocks if block.startswith(": s ")]
    assert signs[0]["running"] + signs[0]["waiting"] == 1


def test_an_error_of_the_request_stays_a_plain_one(server: Server, http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 5, "stream": True, "structured_outputs": {"regex": "("}}
    assert http.post("/v1/completions", json=body, headers=headers()).status_code == 400
    assert "error" in list(marked(server, {"prompt": "!poison x", "max_tokens": 9}))[-2]


def test_a_marked_stream_is_handed_back_by_a_drain_and_others_end() -> None:
    running = open_server(model="scripted:delay=0.02", api_key=["alice"])
    body = {"prompt": PROMPT, "max_tokens": 100}
    stream = marked(running, {**body, "max_tokens": 1500})
    next(stream)
    with running.client as http:
        plain = http.stream(
            "POST",
            "/v1/completions",
            json={**body, "stream": True},
            headers={"authorization": "Bearer alice"},
        )
        with plain as own:
            lines = own.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            assert list(stream)[-1] == ": moved"
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert running.wait() == 0


def test_the_death_of_the_engine_hands_a_marked_stream_back() -> None:
    running = open_server(model="scripted:delay=0.02")
    stream = marked(running, {"prompt": PROMPT, "max_tokens": 1500})
    next(stream)
    os.kill(running.engine_pid, signal.SIGKILL)
    assert list(stream)[-1] == ": moved engine"
    whole = running.post("/v1/completions", json={"prompt": "!crash", "max_tokens": 5}, headers=headers())
    while whole.status_code == 503:
        time.sleep(0.1)
        whole = running.post("/v1/completions", json={"prompt": "!crash", "max_tokens": 5}, headers=headers())
    assert (whole.status_code, whole.headers["x-quire-moved"]) == (500, "engine")
    assert running.stop() == 0


def test_a_hung_engine_gives_no_sign_of_life() -> None:
    running = open_server(model="scripted:delay=0.02")
    stream = marked(running, {"prompt": PROMPT, "max_tokens": 1500})
    next(block for block in stream if block.startswith(": s "))
    signs: list[str] = []
    with stopped(running.engine_pid):
        with pytest.raises(httpx.ReadTimeout):
            signs.extend(marked(running, {"prompt": PROMPT, "max_tokens": 1000}, timeout=4))
        assert len(signs) <= 1
        with running.client as http:
            path = "/internal/events?since={}&wait=60&silence=1"
            number = http.get(path.format(-1), headers=headers()).json()["next"]
            told = http.get(path.format(number), headers=headers()).json()
        assert told["load"]["silent"] >= 1
    time.sleep(3)  # it has nothing to do, but says so
    with running.client as http:
        wait_until(lambda: http.get("/internal/load", headers=headers()).json()["silent"] <= 2)
    assert running.stop() == 0


def test_the_fingerprint_names_what_answers_depend_on(server: Server, other: Server) -> None:
    def fingerprint(one: Server, **body: Any) -> str:
        found = set()
        for path, asked in ASKED[:-1]:
            for stream in (False, True):
                text = one.post(path, {**asked, "stream": stream}, headers=headers()).text
                found |= set(re.findall(r'"system_fingerprint":"(\w+)"', text))
        with one.client as http:
            found |= {http.get("/v1/models", headers=headers()).json()["data"][0]["system_fingerprint"]}
            about = http.get("/internal/replica", headers=headers()).json()
            found |= {about["class"], about["models"]["scripted"]["class"]}
            found |= set(re.findall(r'_info\{.*system_fingerprint="(\w+)"', http.get("/metrics").text))
        (named,) = found
        return str(named)

    unlike = start(tool_call_parser="hermes", router_api_key=[KEY])
    assert fingerprint(server) == fingerprint(other) != fingerprint(unlike)
    assert unlike.stop() == 0


def test_prefixes_that_come_and_go_are_told_to_routers() -> None:
    running = open_server()
    with running.client as http:

        def ask(number: int, wait: float = 0) -> dict[str, Any]:
            path = f"/internal/events?since={number}&wait={wait}"
            found: dict[str, Any] = http.get(path, headers=headers()).raise_for_status().json()
            return found

        def complete(*prefix: str) -> int:
            body = {"prompt": "x" * 64, "max_tokens": 1}
            return http.post("/v1/completions", json=body, headers=headers(prefix=prefix)).status_code

        first, second = "0" * 15 + "1", "0" * 15 + "2"
        empty = ask(-1)
        assert (empty["reset"], empty["events"]) == (True, [["+"]])
        assert set(empty["load"]) == LOADS
        assert complete(first) == 200
        told = ask(empty["next"], 10)
        assert (told["reset"], told["events"]) == (False, [["+", first]])
        assert complete(first, second) == 200
        assert ask(told["next"])["events"] == [["+", second]]
        assert ask(-1)["events"] == [["+", first, second]]
        assert ask(ask(-1)["next"], 0.05)["events"] == []
        assert complete("xyz") == 400
        before = ask(-1)["next"]
        assert http.post("/reset_prefix_cache").status_code == 200
        empty = ask(before, 10)
        assert (empty["reset"], empty["events"]) == (True, [["+"]])
        assert complete(first) == 200
        told = ask(empty["next"], 10)
        assert (told["reset"], told["events"]) == (False, [["+", first]])
        os.kill(running.engine_pid, signal.SIGKILL)
        after = wait_until(lambda: (found := ask(told["next"]))["reset"] and found)
        assert after["events"] == [["+"]]
    assert running.stop() == 0


def test_queued_are_the_tokens_that_no_cache_holds() -> None:
    """As far as the replica's own belief goes, which it has told to routers."""
    service: Any = SimpleNamespace(metrics=Metrics("m"))
    service.metrics.stats = EngineStats(num_blocks=8, num_free_blocks=8)
    live: list[RequestTimes] = []
    service.engine = SimpleNamespace(
        num_resets=0, num_queued=1, silence=0.0, metrics=service.metrics, live_times=lambda: live,
        config=SimpleNamespace(cache=SimpleNamespace(block_size=16)),
    )  # fmt: skip
    events = Events(service)

    def queued(*prefix: str, tokens: int) -> Any:
        request = Request(id="a", tokens=[1] * tokens, sampling=SamplingParams(), seed=0, max_tokens=1)
        live[:] = [RequestTimes(request, 0.0, events.touch(prefix, tokens))]
        return json.loads(Load(service.engine)())["queued"]

    names = [f"{number:016x}" for number in range(4)]
    assert queued(*names[:2], tokens=40) == 40
    assert queued(*names[:2], tokens=40) == 1
    assert queued(*names[:3], tokens=60) == 20
    assert json.loads(Load(service.engine)())["prefill_rate"] is None
    service.metrics.histograms["request_prefill_kv_computed_tokens"][1].total = 60
    service.metrics.histograms["request_prefill_time_seconds"][1].total = 0.5
    assert json.loads(Load(service.engine)())["prefill_rate"] == 120
    service.engine.num_resets = 1
    assert queued(*names[:3], tokens=60) == 60
