"""Load, leaving clients, dying engines, shutdown: nothing is lost silently and nothing hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest

from tests.serve import scripted
from tests.serve.running import Server, start
from tests.waiting import stopped, wait_until


@pytest.fixture
def official() -> Iterator[Callable[..., openai.OpenAI]]:
    """Makes OpenAI's client for a server; all are closed in the end."""
    with ExitStack() as clients:

        def make(server: Server, max_retries: int = 0, api_key: str = "-") -> openai.OpenAI:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=max_retries)
            return clients.enter_context(client)

        yield make


Official = Callable[..., openai.OpenAI]
LONG = {"prompt": "!forever", "max_tokens": 2000, "ignore_eos": True}


@contextmanager
def serving(**options: object) -> Iterator[tuple[Server, httpx.Client]]:
    server = start(**options)
    try:
        with server.client as http:
            yield server, http
    finally:
        server.stop()


def status_of(http: httpx.Client, path: str = "/health") -> int:
    return http.get(path).status_code


def stats(http: httpx.Client) -> dict[str, int]:
    return http.get("/stats").json()  # type: ignore[no-any-return]


def raw(server: Server, body: dict[str, object]) -> socket.socket:
    """A request whose answer is not read."""
    where = urlsplit(server.url)
    data = json.dumps(body).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    )
    head = "\r\n".join(lines) + "\r\n\r\n"
    connection = socket.create_connection((where.hostname, where.port), timeout=60)
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    with serving(model="scripted:delay=0.1") as (server, http):
        connection = raw(server, {**LONG, "stream": stream, "n": 3})
        wait_until(lambda: stats(http)["num_running"] == 3)
        connection.close()
        wait_until(lambda: stats(http)["num_running"] == 0)  # by itself it would end after 200 s
        now = stats(http)
        assert now["num_used_blocks"] == now["num_waiting"] == 0
        steps = now["num_steps"]
        time.sleep(0.3)
        assert stats(http)["num_steps"] == steps
        wait_until(lambda: http.get("/load").json() == {"server_load": 0})
        assert 'request_success_total{engine="0",finished_reason="abort"' in http.get("/metrics").text


def test_a_slow_reader_holds_up_nobody_and_gets_everything() -> None:
    with serving() as (server, http):
        body = {**LONG, "stream": True, "logprobs": 20, "n": 20}
        slow = raw(server, body)
        for i in range(20):
            answer = http.post("/v1/completions", json={"prompt": f"quick {i}", "max_tokens": 50}).json()
            assert answer["usage"]["completion_tokens"] == 50
        wait_until(lambda: stats(http)["num_running"] == 0, 300)  # the engine does not wait for the reader
        slow.settimeout(60)
        received = b""
        while b"[DONE]" not in received[-200:]:
            part = slow.recv(1 << 20)
            assert part
            received += part
        slow.close()
        tokens = 0
        for line in received.replace(b"\r\n", b"\n").split(b"\n"):
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                tokens += sum(len(choice["logprobs"]["tokens"]) for choice in choices)
        assert tokens == 20 * 2000


def test_a_killed_engine_is_replaced_and_running_requests_get_typed_errors(
    official: Official, tmp_path: Path
) -> None:
    with serving(model="scripted:delay=0.05", download_dir=str(tmp_path)) as (server, http):
        client = official(server)
        stream = client.completions.create(
            model="scripted", stream=True, extra_body={"ignore_eos": True}, **LONG_OPENAI
        )
        next(iter(stream))
        failed: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: failed.append(server.post("/v1/completions", LONG)))
        waiting.start()
        wait_until(lambda: stats(http)["num_running"] == 2)
        first = server.engine_pid
        (tmp_path / "held").touch()
        os.kill(first, signal.SIGKILL)
        with stream, pytest.raises(openai.APIError, match="killed by signal 9") as caught:
            list(stream)
        assert caught.value.code == "engine_error"
        waiting.join()
        assert failed[0].status_code == 500
        assert failed[0].json()["error"]["type"] == "engine_error"
        assert status_of(http) == 503
        refused = http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        (tmp_path / "held").unlink()
        wait_until(lambda: status_of(http) == 200)
        assert server.engine_pid != first
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5}).status_code == 200
        assert "quire:engine_restarts_total" in http.get("/metrics").text


