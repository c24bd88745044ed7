"""What operators read: log lines with ids, the reasons of refusals, throughput, metrics in both formats; HEAD."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from quire.client.metrics import Metrics
from quire.engine.log import JsonFormatter, TextFormatter
from quire.serve.options import ServerConfig
from quire.serve.throughput import Throughput
from quire.types import EngineStats
from tests.serve.running import Server, start
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start(log_format="json", log_level="debug", api_key=["sk-1"])
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"x-api-key": "sk-1"}, timeout=120) as client:
        yield client


def lines_of(server: Server, request_id: str, logger: str) -> list[dict[str, Any]]:
    """The lines of a logger about one request, once there is one."""

    def found() -> list[dict[str, Any]]:
        entries = [json.loads(line) for line in list(server.lines) if line.startswith("{")]
        return [e for e in entries if e.get("request_id") == request_id and e["logger"] == logger]

    return wait_until(found)


def test_access_lines_have_parts_and_the_id_of_the_header(server: Server, http: httpx.Client) -> None:
    http.get("/v1/models?x=1", headers={"x-request-id": "looked-1"})
    (line,) = lines_of(server, "looked-1", "uvicorn.access")
    assert (line["method"], line["path"], line["status"]) == ("GET", "/v1/models?x=1", 200)
    assert line["message"].endswith('"GET /v1/models?x=1 HTTP/1.1" 200')
    assert line["client"].startswith("127.0.0.1:")


def test_every_refusal_is_logged_with_its_reason(server: Server, http: httpx.Client) -> None:
    wrong = {"prompt": "x", "temperature": -1}
    answer = http.post("/v1/completions", json=wrong, headers={"x-request-id": "wrong-1"})
    (line,) = lines_of(server, "wrong-1", "quire.serve")
    assert line["level"] == "debug"
    assert line["message"] == f"refused: {answer.json()['error']['message']}"
    assert (line["status"], line["param"]) == (400, "temperature")
    httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "no-key"})
    (line,) = lines_of(server, "no-key", "quire.serve")
    assert line["status"] == 401
    assert "sk-1" not in server.log


def test_head_is_get_without_a_body(server: Server, http: httpx.Client) -> None:
    for path in ("/health", "/version", "/v1/models", "/metrics", "/", "/openapi.json", "/nowhere"):
        found, whole = http.head(path), http.get(path)
        assert found.status_code == whole.status_code, path
        assert not found.content
        assert found.headers["content-type" if whole.content else "date"]
    assert http.head("/v1/completions").status_code == 405
    assert http.head("/dashboard/events").status_code == 200
    assert httpx.head(f"{server.url}/v1/models").status_code == 401
    text = http.get("/metrics").text
    assert 'http_requests_total{handler="/health",method="HEAD",status="2xx"} 1.0' in text


def test_metrics_come_as_the_scraper_asks(http: httpx.Client) -> None:
    plain = http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert f"\n{name} " in plain.text
        assert f"\nquire_engine_{name} " in plain.text
    accept = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75"
    asked = http.get("/metrics", headers={"accept": accept})
    assert asked.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in text_string_to_metric_families(asked.text)}
    assert families["quire:generation_tokens"].type == "counter"
    assert families["quire:time_to_first_token_seconds"].type == "histogram"
    for odd in (
        "application/openmetrics-text;version=x",
        "\u00e4".encode("latin-1"),
        "application/openmetrics-text",
    ):
        assert http.get("/metrics", headers={"accept": odd}).status_code == 200


def test_throughput_is_told_while_there_is_some() -> None:
    now = 100.0
    metrics = Metrics("m")
    told = Throughput(metrics, lambda: now)
    now += 10
    assert told.line() is None
    metrics.prompt_tokens, metrics.generation_tokens = 500, 1230
    metrics.stats = EngineStats(
        num_running=3, num_waiting=2, num_used_blocks=5, num_blocks=20, prefix_queries=400, prefix_hits=100
    )
    now += 10
    assert told.line() == (
        "prompts 50.0 tokens/s, generation 123.0 tokens/s, running 3, waiting 2, KV cache 25.0% used, "
        "prefix cache hits 25.0%"
    )
    metrics.stats = EngineStats(prefix_queries=400, prefix_hits=100)
    now += 10
    assert told.line() is None


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerConfig().api_keys() == ()
    monkeypatch.setenv("VLLM_API_KEY", "one")
    assert ServerConfig().api_keys() == ("one",)
    monkeypatch.setenv("QUIRE_API_KEY", "two")
    assert ServerConfig().api_keys() == ("two", "one")
    assert ServerConfig(api_key=("three",)).api_keys() == ("three",)


@pytest.mark.parametrize(
    "hostile", ["x\n23:59:59.000 ERROR quire.serve: FAKE", "\r\x1b[31m", "a\u2028b", "\x85\u202e"]
)
def test_no_text_forges_a_line(hostile: str) -> None:
    record = logging.LogRecord("quire.serve", logging.INFO, "", 0, "%s", (hostile,), None)
    record.fields = {"prompt": hostile}
    line = TextFormatter().format(record)
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    assert json.loads(JsonFormatter().format(record))["prompt"] == hostile
    try:
        raise ValueError(hostile)
    except ValueError:
        record.exc_info = sys.exc_info()
    lines = TextFormatter().format(record).split("\n")
    assert all(one.isprintable() for one in lines)
    assert all(one.startswith("  ") for one in lines[1:])
