"""The client's events survive any cut, and whatever a server does wrong is a failed request with a reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.client import Client, EventStream, Outcome, Target
from quire.bench.datasets import Sample
from quire.bench.load import Api, Arrivals
from quire.errors import ConfigError, EngineError
from tests.bench.fake_server import fake_server

API = Api("/v1/completions", chat=False, model="fake")
CHAT = Api("/v1/chat/completions", chat=True, model="fake")


def send(
    url: str, api: Api = API, count: int = 1, output_len: int = 5, timeout: float = 10, headers: Any = None
) -> list[Outcome]:
    """`count` requests, one after the other."""

    async def work() -> list[Outcome]:
        client = Client(Target.from_url(url, headers), timeout)
        outcomes = []
        for _ in range(count):
            outcomes.append(Outcome())
            await client.stream(api.endpoint, api.body(Sample("hello", 5, output_len)), outcomes[-1])
        client.close()
        return outcomes

    return asyncio.run(work())


def stream_of(count: int, chat: bool, newline: str) -> bytes:
    def event(value: Any) -> str:
        return f"data: {json.dumps(value, ensure_ascii=False)}{newline}{newline}"

    text = f": ping{newline}{newline}"
    for i in range(count):
        end = "stop" if i == count - 1 else None
        part = {"delta": {"content": f"é{i}\n"}} if chat else {"text": f"é{i}\n"}
        text += event({"choices": [{**part, "finish_reason": end}]})
    text += event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": count}})
    return (text + f"data: [DONE]{newline}{newline}").encode()


@given(st.data(), st.integers(1, 6), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_events_are_the_same_however_they_are_cut(
    data: st.DataObject, count: int, chat: bool, newline: str
) -> None:
    whole = stream_of(count, chat, newline)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=20)))
    outcome = Outcome(start=1.0)
    events = EventStream(outcome)
    for now, (low, high) in enumerate(zip([0, *cuts], [*cuts, len(whole)], strict=True)):
        events.feed(whole[low:high], 2.0 + now)
    events.end(100.0)
    assert outcome.ok
    assert outcome.text == "".join(f"é{i}\n" for i in range(count))
    assert outcome.output_tokens == count
    assert len(outcome.itls) == count - 1
    assert outcome.ttft + sum(outcome.itls) == pytest.approx(outcome.latency)


def test_the_role_alone_is_not_a_token() -> None:
    outcome = Outcome(start=1.0)
    events = EventStream(outcome)
    events.feed(
        b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n', 2.0
    )
    events.feed(b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n', 5.0)
    events.end(6.0)
    assert (outcome.ttft, outcome.itls, outcome.error) == (4.0, [], "")


@pytest.mark.parametrize("api", [API, CHAT], ids=["completions", "chat"])
@pytest.mark.parametrize("split", [None, 1, 7])
@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_a_stream_is_read_whole(api: Api, split: int | None, framing: str) -> None:
    with fake_server(split=split, framing=framing, comment=True, cached_tokens=2) as server:
        for outcome in send(server.url, api, count=2):
            assert outcome.error == ""
            assert outcome.text == "".join(f" t{i}é" for i in range(5))
            assert (outcome.output_tokens, outcome.cached_tokens, len(outcome.itls)) == (5, 2, 4)
            assert 0 < outcome.ttft <= outcome.latency


def test_connections_are_kept_and_used_again() -> None:
    with fake_server() as server:
        assert all(o.ok for o in send(server.url, count=5))
        assert server.behaviour.connections == 1


def test_a_connection_that_the_server_closed_is_replaced() -> None:
    with fake_server(close_idle=True) as server:
        assert all(o.ok for o in send(server.url, count=4))
        assert server.behaviour.connections == 4
        assert len(server.behaviour.requests) == 4


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"fail_every": 1}, "HTTP 503: queue is full"),
        ({"break_after": 3}, "the connection was closed"),
        ({"break_after": 3, "framing": "close", "done": False}, "the stream ended without a finish reason"),
        ({"error_after": 2}, "the engine died"),
        ({"break_after": 0, "framing": "close"}, "the response held no token"),
        ({"key": "secret"}, "HTTP 401: wrong key"),
    ],
)
def test_what_goes_wrong_has_a_reason(behaviour: dict[str, Any], reason: str) -> None:
    with fake_server(**behaviour) as server:
        (outcome,) = send(server.url)
        assert reason in outcome.error


def test_a_stream_that_stalls_times_out() -> None:
    with fake_server(delay=5) as server:
        (outcome,) = send(server.url, timeout=0.3)
        assert outcome.error == "no end after 0.3 s"


def test_no_server_is_said_so() -> None:
    with fake_server() as server:
        url = server.url
    (outcome,) = send(url)
    assert outcome.error

    async def ask() -> None:
        await Client(Target.from_url(url), 5).get("/v1/models")

    with pytest.raises(EngineError, match="is the server running there"):
        asyncio.run(ask())


def test_headers_are_sent_and_never_shown() -> None:
    target = Target.from_url("http://h:1/base/", {"Authorization": "Bearer secret"})
    assert "secret" not in repr(target)
    assert target.head("GET", "/x").startswith(
        b"GET /base/x HTTP/1.1\r\nHost: h:1\r\nAuthorization: Bearer secret"
    )
    with fake_server(key="k") as server:
        (outcome,) = send(server.url, headers={"Authorization": "Bearer k"})
        assert outcome.ok


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://a:b@c", "http://x:notaport"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Target.from_url(url)


def test_a_header_cannot_smuggle_lines() -> None:
    with pytest.raises(ConfigError, match="line break"):
        Target.from_url("http://x", {"a": "b\r\nc: d"})


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0, float("inf")])
@pytest.mark.parametrize("seed", [0, 1])
def test_arrivals_at_a_fixed_rate_take_the_time_they_should(burstiness: float, seed: int) -> None:
    times = Arrivals(rate=10, burstiness=burstiness).times(50, np.random.default_rng(seed))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(5.0)
    gaps = np.diff(times)
    assert burstiness != float("inf") or gaps == pytest.approx(np.full(49, 0.1))


def test_burstiness_orders_how_uneven_arrivals_are() -> None:
    def unevenness(burstiness: float) -> float:
        gaps = np.diff(Arrivals(rate=10, burstiness=burstiness).times(2000, np.random.default_rng(0)))
        return float(np.std(gaps) / np.mean(gaps))

    assert unevenness(0.25) > 1.5 > unevenness(1.0) > 0.7 > unevenness(9.0)


@pytest.mark.parametrize("kind", ["linear", "exponential"])
def test_a_ramp_gets_denser(kind: Any) -> None:
    arrivals = Arrivals(burstiness=float("inf"), ramp_up=kind, start=1, end=20)
    gaps = np.diff(arrivals.times(30, np.random.default_rng(0)))
    assert (np.diff(gaps) < 0).all()
    assert gaps[-1] == pytest.approx(1 / 20)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Arrivals(rate=0),
        lambda: Arrivals(burstiness=0),
        lambda: Arrivals(ramp_up="linear"),
        lambda: Arrivals(start=1.0),
        lambda: Arrivals(rate=5, ramp_up="linear", start=1, end=2),
    ],
)
def test_arrivals_that_make_no_sense_are_refused(make: Callable[[], Arrivals]) -> None:
    with pytest.raises(ConfigError):
        make()
