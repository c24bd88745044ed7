"""Hugging Face TGI's endpoints, asked by Hugging Face's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from quire.serve.tgi.protocol import Token
from tests.serve.running import Server, start

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start(maker="quire.client.start", model="", tgi_api=True)
    yield running
    assert running.stop() == 0
    assert "unexpected error" not in running.log, running.log


@pytest.fixture(scope="module")
def client(server: Server) -> InferenceClient:
    return InferenceClient(model=server.url)


def greedy(server: Server, count: int) -> str:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": count, "temperature": 0})
    return str(answer.json()["choices"][0]["text"])


def test_the_likeliest_text_unless_asked_to_draw(server: Server, client: InferenceClient) -> None:
    assert client.text_generation(PROMPT, max_new_tokens=6) == greedy(server, 6)
    drawn = {client.text_generation(PROMPT, max_new_tokens=6, temperature=2.0, seed=s) for s in range(4)}
    assert len(drawn) > 1
    whole = client.text_generation(PROMPT, max_new_tokens=6, return_full_text=True)
    assert whole == PROMPT + greedy(server, 6)


def test_details_name_the_tokens(server: Server, client: InferenceClient) -> None:
    found = client.text_generation(
        PROMPT, max_new_tokens=4, details=True, decoder_input_details=True, top_n_tokens=2
    )
    assert found.details is not None
    assert "".join(token.text for token in found.details.tokens) == found.generated_text
    assert found.details.finish_reason == "length"
    assert found.details.generated_tokens == 4
    assert "".join(token.text for token in found.details.prefill[1:]) == PROMPT
    assert found.details.prefill[0].logprob is None
    assert found.details.top_tokens is not None
    assert [len(row) for row in found.details.top_tokens] == [2] * 4
    best = msgspec.convert(found.details.top_tokens, list[list[Token]])
    assert [row[0].id for row in best] == [token.id for token in found.details.tokens]


def test_the_best_of_several_is_returned(client: InferenceClient) -> None:
    found = client.text_generation(
        PROMPT, max_new_tokens=6, do_sample=True, temperature=1.5, best_of=3, seed=1, details=True
    )
    assert found.details is not None
    others = found.details.best_of_sequences
    assert others is not None
    assert len(others) == 2
    sums = [sum(token.logprob for token in one.tokens) for one in (found.details, *others)]
    assert sums[0] == max(sums)


def test_a_stream_has_an_event_for_each_token(client: InferenceClient) -> None:
    whole = client.text_generation(PROMPT, max_new_tokens=6)
    assert "".join(client.text_generation(PROMPT, max_new_tokens=6, stream=True)) == whole
    events = list(client.text_generation(PROMPT, max_new_tokens=6, stream=True, details=True))
    assert [event.index for event in events] == [1, 2, 3, 4, 5, 6]
    assert [event.generated_text for event in events] == [None] * 5 + [whole]
    assert events[-1].details is not None
    assert events[-1].details.finish_reason == "length"


def test_an_output_keeps_the_text_that_ends_it(server: Server, client: InferenceClient) -> None:
    found = client.text_generation(PROMPT, max_new_tokens=9, stop=[" was"], details=True)
    assert found.generated_text.endswith(" was")
    assert found.details is not None
    assert found.details.finish_reason == "stop_sequence"
    answer = server.post("/generate_stream", {"inputs": PROMPT, "parameters": {"stop": [" was"]}})
    last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["generated_text"] == found.generated_text


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "regex", "value": "[0-9]{3}"},
        {"type": "json", "value": {"type": "integer", "minimum": 100, "maximum": 999}},
        {"type": "json_schema", "value": {"schema": {"type": "integer", "minimum": 100, "maximum": 999}}},
    ],
)
def test_the_output_keeps_to_a_grammar(server: Server, grammar: object) -> None:
    answer = server.post("/generate", {"inputs": "There were", "parameters": {"grammar": grammar}})
    assert 100 <= int(answer.json()["generated_text"].lstrip("0") or 100) <= 999


def test_errors_are_tgis(server: Server, client: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="typical_p is not supported"):
        client.text_generation(PROMPT, typical_p=0.5)
    answer = server.post("/generate", {"inputs": "x", "parameters": {"temperature": 0}})
    assert answer.status_code == 422
    assert answer.json()["error_type"] == "validation"
    assert server.post("/generate", {"inputs": "x", "parameters": {"watermark": True}}).status_code == 422
    assert server.post("/v1/completions", {}).json()["error"]["param"] == "prompt"


def test_the_server_tells_of_itself(server: Server) -> None:
    with server.client as http:
        info = http.get("/info").json()
    assert info["max_input_tokens"] == info["max_total_tokens"] - 1 == 1023
