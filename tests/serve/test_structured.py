"""Structured outputs over HTTP, with the real engine: every API's own spelling, streams, refusals, hostile input."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from tests.serve.running import Server, events_of, start
from tests.waiting import wait_until

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind of animal": {"enum": ["dog", "cat", "bird"]},
    },
    "required": ["name", "age", "kind of animal"],
    "additionalProperties": False,
}
NAMED = {"name": "pet", "schema": SCHEMA, "strict": True}
TALK = [{"role": "user", "content": "Tell me about a pet."}]
# Each takes more than half a second, in which it is found to be too large.
HOSTILE = [f"(a{{{1000 + i}}}){{1000}}" for i in range(10)]


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int
    kind: Literal["dog", "cat"]


@pytest.fixture(scope="module")
def real() -> Iterator[Server]:
    running = start(maker="quire.client.start", model="", max_model_len=512, threads=1, grammar_timeout=2)
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(real: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0)


def check_pet(text: str | None) -> None:
    pet = json.loads(text or "")
    assert list(pet) == list(SCHEMA["properties"])
    assert isinstance(pet["age"], int)
    assert pet["kind of animal"] in ("dog", "cat", "bird")


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(messages=TALK, model="quire-stories", max_tokens=100, **fields)  # type: ignore[call-overload]


def test_parse_returns_the_type(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        messages=TALK, model="quire-stories", response_format=Pet, max_tokens=100, seed=1
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Pet)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
        {"extra_body": {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}},
        {"extra_body": {"guided_json": SCHEMA}},
        {"extra_body": {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}},
        {"extra_body": {"json_schema": json.dumps(SCHEMA)}},
    ],
)
def test_json_in_every_spelling(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    answer = chat(client, n=2, seed=3, **fields)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check_pet(choice.message.content)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"extra_body": {"guided_regex": r"\d{3}-[xy]{1,9}z"}}, r"\d{3}-[xy]{1,9}z"),
        ({"extra_body": {"regex": "(yes|no)!"}}, "(yes|no)!"),
        ({"extra_body": {"guided_choice": ["red", "green"]}}, "red|green"),
        ({"extra_body": {"structured_outputs": {"choice": ["red", "green"]}}}, "red|green"),
        ({"extra_body": {"ebnf": 'root ::= "a" ("b" | "c")'}}, "a[bc]"),
        ({"extra_body": {"guided_grammar": 'start: "a" ("b" | "c")'}}, "a[bc]"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "x{3}"}}},
            "xxx",
        ),
        ({"response_format": {"type": "text"}}, r"(?s).*"),
    ],
)
def test_other_kinds(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    answer = chat(client, seed=4, logit_bias={"7": 1}, **fields).choices[0]
    assert answer.finish_reason == "stop" or fields == {"response_format": {"type": "text"}}
    assert re.fullmatch(pattern, answer.message.content)


def test_json_object_may_have_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="quire-stories",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=30,
        extra_body={"response_format": {"type": "json_object", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "") in ({"a": 1}, {"a": 2})
    with pytest.raises(openai.BadRequestError, match=r"response_format: schema must be a JSON schema"):
        client.chat.completions.create(
            model="quire-stories",
            messages=[{"role": "user", "content": "x"}],
            extra_body={"response_format": {"type": "json_object", "schema": 3}},
        )


def test_json_object_is_one(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="quire-stories",
        prompt="Here is an object: ",
        max_tokens=200,
        temperature=0,
        logit_bias={"7": 5, "98": 9},
        extra_body={"response_format": {"type": "json_object"}},
    ).choices[0]
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.text), dict)
    assert answer.text.startswith("{")


def test_streams_say_the_same(client: openai.OpenAI) -> None:
    fields = {"response_format": {"type": "json_schema", "json_schema": NAMED}, "seed": 8, "logprobs": True}
    whole = chat(client, **fields).choices[0]
    streamed, logprobs = "", []
    for chunk in chat(client, stream=True, **fields):
        streamed += chunk.choices[0].delta.content or ""
        logprobs += [] if chunk.choices[0].logprobs is None else chunk.choices[0].logprobs.content
    assert streamed == whole.message.content
    assert len(logprobs) == len(whole.logprobs.content)
    check_pet(streamed)
    jumped = chat(client, **{**fields, "logprobs": False}).choices[0]
    assert jumped.message.content == streamed, "text that is appended differs from text that is drawn"


def test_a_stop_string_inside_forced_text_cuts_there(client: openai.OpenAI) -> None:
    fields = {"response_format": {"type": "json_schema", "json_schema": NAMED}, "seed": 8}
    whole = chat(client, **fields).choices[0].message.content
    cut = chat(client, stop=["of ani"], **fields).choices[0]
    assert cut.message.content == whole[: whole.index("of ani")]
    assert cut.stop_reason == "of ani"


def test_responses_api(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="quire-stories",
        input="Tell me about a pet.",
        max_output_tokens=100,
        text={"format": {"type": "json_schema", **NAMED}},
    )
    check_pet(answer.output_text)
    assert answer.text.format.type == "json_schema"


SCHEMA_OF_X = {
    "type": "object",
    "properties": {"x": {"const": 7}},
    "required": ["x"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "yes" | "yep"'


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"grammar": GRAMMAR}, "yes|yep"),
        ({"ebnf": GRAMMAR}, "yes|yep"),
        ({"guided_grammar": GRAMMAR}, "yes|yep"),
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"format": SCHEMA_OF_X}, r'\{"x":7\}'),
        ({"format": "json", "max_tokens": 200, "logit_bias": {}}, r"(?s)\{.*"),
        ({"format": ""}, "(?s).*"),
        ({"response_schema": SCHEMA_OF_X}, r'\{"x":7\}'),
        ({"json_schema": SCHEMA_OF_X}, r'\{"x":7\}'),
        ({"guided_json": SCHEMA_OF_X}, r'\{"x":7\}'),
        ({"structured_outputs": {"json": SCHEMA_OF_X}}, r'\{"x":7\}'),
    ],
)
def test_names_of_other_servers_hold_in_every_api(real: Server, fields: dict[str, Any], pattern: str) -> None:
    def text_of(path: str, body: dict[str, Any]) -> Any:
        answer = real.post(path, {"model": "quire-stories", **body, **fields})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        if path == "/v1/completions":
            return found["choices"][0]["text"]
        if path == "/v1/chat/completions":
            return found["choices"][0]["message"]["content"]
        content = found["output"][-1]["content"] if path == "/v1/responses" else found["content"]
        return content[-1]["text"]

    limit = fields.get("max_tokens", 40)
    talk = {"messages": TALK, "max_tokens": limit}
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": limit}),
        ("/v1/chat/completions", talk),
        ("/v1/messages", talk),
    ):
        assert re.fullmatch(pattern, text_of(path, body)), path
    if "max_tokens" not in fields:
        assert re.fullmatch(pattern, text_of("/v1/responses", {"input": "x", "max_output_tokens": limit}))


def test_jumps_are_counted(real: Server, client: openai.OpenAI) -> None:
    def count() -> float:
        with real.client as http:
            text = http.get("/metrics").text
        return float(re.search(r"^quire:jump_forward_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]

    before = count()
    chat(client, response_format={"type": "json_schema", "json_schema": NAMED})
    assert count() >= before + 8


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "regex and ebnf both constrain"),
        (
            {"response_format": {"type": "json_object"}, "guided_json": {}},
            "guided_json",
            "response_format and",
        ),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "both json and regex"),
        ({"structured_outputs": {}}, "structured_outputs", "names none"),
        ({"structured_outputs": {"dance": 1}}, "structured_outputs", "names none"),
        ({"structured_outputs": {"choise": ["a"]}}, "structured_outputs.choise", "structured_outputs.choice"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs", "str"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be a JSON schema"),
        ({"response_format": {"type": "yaml"}}, "response_format", "'yaml' is not supported"),
        ({"regex": "[a"}, "regex", "unclosed character class"),
        ({"guided_json": '{"type": "objet"}'}, "guided_json", "objet"),
        ({"guided_json": {"$ref": "http://example.com/x"}}, "guided_json", "example.com"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
        ({"json_schema": "[" * 50_000}, "json_schema", "not valid JSON"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
    ],
)
def test_refused_with_the_reason(real: Server, fields: dict[str, Any], param: str, reason: str) -> None:
    answer = real.post("/v1/chat/completions", {"messages": TALK, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param
    assert reason in error["message"]


def test_hostile_constraints_delay_nobody() -> None:
    """While they are tried out and refused, streams go on getting tokens."""
    server = start(maker="quire.client.start", model="", max_model_len=512, threads=1, grammar_timeout=0.1)
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 100,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    answers: list[httpx.Response] = []

    def ask(regex: str) -> httpx.Response:
        return server.post("/v1/completions", {"prompt": "a", "regex": regex, "max_tokens": 60})

    def attack() -> None:
        answers.extend(map(ask, HOSTILE))

    attacker = threading.Thread(target=attack)
    attacker.start()
    tokens = 0
    with server.client as http:
        while attacker.is_alive():
            before = tokens
            with http.stream("POST", "/v1/completions", json=body) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: {") and attacker.is_alive():
                        tokens = before + json.loads(line[6:])["usage"]["completion_tokens"]
    attacker.join()
    assert tokens > 100
    assert [answer.status_code for answer in answers] == [400] * len(HOSTILE)
    assert all("takes more than 0.1 s" in answer.json()["error"]["message"] for answer in answers)
    assert ask(HOSTILE[-1]).status_code == 400
    assert not server.children("grammar_worker"), "the answer is remembered"
    numbers = itertools.count(1)

    def follows() -> bool:
        """Ask for another text each time: a refusal for want of time is remembered too."""
        number = next(numbers)
        fine = ask(f"a{{{number}}}bc")
        return fine.status_code == 200 and fine.json()["choices"][0]["text"] == "a" * number + "bc"

    wait_until(follows)
    assert server.stop() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_select_picks_the_likeliest_choice(real: Server, stream: bool) -> None:
    body = {"prompt": "Once upon a", "stream": stream, "max_tokens": 20}
    body["structured_outputs"] = {"choice": [" zebra", " time", " sad dog"], "select": True}
    answer = httpx.post(f"{real.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (" time", "stop")
        return
    assert "".join(event["choices"][0]["text"] for event in events_of(answer.text)) == " time"


def test_select_has_one_answer(real: Server) -> None:
    body = {"prompt": "Once", "n": 2, "structured_outputs": {"choice": ["a", "b"], "select": True}}
    answer = httpx.post(f"{real.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
