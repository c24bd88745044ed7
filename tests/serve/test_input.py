"""Anything can arrive: each answer is a 4xx in the API's shape, never a 500, never a hang."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from quire.serve import bodies
from quire.serve.errors import HttpError
from tests.serve.running import Server

JSON = {"Content-Type": "application/json"}
POSTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/programs",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/tokenize",
    "/detokenize",
)


def refused(answer: httpx.Response) -> dict[str, object]:
    """The error of a refusal in OpenAI's or Anthropic's shape."""
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"{}",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800", "input": "\\ud800", "messages": "\\ud800"}',
        b'{"prompt": 1, "messages": 1, "input": 1, "tokens": 1}',
        b'{"messages": [1], "input": [1.5], "prompt": {}, "tokens": ["a"]}',
        b'{"messages": [{}], "input": [{}], "prompt": [null], "tokens": [-1]}',
        b'{"model": 7}',
        b'{"zzz": 1}',
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": ' + b'{"a":' * 50_000,
        b'{"prompt": "x", "input": "x", "max_tokens": 1e400}',
        b'{"prompt": "x", "seed": 99999999999999999999999999}',
        b"x" * 10_000,
    ],
)
def test_malformed_bodies(http: httpx.Client, path: str, body: bytes) -> None:
    answer = http.post(path, content=body, headers=JSON)
    if b"seed" in body and path == "/tokenize":  # which has no seed
        assert answer.headers["x-ignored-fields"] == "seed"
        return
    refused(answer)


def test_deep_values_where_anything_is_allowed(http: httpx.Client) -> None:
    value: object = 1
    for _ in range(300):
        value = {"a": value}
    hello = [{"role": "user", "content": "x"}]
    for fields in (
        {"chat_template_kwargs": value},
        {"documents": [value]},
        {"tools": [value], "tool_choice": "none"},
    ):
        refused(http.post("/v1/chat/completions", json={"messages": hello, "max_tokens": 1, **fields}))


def test_a_body_that_is_too_large(server: Server, http: httpx.Client) -> None:
    assert http.post("/v1/completions", content=b"x" * (2 << 20), headers=JSON).status_code == 413

    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    try:
        with httpx.Client(base_url=server.url) as other:
            assert other.post("/v1/completions", content=parts(), headers=JSON).status_code == 413
    except httpx.WriteError:
        pass  # closed while still sending: refused as well


def test_a_body_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT", 0.01)

    async def receive() -> Any:
        await asyncio.sleep(20)

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(HttpError, match=r"did not arrive within 0\.01 s") as raised:
        asyncio.run(bodies.read_body(Request(scope, receive), 1024))
    assert raised.value.status == 408


def test_a_content_type_that_is_not_json(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b"prompt=x", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    assert http.get("/v1/nothing").status_code == 404
    refused(http.get("/v1/nothing"))
    answer = http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "said"),
    [("/generate", "quire-compat"), ("/encode", "/v1/embeddings"), ("/info", "archived TGI")],
)
@pytest.mark.skipif(bool(entry_points(group="quire.endpoints")), reason="quire-compat serves some of them")
def test_paths_of_other_servers_say_what_to_do(http: httpx.Client, path: str, said: str) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 404
    assert said in answer.json()["error"]["message"]


def test_broken_http_is_answered_and_closed(server: Server) -> None:
    where = urlsplit(server.url)
    for raw in (
        b"GARBAGE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Content-Type: application/json\r\n\r\n{}{}{",
    ):
        with socket.create_connection((where.hostname, where.port), timeout=60) as raw_socket:
            raw_socket.sendall(raw)
            raw_socket.settimeout(60)
            assert b" 400 " in raw_socket.recv(4096).split(b"\r\n")[0]


def test_a_request_id_that_could_forge_log_lines_is_not_taken(http: httpx.Client) -> None:
    assert http.get("/version", headers={"X-Request-Id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    assert http.get("/version", headers={"X-Request-Id": "a b"}).headers["x-request-id"] != "a b"
    body = {"prompt": "x", "max_tokens": 1}
    assert http.post("/v1/completions", json=body, headers={"X-Request-Id": "q"}).json()["id"] == "cmpl-q"
    assert http.post("/v1/completions", json={**body, "request_id": "r"}).json()["id"] == "cmpl-r"
    refused(http.post("/v1/completions", json={**body, "request_id": "a\nb"}))


def test_the_same_request_id_twice_at_once(http: httpx.Client) -> None:
    body = {"prompt": ["x", "y"], "max_tokens": 5, "request_id": "same"}
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as one:
        assert http.post("/v1/completions", json=body).status_code == 200
        assert b"[DONE]" in b"".join(one.iter_bytes())


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "n",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "stream",
        "echo",
        "top_k",
    ]
    + [
        "stop_token_ids",
        "min_tokens",
        "prompt_logprobs",
        "priority",
        "tools",
        "response_format",
        "stream_options",
    ]
    + [
        "bad_words",
        "truncate_prompt_tokens",
        "continue_final_message",
        "chat_template_kwargs",
        "documents",
        "model",
    ]
    + [
        "input",
        "tokens",
        "text",
        "include",
        "metadata",
        "system",
        "stop_sequences",
        "max_output_tokens",
        "messages",
    ]
    + ["prompt", "pooling", "dimensions", "encoding_format", "cache_salt", "request_id", "user"]
    + ["steps", "lanes", "sampling", "session", "keep"]
    + ["text_1", "text_2", "query", "documents", "top_n", "truncate_prompt_tokens"]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(POSTS), fields=st.dictionaries(FIELDS, ANYTHING, max_size=3))
def test_any_values_in_known_fields(http: httpx.Client, path: str, fields: dict[str, object]) -> None:
    base: dict[str, object] = {
        "/v1/completions": {"prompt": "x", "max_tokens": 3},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
        "/v1/responses": {"input": "x", "max_output_tokens": 3},
        "/v1/messages": {
            "model": "scripted",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 3,
        },
        "/v1/messages/count_tokens": {"model": "scripted", "messages": [{"role": "user", "content": "x"}]},
        "/v1/programs": {"steps": [{"type": "text", "text": "x"}, {"type": "gen", "max_tokens": 2}]},
        "/v1/embeddings": {"input": "x"},
        "/pooling": {"input": "x"},
        "/classify": {"input": "x"},
        "/score": {"text_1": "x", "text_2": ["y"]},
        "/rerank": {"query": "x", "documents": ["y"]},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }[path]
    content = json.dumps({**base, **fields}).encode()  # type: ignore[dict-item]
    answer = http.post(path, content=content, headers=JSON)
    assert answer.status_code < 500, answer.text


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(POSTS), body=st.binary(max_size=60))
def test_any_bytes(http: httpx.Client, path: str, body: bytes) -> None:
    assert 400 <= http.post(path, content=body, headers=JSON).status_code < 500


def test_tokenize_and_back(http: httpx.Client) -> None:
    text = "grüße 🙂"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == len(text.encode())
    assert answer["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"].endswith("assistant\n")
    refused(http.post("/detokenize", json={"tokens": [100_000]}))
    refused(http.post("/tokenize", json={"prompt": "x", "messages": [{"role": "user", "content": "x"}]}))