LONG_OPENAI = {"prompt": "!forever", "max_tokens": 2000}


def test_the_official_client_outlasts_a_restart_by_itself(official: Official, tmp_path: Path) -> None:
    with serving(download_dir=str(tmp_path)) as (server, http), ThreadPoolExecutor(1) as pool:
        client = official(server, max_retries=100)
        (tmp_path / "held").touch()
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: status_of(http) == 503)
        answer = pool.submit(client.completions.create, model="scripted", prompt="x", max_tokens=4)
        refused = 'handler="/v1/completions",method="POST",status="5xx"'
        wait_until(lambda: refused in http.get("/metrics").text)
        (tmp_path / "held").unlink()
        assert answer.result().choices[0].text


def test_a_crash_by_one_request_restarts_and_says_so() -> None:
    with serving() as (_, http):
        answer = http.post("/v1/completions", json={"prompt": "!raise", "max_tokens": 9})
        assert answer.status_code == 500
        assert "a kernel failed" in answer.json()["error"]["message"]
        wait_until(lambda: status_of(http) == 200)


def test_a_server_whose_engine_never_starts_again_ends(tmp_path: Path) -> None:
    server = start(download_dir=str(tmp_path))
    (tmp_path / "broken").touch()
    os.kill(server.engine_pid, signal.SIGKILL)
    assert server.wait(300) == 1
    assert "start 5 of 5 failed: scripted to break" in server.log
    assert "giving up" in server.log


def test_the_engine_goes_with_a_killed_server() -> None:
    server = start()
    engine = psutil.Process(server.engine_pid)
    server.process.kill()
    server.wait()
    psutil.wait_procs([engine], timeout=60)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_a_full_queue_is_503_with_retry_after(official: Official) -> None:
    with serving(model="scripted:delay=0.05", max_num_seqs=1, max_num_queued_reqs=2) as (server, http):
        running = raw(server, {**LONG, "stream": True})
        wait_until(lambda: stats(http)["num_running"] == 1)
        queued = [raw(server, {**LONG, "stream": True}) for _ in range(2)]
        wait_until(lambda: http.get("/stats").json()["requests_queued"] == 2)
        answer = http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) >= 1
        client = official(server)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x"}])
        assert 'admission_rejections_total{engine="0",model_name="scripted",reason="queue_full"} 2.0' in (
            http.get("/metrics").text
        )
        for connection in (running, *queued):
            connection.close()
        wait_until(
            lambda: http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        )


def test_a_request_that_takes_too_long_is_ended() -> None:
    with serving(model="scripted:delay=0.02", request_timeout=1.0) as (_, http):
        answer = http.post("/v1/completions", json=LONG)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        streamed = http.post("/v1/completions", json={**LONG, "stream": True}).text
        assert '"code":"timeout"' in streamed
        assert streamed.endswith("data: [DONE]\n\n")
        wait_until(lambda: stats(http)["num_running"] == 0)


def test_silence_is_bridged_where_asked_for() -> None:
    with serving(sse_keep_alive_interval=0.05) as (server, http), ExitStack() as stack:
        stack.enter_context(stopped(server.engine_pid))
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            parts = answer.iter_text()
            text = next(parts)
            stack.close()
            text += "".join(parts)
        assert text.startswith(": keep-alive\n\n")
        assert text.endswith("data: [DONE]\n\n")


