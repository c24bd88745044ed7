"""/v1/programs: one request, events, typed ends whatever happens, sessions of their owners."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import quire.program as sgl
from quire.errors import EngineError, ProgramError, RequestError
from tests.serve.running import Server, start
from tests.serve.test_faults import serving, stats
from tests.waiting import wait_until

FOREVER = {"type": "gen", "name": "x", "max_tokens": 1500, "ignore_eos": True}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def forked(*branches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [text("A"), {"type": "fork", "branches": list(branches)}, {"type": "join"}]


def events_of(http: httpx.Client, steps: list[dict[str, Any]], **more: Any) -> Iterator[dict[str, Any]]:
    """The events of a stream; the last may be an error."""
    body = {"steps": steps, "stream": True, **more}
    with http.stream("POST", "/v1/programs", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    running = start(model="scripted:delay=0.01", api_key=["one", "two"])
    yield running
    running.stop()


@pytest.fixture
def http(slow: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=slow.url, timeout=60, headers={"Authorization": "Bearer one"}) as client:
        yield client


def test_one_request_whatever_its_steps(http: httpx.Client) -> None:
    def figure(pattern: str) -> float:
        found = re.search(rf"^quire:{pattern}\S* (\S+)$", http.get("/metrics").text, re.MULTILINE)
        assert found is not None, pattern
        return float(found[1])

    def posts() -> float:
        found = re.search(
            r'^http_requests_total{handler="/v1/programs",method="POST",status="2xx"} (\S+)$',
            http.get("/metrics").text,
            re.MULTILINE,
        )
        return float(found[1]) if found else 0.0

    before = posts(), figure("program_steps_total"), figure("generation_tokens_total")
    branch = [text(" b"), {"type": "gen", "name": "x", "max_tokens": 3, "ignore_eos": True}]
    steps = [*forked(branch, branch, branch), {"type": "select", "name": "s", "choices": ["p", "q"]}]
    answer = http.post("/v1/programs", json={"steps": steps, "sampling": {"temperature": 0}}).json()
    assert (answer["object"], answer["model"], answer["session"]) == ("program", "scripted", None)
    assert answer["text"] == "A" + answer["variables"]["s"]
    assert len(answer["variables"]["x"]) == 3
    assert sorted(step["lane"] for step in answer["steps"]) == ["", "fork.0", "fork.1", "fork.2"]
    assert answer["usage"]["completion_tokens"] == 9
    after = posts(), figure("program_steps_total"), figure("generation_tokens_total")
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 4, 9]
    assert figure('programs_total.*finished_reason="stop"') >= 1


def test_events_name_lanes_steps_and_variables(http: httpx.Client) -> None:
    branch = [{"type": "gen", "name": "x", "max_tokens": 4, "ignore_eos": True}]
    found = list(events_of(http, forked(branch, branch), sampling={"temperature": 0}))
    assert found[-1]["event"] == "done"
    for lane in ("fork.0", "fork.1"):
        mine = [event for event in found if event.get("lane") == lane]
        assert mine[0]["event"] == "start"
        *texts, end = mine[1:]
        assert {(event["name"], event["step"]) for event in mine} == {("x", 0)}
        assert "".join(event["text"] for event in texts) == end["value"]
        assert (end["event"], end["finish_reason"]) == ("end", "length")
        assert end["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_all_branches(slow: Server, http: httpx.Client, stream: bool) -> None:
    body = {"steps": forked(*[[FOREVER]] * 5), "stream": stream}
    with httpx.Client(base_url=slow.url, timeout=60, headers=http.headers) as leaving:
        if stream:
            with leaving.stream("POST", "/v1/programs", json=body) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/programs", json=body, timeout=httpx.Timeout(60, read=0.5))
    wait_until(lambda: stats(http)["num_running"] == stats(http)["num_programs"] == 0)
    assert stats(http)["num_used_blocks"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_step_that_fails_ends_all_branches(http: httpx.Client, stream: bool) -> None:
    steps = forked([FOREVER], [text(" !poison"), FOREVER], [FOREVER])
    if not stream:
        answer = http.post("/v1/programs", json={"steps": steps})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "program_failed"
        assert "not finite" in answer.json()["error"]["message"]
    else:
        found = list(events_of(http, steps))
        assert found[-1]["error"]["code"] == "program_failed"
        ends = [event for event in found if event.get("event") == "end"]
        assert {(end["lane"], end["finish_reason"]) for end in ends} == {
            (f"fork.{i}", "error") for i in range(3)
        }
    wait_until(lambda: stats(http)["num_running"] == 0)


@pytest.mark.parametrize("fault", ["crash", "kill"])
def test_an_engine_that_dies_ends_all_branches(fault: str) -> None:
    with serving(model="scripted:delay=0.01") as (server, http):
        word = " !crash" if fault == "crash" else ""
        steps = forked([FOREVER], [text(word), FOREVER])
        found = []
        for event in events_of(http, steps):
            found.append(event)
            if fault == "kill" and len(found) == 8:
                os.kill(server.engine_pid, signal.SIGKILL)
        assert found[-1]["error"]["type"] == "engine_error"
        ends = [event for event in found if event.get("event") == "end"]
        assert {(end["lane"], end["finish_reason"]) for end in ends} == {
            ("fork.0", "error"),
            ("fork.1", "error"),
        }
        wait_until(lambda: http.get("/health").status_code == 200)
        assert http.post("/v1/programs", json={"steps": [text("A")]}).json()["text"] == "A"


def test_sessions_belong_to_a_key(slow: Server, http: httpx.Client) -> None:
    first = http.post("/v1/programs", json={"steps": [text("A")], "keep": True}).json()
    body = {"steps": [text("B")], "session": first["session"]}
    with httpx.Client(base_url=slow.url, headers={"Authorization": "Bearer two"}) as other:
        refused = other.post("/v1/programs", json=body)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "session_not_found"
    assert http.post("/v1/programs", json={**body, "keep": True}).json()["text"] == "AB"
    assert http.post("/v1/programs", json=body).json()["text"] == "ABB"
    assert http.post("/v1/programs", json=body).status_code == 404


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"steps": [{"type": "gen", "temprature": 3}]}, "steps[0].temprature"),
        ({"steps": [{"type": "gen", "max_tokens": "x"}]}, "steps[0].max_tokens"),
        ({"steps": [text("x"), {"type": "gen", "regex": "("}]}, "invalid regex"),
        ({"steps": [text("x")], "prompt": "y"}, "begin with a text or role step"),
        ({"steps": [text("x")], "seesion": "y"}, "Did you mean session?"),
    ],
)
def test_refused_with_the_place_of_the_mistake(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    answer = http.post("/v1/programs", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_the_language_over_http(slow: Server, http: httpx.Client) -> None:
    """Straight lines are one request; a session survives an engine that has forgotten it."""
    backend = sgl.RuntimeEndpoint(slow.url, api_key="one")
    asked: list[dict[str, Any]] = []
    real = backend.run_program

    def count(program: Any) -> Any:
        asked.append(program)
        return real(program)

    backend.run_program = count  # type: ignore[method-assign]

    @sgl.function
    def talk(s: Any, decide: bool) -> None:
        s += sgl.user("Hi") + sgl.assistant(sgl.gen("a", max_tokens=5))
        group = s.fork(2)
        group += sgl.gen("b", max_tokens=4)
        if decide and len(s["a"]) < 100:
            backend.end_session(s._root._session)
            group[1] += "!" + sgl.gen("c", max_tokens=3)
        group.join()
        s += "."

    straight = talk.run(decide=False, backend=backend, temperature=0)
    assert len(asked) == 1
    assert straight.messages()[0] == {"role": "user", "content": "Hi"}
    assert straight.text().startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    asked.clear()
    stepped = talk.run(decide=True, backend=backend, temperature=0)
    assert stepped.error() is None
    assert stepped.text() == straight.text()
    assert stepped["b"] == straight["b"]
    assert len(stepped["c"]) == 1
    assert [bool(one.get("session")) for one in asked] == [False, True, True, False]
    streamed = talk.run(decide=False, backend=backend, temperature=0, stream=True)
    assert "".join(streamed.text_iter()) == straight.text()
    broken = sgl.RuntimeEndpoint("http://127.0.0.1:9")
    state = sgl.function(lambda s: s.__iadd__("x" + sgl.gen("a"))).run(backend=broken)
    assert isinstance(state.error(), EngineError)
    with pytest.raises(RequestError, match="Incorrect or missing API key"):
        list(sgl.RuntimeEndpoint(slow.url).run_program({"steps": [text("x")]}))
    with pytest.raises(ProgramError, match="not finite"):
        list(real({"steps": [text("!poison"), FOREVER]}))
