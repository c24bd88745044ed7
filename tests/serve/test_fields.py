"""The tables of fields: they match the bodies and the docs, and requests are read by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.serve.app import ENDPOINTS
from quire.serve.field_docs import TABLES, page
from quire.serve.fields.shapes import Fields
from quire.spelling import near
from tests.serve.running import start

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/chat/completions/input_tokens": {"messages": HELLO},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"model": "scripted", "messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "scripted", "messages": HELLO},
    "/v1/programs": {"steps": [{"type": "text", "text": "x"}, {"type": "gen", "max_tokens": 2}]},
    "/v1/embeddings": {"input": "x"},
    "/pooling": {"input": "x"},
    "/score": {"text_1": "x", "text_2": ["y"]},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
BY_PATH = {fields.path: fields for fields in TABLES}


@pytest.mark.parametrize("fields", TABLES, ids=lambda fields: fields.path)
def test_tables_list_the_fields_of_the_bodies(fields: Fields) -> None:
    assert set(fields.taken) == set(fields.body.__struct_fields__)
    assert len(fields.names) == len(set(fields.names))
    assert set(fields.inner) <= set(fields.taken)


def test_every_endpoint_with_a_body_has_a_table() -> None:
    same = {"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"}
    assert {same.get(e.path, e.path): e.body for e in ENDPOINTS} == {f.path: f.body for f in TABLES}


def test_the_page_is_what_the_tables_say() -> None:
    assert Path("docs/fields.md").read_text() == page(), (
        "run: python -m quire.serve.field_docs > docs/fields.md"
    )


@pytest.mark.parametrize("path", BODIES)
def test_null_is_absent_everywhere(http: httpx.Client, path: str) -> None:
    fields = BY_PATH[path]
    body = {**dict.fromkeys(fields.names), **BODIES[path]}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers


@pytest.mark.parametrize("path", BODIES)
def test_what_nobody_knows_is_ignored_and_named(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={**BODIES[path], "flux_capacity": {"a": 1}, "zig": None})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == "flux_capacity"


@pytest.mark.parametrize("path", BODIES)
def test_a_near_miss_is_refused_with_the_name_that_was_meant(http: httpx.Client, path: str) -> None:
    wrong = {"promt": "prompt", "messagess": "messages", "inputt": "input", "modle": "model"}
    meant = next((k, v) for k, v in wrong.items() if v in BY_PATH[path].names)
    answer = http.post(path, json={**BODIES[path], meant[0]: "x"})
    assert answer.status_code == 400
    assert f"Did you mean {meant[1]}?" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("value", "code"), [(-1, "invalid_value"), (2e6, "invalid_value"), ("hot", "invalid_type")]
)
def test_a_wrong_value_is_refused_by_the_words_of_its_field(
    http: httpx.Client, value: object, code: str
) -> None:
    answer = http.post("/v1/chat/completions", json={**BODIES["/v1/chat/completions"], "temperature": value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "temperature", code), error
    assert error["message"].startswith("temperature must be a number in [0, 1000000], or None, got ")
    assert error["message"].endswith("(0 takes the likeliest token)")


def test_slips_that_are_seen() -> None:
    known = ("temperature", "top_p", "top_k", "max_tokens", "stop", "model", "presence_penalty")
    slips = {
        "temprature": "temperature",
        "tempearture": "temperature",
        "topK": "top_k",
        "maxTokens": "max_tokens",
        "max_token": "max_tokens",
        "presence-penalty": "presence_penalty",
        "modle": "model",
    }
    assert {slip: near(slip, known) for slip in slips} == slips
    for other in ("top_n", "seed", "mode", "step", "min_tokens_to_keep", "x" * 5000):
        assert near(other, known) is None, other


def test_ignored_fields_are_counted(http: httpx.Client) -> None:
    def count() -> float:
        name = 'quire:request_ignored_fields_total{engine="0",handler="/tokenize"'
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    before = count()
    http.post("/tokenize", json={"prompt": "x", "flux_one": 1, "flux_two": 2})
    assert count() == before + 2


def test_inner_fields(http: httpx.Client) -> None:
    talk = {"role": "user", "content": [{"type": "text", "text": "x", "weird": 1}], "mood": "gloomy"}
    schema = {"name": "n", "strict": True, "schema": {}, "zeal": 1}
    body = {
        "messages": [talk],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": None, "include_obfuscation": False, "bogus": 3},
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-ignored-fields"].split(", ")) == {
        "messages[0].content[0].weird",
        "messages[0].mood",
        "stream_options.bogus",
        "response_format.json_schema.zeal",
    }
    body["stream_options"] = {"include_usge": True}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "stream_options.include_usge"
    assert "stream_options.include_usage" in error["message"]


def test_names_in_the_header_are_harmless(http: httpx.Client) -> None:
    odd = {"a\r\nSet-Cookie: x": 1, "ключ": 2, "y" * 500: 3, **{f"zz{i}": i for i in range(50)}}
    answer = http.post("/tokenize", json={"prompt": "x", **odd})
    shown = answer.headers["x-ignored-fields"].split(", ")
    assert shown[0] == "a??Set-Cookie??x"
    assert "set-cookie" not in answer.headers
    assert len(shown) == 32
    assert max(map(len, shown)) <= 64


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 1.0, "mirostat": 0, "top_a": 0, "use_beam_search": False, "kv_transfer_params": {}},
        {"vllm_xargs": {}, "mm_processor_kwargs": {}, "modalities": ["text"]},
        {
            "metadata": {"a": {"b": 1}},
            "prompt_cache_retention": "24h",
            "verbosity": "low",
            "input_type": "query",
        },
        {"service_tier": "flex", "store": True, "safety_identifier": "x", "enable_thinking": False},
    ],
)
def test_what_changes_no_token_is_accepted(http: httpx.Client, fields: dict[str, Any]) -> None:
    plain = {**BODIES["/v1/chat/completions"], "temperature": 0}
    answer = http.post("/v1/chat/completions", json={**plain, **fields})
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    same = http.post("/v1/chat/completions", json=plain).json()
    assert answer.json()["choices"] == same["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"typical_p": 0.5}, "typical_p"),
        ({"mirostat": 2}, "mirostat"),
        ({"top_a": 0.2}, "top_a"),
        ({"extra_body": {"top_k": 3}}, "extra_body"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": {"a": 1}, "text": "x"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]}, "messages"),
    ],
)
def test_what_would_change_the_answer_is_refused(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/chat/completions", json={**BODIES["/v1/chat/completions"], **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


ANSWERS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
# Fields of the answers' bodies that an endpoint may leave out: they choose what is reported or who runs first.
REPORTS = {
    "add_special_tokens", "include", "logprob_token_ids", "metadata", "parallel_tool_calls", "return_metrics",
    "return_prompt_text", "return_tokens_as_token_ids", "spaces_between_special_tokens", "stream_options",
    "top_logprobs", "user", "beam_width", "early_stopping",
}  # fmt: skip


def test_a_field_of_one_answer_is_known_to_all() -> None:
    """No endpoint leaves out in silence what another takes and what would change the answer."""
    every = {name for path in ANSWERS for name in BY_PATH[path].taken}
    for path in ANSWERS:
        assert every - set(BY_PATH[path].names) <= REPORTS, path


# What users of other servers send, with the value of one who means it.
FOREIGN: dict[str, Any] = {
    "reasoning": {"effort": "high"}, "thinking": {"type": "nonsense"}, "reasoning_budget": 5, "adapter_id": "x",
    "lora": [{"id": 0, "scale": 1}], "truncate": 4, "input_ids": [1, 2], "num_beams": 4, "do_sample": False,
    "options": {"temperature": 0}, "parameters": {"top_k": 1}, "generation_config": {"top_k": 1}, "think": False,
    "candidate_count": 2, "n_predict": 3, "typical_p": 0.5, "stop_strings": ["x"], "grammar_lazy": True,
    "eos_token_id": 3, "images": ["aGk="], "audio": {"voice": "x"}, "modalities": ["audio"],
    "response_mime_type": "application/json", "return_full_text": True, "best_of": 3, "max_length": 4,
}  # fmt: skip


@pytest.mark.parametrize("path", ANSWERS)
def test_what_other_servers_would_do_is_refused(http: httpx.Client, path: str) -> None:
    for name, value in FOREIGN.items():
        if name not in BY_PATH[path].taken or name == "thinking":
            answer = http.post(path, json={**BODIES[path], name: value})
            assert answer.status_code == 400, (path, name, answer.text)


@pytest.mark.parametrize("value", [{"a": 1}, ["text"], 7])
def test_a_type_that_is_no_text_is_refused_everywhere(http: httpx.Client, value: object) -> None:
    part, tool = {"type": value, "text": "x"}, {"type": value, "name": "f", "function": {"name": "f"}}
    named = {"type": "function", "function": {"name": "f"}}
    talk = [{"role": "user", "content": [part]}]
    chat, messages = {"messages": HELLO}, {"model": "scripted", "messages": HELLO, "max_tokens": 2}
    for path, body in (
        ("/v1/chat/completions", {"messages": talk}),
        ("/v1/chat/completions", {**chat, "tools": [tool]}),
        ("/v1/chat/completions", {**chat, "tools": [named], "tool_choice": {"type": value}}),
        ("/v1/chat/completions", {**chat, "response_format": {"type": value}}),
        ("/v1/responses", {"input": talk}),
        ("/v1/responses", {"input": [{**talk[0], "type": value}]}),
        ("/v1/responses", {"input": "x", "tools": [tool]}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": value}}}),
        ("/v1/messages", {**messages, "messages": talk}),
        ("/v1/messages", {**messages, "tools": [tool]}),
        ("/v1/messages", {**messages, "system": [part]}),
        ("/v1/messages", {**messages, "thinking": {"type": value}}),
        ("/v1/embeddings", {"messages": talk}),
        ("/rerank", {"query": "x", "documents": [{"content": [part]}]}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, (path, body, answer.text)
        assert answer.json()["error"]["message"]


def test_unknown_fields_can_be_refused() -> None:
    strict = start(unknown_fields="refuse")
    try:
        answer = strict.post("/tokenize", {"prompt": "x", "flux": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "flux"
        assert strict.post("/tokenize", {"prompt": "x", "user": "u"}).status_code == 200
    finally:
        strict.stop()