def test_sigterm_lets_running_requests_finish(official: Official) -> None:
    server = start(model="scripted:delay=0.01", shutdown_timeout=300.0)
    client = official(server)
    stream = client.completions.create(
        model="scripted",
        prompt="!forever",
        max_tokens=300,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    chunks = [next(iter(stream))]
    with server.client as http, stopped(server.engine_pid):
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: status_of(http) == 503)
        refused = http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
    chunks += list(stream)
    # A reader that falls behind gets several tokens in one chunk, so the tokens are what counts.
    tokens = [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids]
    assert tokens == scripted.script_of("!forever", 300)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.wait() == 0


def test_sigterm_ends_what_takes_longer_than_it_may() -> None:
    server = start(model="scripted:delay=0.02", shutdown_timeout=0.3)
    with (
        server.client as http,
        http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = "\n".join(lines)
    assert '"type":"engine_error"' in rest
    assert "the server was stopped" in rest
    assert server.wait() == 0


def test_a_second_signal_stops_at_once() -> None:
    server = start(model="scripted:delay=0.1", shutdown_timeout=1000.0)
    connection = raw(server, {**LONG, "stream": True})
    with server.client as http:
        wait_until(lambda: stats(http)["num_running"] == 1)
    server.process.send_signal(signal.SIGTERM)
    server.process.send_signal(signal.SIGTERM)  # the same again, at once: counts once
    time.sleep(0.2)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0  # the request would take 200 s
    connection.close()


def test_sighup_drains_too() -> None:
    server = start()
    server.process.send_signal(signal.SIGHUP)
    assert server.wait() == 0
    assert "SIGHUP: no new requests" in server.log


def test_keys_guard_all_but_what_probes_ask(tmp_path: Path, official: Official) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file\n")
    with serving(api_key=["secret-a", "secret-b"], api_key_file=str(file)) as (server, http):
        for path in (
            "/health",
            "/ping",
            "/version",
            "/metrics",
            "/",
            "/dashboard/reference",
            "/openapi.json",
        ):
            assert http.get(path).status_code == 200, path
        for path in ("/v1/models", "/load", "/stats", "/nothing"):
            answer = http.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert http.post("/tokenize", json={"prompt": "x"}).status_code == 401
        assert http.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
        for key in ("secret-a", "secret-b", "from-file"):
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
            assert http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
        for bad in ("secret-c", "secret-", "Secret-a", "x", "sécret".encode().decode("latin-1")):
            headers = [(b"Authorization", b"Bearer " + bad.encode("latin-1"))]
            assert http.get("/v1/models", headers=headers).status_code == 401
        assert http.get("/v1/models", headers={"Authorization": "Basic secret-a"}).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            official(server, api_key="bad").models.list()
        preflight = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
        assert http.options("/v1/completions", headers=preflight).status_code == 200
        log = server.log
    assert "secret" not in log
    assert "from-file" not in log


@pytest.mark.parametrize("share", [False, True])
def test_users_with_different_keys_share_no_cached_prefix(share: bool) -> None:
    """How many tokens are cached, and how fast, would tell one user what another has sent."""
    with serving(api_key=["one", "two"], share_prefix_cache=share) as (_, http):

        def num_cached(key: str, path: str, **fields: object) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            usage = http.post(path, json={"max_tokens": 1, **fields}, headers=headers).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        for path, body in (
            ("/v1/completions", {"prompt": "a secret " * 9}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a secret " * 9}]}),
        ):
            assert num_cached("one", path, **body) == 0
            assert num_cached("one", path, **body) > 0
            assert (num_cached("two", path, **body) > 0) == share
            assert num_cached("two", path, **body) > 0
            assert num_cached("one", path, cache_salt="mine", **body) == 0


def test_a_unix_socket_and_a_proxy_prefix(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    server = start(uds=str(path), root_path="/llm")
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://localhost") as http:
        assert http.get("/health").status_code == 200
        assert http.get("/llm/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    with pytest.raises(AssertionError, match="another server is listening"):
        start(uds=str(path))
    assert server.stop() == 0
    assert not path.exists()


def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    try:
        subprocess.run(
            [*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("needs the openssl program")
    with serving(ssl_keyfile=str(key), ssl_certfile=str(certificate)) as (server, _):
        assert server.url.startswith("https://")
        assert httpx.get(f"{server.url}/health", verify=False).status_code == 200


def test_a_port_that_is_taken_is_told_before_anything_is_loaded() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(AssertionError, match=r"cannot listen: .*; change --port"),
    ):
        start(port=taken.getsockname()[1])


def test_what_keeps_the_engine_from_starting_is_told() -> None:
    with pytest.raises(AssertionError, match="scripted to fail"):
        start(model="scripted:fail=1")


def test_the_start_is_logged_and_its_phases_add_up() -> None:
    with serving(model="scripted:start=0.2", log_format="json", enable_log_requests=True) as (server, http):
        headers = {"X-Request-Id": "traced"}
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}, headers=headers)
        server.lines_with("request done")
        entries = [json.loads(line) for line in server.lines]
        ready = next(e["message"] for e in entries if e["message"].startswith("ready in"))
        total, *parts = [float(x) for x in re.findall(r"(\d+\.\d+) s", ready)]
        assert total == pytest.approx(sum(parts), abs=1e-6)
        assert total >= 0.2
        assert float(ready.partition("learning the script ")[2].split()[0]) >= 0.2
        done = next(e for e in entries if e["message"] == "request done")
        assert done["request_id"] == "cmpl-traced"
        assert (done["prompt_tokens"], done["output_tokens"], done["finish_reason"]) == (1, 3, "length")
        assert 0 <= done["queue_s"] <= done["ttft_s"] <= done["total_s"]


def test_metrics_count_exactly() -> None:
    with serving(metrics_prefix="vllm") as (_, http):
        for i in range(10):
            http.post("/v1/completions", json={"prompt": f"prompt {i}", "max_tokens": 10, "ignore_eos": True})
        text = http.get("/metrics").text
    label = '{engine="0",model_name="scripted"}'
    for name, value in (
        ("inter_token_latency_seconds_count", 90),
        ("iteration_tokens_total_count", 100),
        ("iteration_tokens_total_sum", 10 * (8 + 10)),
        ("time_to_first_token_seconds_count", 10),
        ("e2e_request_latency_seconds_count", 10),
        ("request_queue_time_seconds_count", 10),
        ("request_inference_time_seconds_count", 10),
        ("request_prefill_time_seconds_count", 10),
        ("request_decode_time_seconds_count", 10),
        ("request_prompt_tokens_sum", 80),
        ("request_generation_tokens_sum", 100),
        ("request_params_n_count", 10),
        ("request_params_max_tokens_sum", 100),
        ("request_num_preemptions_count", 10),
        ("prompt_tokens_total", 80),
        ("generation_tokens_total", 100),
        ("num_requests_running", 0),
        ("num_requests_waiting", 0),
        ("kv_cache_usage_perc", 0),
        ("num_preemptions_total", 0),
        ("prefix_cache_queries_total", 80),
        ("prefix_cache_hits_total", 0),
    ):
        assert f"vllm:{name}{label} {float(value)}" in text, name
    assert (
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="scripted"} 10.0' in text
    )
    assert "vllm:num_requests_waiting_by_reason{" in text
    assert 'kv_cache_size_tokens="65536"' in text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 10.0' in text


@pytest.mark.parametrize(("seconds", "open_after"), [(75, True), (1, False)])
def test_idle_connections_are_kept_for_the_configured_time(seconds: int, open_after: bool) -> None:
    """The default outlasts the 5 s that httpx keeps idle connections, so a client never reuses one that closes."""

    def ask(connection: socket.socket) -> None:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come apart
            answer += connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200 ")

    with serving(**({} if seconds == 75 else {"timeout_keep_alive": seconds})) as (server, _):
        where = urlsplit(server.url)
        with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
            ask(connection)
            if open_after:
                connection.settimeout(5.5)
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                connection.settimeout(60)
                ask(connection)
            else:
                assert connection.recv(1) == b""
