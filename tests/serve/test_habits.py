"""What clients rely on: words of errors, shapes of chunks and usage, limits that are lowered, roles, templates."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import numpy as np
import openai
import pytest

from tests.serve import scripted
from tests.serve.running import Server, start

HELLO = [{"role": "user", "content": "hello"}]
LONG = "x" * 3000


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        yield official


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    text = http.post(path, json={**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_max_tokens_is_lowered_to_what_fits(http: httpx.Client) -> None:
    longest = scripted.MAX_LEN
    fields = {"temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json={"prompt": "x" * 2000, "max_tokens": longest, **fields}).json()
    assert answer["usage"]["completion_tokens"] == longest - 2000
    assert answer["choices"][0]["finish_reason"] == "length"
    talk = [{"role": "user", "content": "x" * 2000}]
    for path, body in (
        ("/v1/chat/completions", {"messages": talk, "max_tokens": longest, **fields}),
        ("/v1/responses", {"input": talk, "max_output_tokens": longest, **fields}),
        ("/v1/messages", {"model": "scripted", "messages": talk, "max_tokens": longest}),
    ):
        assert http.post(path, json=body).status_code == 200, path
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": longest + 1}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": longest + 1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": longest + 1}),
        ("/v1/messages", {"model": "scripted", "messages": HELLO, "max_tokens": longest + 1}),
    ):
        refused = http.post(path, json=body)
        assert refused.status_code == 400, path
        assert "maximum context length is 2048 tokens" in refused.json()["error"]["message"]


def test_a_prompt_that_is_too_long_says_so_in_the_words_of_each_api(
    server: Server, client: openai.OpenAI
) -> None:
    with pytest.raises(
        openai.BadRequestError, match="This model's maximum context length is 2048 tokens"
    ) as caught:
        client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": LONG}])
    assert caught.value.code == "context_length_exceeded"
    messages = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2047 maximum"):
        messages.create(model="scripted", max_tokens=5, messages=[{"role": "user", "content": LONG}])


def test_an_input_that_is_too_long_can_be_cut(http: httpx.Client) -> None:
    body = {"input": "A" + LONG, "max_output_tokens": 5}
    assert http.post("/v1/responses", json=body).status_code == 400
    answer = http.post("/v1/responses", json={**body, "truncation": "auto"}).json()
    assert answer["usage"]["input_tokens"] == scripted.MAX_LEN - 5
    assert answer["truncation"] == "auto"
    cut = {"prompt": "abcdef", "max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 2}
    for side, kept in (("left", "ef"), ("right", "ab"), (None, "ef")):
        found = http.post("/v1/completions", json={**cut, "truncation_side": side}).json()
        assert bytes(found["choices"][0]["prompt_token_ids"]).decode() == kept
    beyond = http.post("/v1/completions", json={**cut, "truncate_prompt_tokens": 5000})
    assert beyond.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "!say some text!end"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "!say some text!end"}]}),
    ],
)
@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"logprobs": 1}, {"stop": "xt"}, {"max_tokens": 3}])
def test_the_finish_has_a_chunk_of_its_own(
    http: httpx.Client, path: str, body: dict[str, Any], extra: dict[str, Any]
) -> None:
    if "chat" in path and "logprobs" in extra:
        extra = {"logprobs": True, "top_logprobs": 1}
    found = chunks(http, path, {"max_tokens": 50, **body, **extra, "temperature": 0})
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for choice in (choice for chunk in found for choice in chunk["choices"]):
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
        if choice["finish_reason"] is not None:
            assert not text
            ends[choice["index"]] = choice["finish_reason"]
    whole = http.post(path, json={"max_tokens": 50, **body, **extra, "temperature": 0}).json()["choices"]
    assert list(texts.values()) == [c["text"] if "text" in c else c["message"]["content"] for c in whole]
    assert list(ends.values()) == [c["finish_reason"] for c in whole]


def test_usage_in_chunks(http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
    both = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        c["usage"]["completion_tokens"]
        for c in chunks(http, "/v1/chat/completions", {**body, "stream_options": both})
    ]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 20
    for options in (
        {"continuous_usage_stats": True},
        {"include_usage": None},
        {"include_usage": False},
        None,
    ):
        found = chunks(http, "/v1/chat/completions", {**body, "stream_options": options})
        assert not any(chunk.get("usage") for chunk in found), options


def test_fields_that_clients_read_are_null_not_missing(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=2)
    assert chat.prompt_logprobs is None  # type: ignore[attr-defined]
    assert chat.prompt_token_ids is None  # type: ignore[attr-defined]
    assert str(chat.system_fingerprint).startswith("fp_")
    assert chat.usage is not None
    assert chat.usage.completion_tokens_details is not None
    assert chat.usage.completion_tokens_details.reasoning_tokens == 0
    assert chat.choices[0].message.reasoning_content is None  # type: ignore[attr-defined]
    done = client.completions.create(model="scripted", prompt="x", max_tokens=2)
    assert done.choices[0].prompt_logprobs is None  # type: ignore[attr-defined]
    assert done.choices[0].token_ids is None  # type: ignore[attr-defined]


def test_the_rendered_prompt_can_be_returned(http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "return_prompt_text": True}
    whole = http.post("/v1/chat/completions", json=body).json()
    assert whole["prompt_text"].endswith("hello<|im_end|>\n<|im_start|>assistant\n")
    first, *rest = chunks(http, "/v1/chat/completions", body)
    assert first["prompt_text"] == whole["prompt_text"]
    assert not any("prompt_text" in chunk for chunk in rest)


def test_roles_are_the_templates_own_matter(http: httpx.Client) -> None:
    talk = [{"role": "my-custom-role", "content": "x"}, {"role": "developer", "content": "y"}]
    answer = http.post(
        "/v1/chat/completions", json={"messages": talk, "max_tokens": 1, "return_prompt_text": True}
    )
    assert "<|im_start|>my-custom-role\nx" in answer.json()["prompt_text"]


def test_a_continued_message_needs_no_second_field(http: httpx.Client) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "Well,"}]
    body = {"messages": talk, "max_tokens": 1, "continue_final_message": True, "return_prompt_text": True}
    assert http.post("/v1/chat/completions", json=body).json()["prompt_text"].endswith("Well,")
    both = http.post("/v1/chat/completions", json={**body, "add_generation_prompt": True})
    assert both.json()["error"]["param"] == "continue_final_message"


def test_tokens_of_an_input_are_counted_as_they_are_used(client: openai.OpenAI, http: httpx.Client) -> None:
    counted = client.responses.input_tokens.count(model="scripted", input="hello", instructions="be")
    used = client.responses.create(
        model="scripted", input="hello", instructions="be", max_output_tokens=1
    ).usage
    assert used is not None
    assert counted.input_tokens == used.input_tokens
    chat = http.post("/v1/chat/completions/input_tokens", json={"messages": HELLO}).json()
    usage = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}).json()["usage"]
    assert chat["input_tokens"] == usage["prompt_tokens"]


def test_offsets_of_tokens(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "aé", "return_token_offsets": True}).json()
    assert answer["token_offsets"] == [[0, 1], [1, 2], [1, 2]]


def test_tokens_that_all_end_the_output_beside_min_tokens(http: httpx.Client) -> None:
    body = {"prompt": "x", "allowed_token_ids": [scripted.EOS], "min_tokens": 3}
    error = http.post("/v1/completions", json=body)
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "allowed_token_ids"


def test_an_offer_to_upgrade_keeps_the_body(server: Server) -> None:
    where = urlsplit(server.url)
    body = b'{"prompt": "x", "max_tokens": 2}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    for parts in ((head % len(body) + body,), (head % len(body), body)):
        with socket.create_connection((where.hostname, where.port), timeout=60) as raw:
            for part in parts:
                raw.sendall(part)
            raw.settimeout(60)
            assert raw.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_vectors_as_bytes_in_every_type(http: httpx.Client) -> None:
    body: dict[str, Any] = {"input": ["one", "three"]}
    plain = np.array([d["embedding"] for d in http.post("/v1/embeddings", json=body).json()["data"]])
    for name, order, dtype in (
        ("float32", "little", "<f4"),
        ("float16", "big", ">f2"),
        ("float32", "native", "<f4"),
    ):
        wanted = {**body, "embed_dtype": name, "endianness": order}
        answer = http.post("/v1/embeddings", json={**wanted, "encoding_format": "bytes"})
        assert answer.headers["content-type"] == "application/octet-stream"
        places = json.loads(answer.headers["metadata"])["data"]
        found = [np.frombuffer(answer.content[p["start"] : p["end"]], dtype) for p in places]
        assert np.allclose(found, plain, atol=1e-3)
        coded = http.post("/v1/embeddings", json={**wanted, "encoding_format": "base64"}).json()["data"]
        assert b"".join(base64.b64decode(d["embedding"]) for d in coded) == answer.content
        bare = http.post("/v1/embeddings", json={**wanted, "encoding_format": "bytes_only"})
        assert bare.content == answer.content
        assert "metadata" not in bare.headers


def test_conversations_become_vectors(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"messages": HELLO}).json()
    text = "<|im_start|>user\nhello<|im_end|>\n"
    tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert answer["data"][0]["embedding"] == pytest.approx(scripted.embed(tokens, "last"), abs=1e-6)
    assert http.post("/v1/embeddings", json={"messages": HELLO, "input": "x"}).status_code == 400
    assert http.post("/v1/embeddings", json={}).json()["error"]["param"] == "input"


def test_names_and_limits_of_pairs(http: httpx.Client) -> None:
    def scores(**fields: Any) -> list[float]:
        answer = http.post("/score", json=fields)
        assert answer.status_code == 200, answer.text
        return [d["score"] for d in answer.json()["data"]]

    plain = scores(text_1="one", text_2=["two", "three"])
    assert scores(queries="one", documents=["two", "three"]) == plain
    assert scores(data_1="one", data_2=["two", "three"]) == plain
    assert scores(queries="one", items=["twofold", "threefold"], max_tokens_per_doc=3) == scores(
        text_1="one", text_2=["two", "thr"]
    )
    assert scores(text_1="one", text_2="x", instruction="Find") == scores(text_1="Find\none", text_2="x")
    both = http.post("/score", json={"text_1": "a", "queries": "b", "text_2": "c"}).json()["error"]
    assert both["param"] == "queries"
    ranked = http.post("/rerank", json={"query": "one", "documents": [{"text": "two"}, "three"]}).json()
    assert {r["document"]["text"] for r in ranked["results"]} == {"two", "three"}


@pytest.fixture(scope="module")
def thinking() -> Iterator[Server]:
    running = start(
        maker="quire.client.start",
        model="",
        max_model_len=512,
        threads=1,
        reasoning_parser="qwen3",
        trust_request_chat_template=True,
        enable_per_request_metrics=True,
        max_num_batched_tokens=64,
    )
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_bounded(thinking: Server, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0)
    talk = [*HELLO, {"role": "assistant", "content": "<think>\nWell"}]
    wanted = {"messages": talk, "model": "quire-stories", "max_tokens": 40, "temperature": 0}
    extra = {"continue_final_message": True, "thinking_token_budget": 6}
    if stream:
        with client.chat.completions.stream(**wanted, extra_body=extra) as events:  # type: ignore[arg-type]
            for _ in events:
                pass
            answer: Any = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**wanted, extra_body=extra)  # type: ignore[call-overload]
    details = answer.usage.completion_tokens_details if answer.usage else None
    message = answer.choices[0].message
    assert message.content
    assert "think>" not in message.content
    if not stream:
        assert 0 < details.reasoning_tokens <= 6
        free = client.chat.completions.create(**wanted, extra_body={"continue_final_message": True})  # type: ignore[call-overload]
        assert free.usage is not None
        assert free.usage.completion_tokens_details is not None
        assert (free.usage.completion_tokens_details.reasoning_tokens or 0) > 6


def test_anthropics_budget_and_format(thinking: Server) -> None:
    client = anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0)
    talk = [*HELLO, {"role": "assistant", "content": "<think>\nWell"}]
    answer = client.messages.create(
        model="quire-stories",
        max_tokens=60,
        messages=talk,  # type: ignore[arg-type]
        thinking={"type": "enabled", "budget_tokens": 5},
        extra_body={
            "output_config": {
                "format": {
                    "type": "json_schema",
                    "schema": {
                        "type": "object",
                        "properties": {"a": {"enum": [1, 2]}},
                        "required": ["a"],
                        "additionalProperties": False,
                    },
                }
            }
        },
    )
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text"]
    assert json.loads(answer.content[1].text)["a"] in (1, 2)  # type: ignore[union-attr]


def test_a_template_of_the_requests_own(thinking: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "return_prompt_text": True}
    own = {**body, "chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"}
    answer = thinking.post("/v1/chat/completions", own)
    assert answer.json()["prompt_text"] == "[hello]"
    names = "{{ thinking }} {{ enable_thinking }} {{ reasoning }} {{ thinking_budget | default('free') }}"
    for switch, text in (
        ({"enable_thinking": False}, "False False False 0"),
        ({"reasoning_effort": "none"}, "False False False 0"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, "True False False 0"),
        ({"reasoning_effort": "low"}, "True True True free"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "True True True free"),
    ):
        answer = thinking.post("/v1/chat/completions", {**own, "chat_template": names, **switch})
        assert answer.json()["prompt_text"] == text
    broken = thinking.post("/v1/chat/completions", {**body, "chat_template": "{% for"})
    assert broken.json()["error"]["param"] == "chat_template"
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    assert thinking.post("/v1/chat/completions", {**body, "chat_template": endless}).status_code == 400


def test_a_stream_may_report_the_progress_of_its_prompt(thinking: Server) -> None:
    talk = [{"role": "user", "content": "Once upon a time there was a dog. " * 25}]
    body = {"messages": talk, "max_tokens": 2}
    with httpx.Client(base_url=thinking.url) as http:
        found: list[dict[str, Any]] = []
        # A reader that is late finds the progress merged with the first token.
        for salt in map(str, range(20)):
            asked = {**body, "cache_salt": salt, "return_progress": True}
            found += chunks(http, "/v1/chat/completions", asked)
        plain = chunks(http, "/v1/chat/completions", {**body, "cache_salt": "plain"})
        whole = http.post("/v1/chat/completions", json={**body, "return_progress": True})
    told = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
    assert {step["total"] for step in told} == {whole.json()["usage"]["prompt_tokens"]}
    assert {step["processed"] for step in told} <= {64, 128, 192}
    assert "prompt_progress" not in whole.text + str(plain)


def test_a_streamed_completion_reports_the_progress_of_its_prompts(thinking: Server) -> None:
    prompts = ["Once upon a time there was a dog. " * 25, "A cat sat. " * 40]
    body = {"prompt": prompts, "max_tokens": 2}
    with httpx.Client(base_url=thinking.url) as http:
        found: list[dict[str, Any]] = []
        for salt in map(str, range(20)):
            found += chunks(http, "/v1/completions", {**body, "cache_salt": salt, "return_progress": True})
        whole = http.post("/v1/completions", json={**body, "return_progress": True})
    told = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
    assert {step["total"] for step in told} == {whole.json()["usage"]["prompt_tokens"]}
    assert all(0 < step["processed"] < step["total"] for step in told)
    assert "prompt_progress" not in whole.text


def test_a_repeated_pattern_ends_the_answer(thinking: Server) -> None:
    rule = {"max_pattern_size": 2, "min_count": 4}
    body = {
        "prompt": "x",
        "max_tokens": 50,
        "logit_bias": {"300": 100},
        "temperature": 0,
        "repetition_detection": rule,
    }
    choice = thinking.post("/v1/completions", body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    wrong = thinking.post("/v1/completions", {**body, "repetition_detection": {"max_pattern_size": 2}})
    assert wrong.json()["error"]["param"] == "repetition_detection.min_count"


def test_text_between_a_prefix_and_a_suffix_needs_a_model_for_it(thinking: Server) -> None:
    error = thinking.post("/v1/completions", {"prompt": "a", "suffix": "b", "max_tokens": 2}).json()["error"]
    assert error["param"] == "suffix"
    assert thinking.post("/v1/completions", {"prompt": "a", "suffix": "", "max_tokens": 2}).status_code == 200


def test_logprobs_of_chosen_tokens(thinking: Server) -> None:
    body = {"prompt": "Once upon", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    ids = thinking.post("/tokenize", {"prompt": " a the", "add_special_tokens": False}).json()["tokens"]
    chosen = {**body, "logprob_token_ids": ids, "return_tokens_as_token_ids": True}
    plain = thinking.post(
        "/v1/completions", {**body, "logprobs": 20, "return_tokens_as_token_ids": True}
    ).json()
    found = thinking.post("/v1/completions", chosen).json()["choices"][0]["logprobs"]
    for here, wide in zip(
        found["top_logprobs"], plain["choices"][0]["logprobs"]["top_logprobs"], strict=True
    ):
        assert {f"token_id:{i}" for i in ids} <= set(here)
        assert all(wide[name] == pytest.approx(value) for name, value in here.items() if name in wide)
    chat = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "logprob_token_ids": ids}
    content = thinking.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    for entry in content:
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len({top["token"] for top in entry["top_logprobs"]} - {entry["token"]}) >= len(ids) - 1
    allowed = {**chat, "logprob_token_ids": ids[:1], "allowed_token_ids": [42]}
    for entry in thinking.post("/v1/chat/completions", allowed).json()["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    error = thinking.post("/v1/chat/completions", {**chat, "logprobs": False}).json()["error"]
    assert error["param"] == "logprob_token_ids"


def test_tokens_per_chunk(thinking: Server, http: httpx.Client) -> None:
    with thinking.client as client:
        body = {
            "prompt": "Once",
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for interval in (1, 8):
            found = chunks(client, "/v1/completions", {**body, "stream_interval": interval})
            sizes = [len(c["token_ids"]) for chunk in found for c in chunk["choices"]]
            assert sum(sizes) == 24
            # A busy server sends more at once; the first token never waits, and the finish has none.
            assert interval == 1 or all(size >= 7 for size in sizes[1:] if size)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_times_of_a_request(thinking: Server, path: str) -> None:
    body: dict[str, Any] = {"prompt": "Once"} if path == "/v1/completions" else {"messages": HELLO}
    body |= {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with thinking.client as client:
        for found in (
            client.post(path, json=body).json()["metrics"],
            chunks(client, path, body)[-1]["metrics"],
        ):
            assert found["time_to_first_token_ms"] >= found["queue_time_ms"] >= 0
            assert found["generation_time_ms"] == pytest.approx(7 * found["mean_itl_ms"])
            assert found["tokens_per_second"] == pytest.approx(1000 / found["mean_itl_ms"])
            assert 0 <= found["others_prompts_time_ms"] <= found["generation_time_ms"]
        assert not client.post(path, json={**body, "return_metrics": False}).json().get("metrics")
        assert client.post(path, json={**body, "n": 2}).json()["metrics"] is None
        single = client.post(path, json={**body, "max_tokens": 1}).json()["metrics"]
        assert single["tokens_per_second"] > 0
        assert "mean_itl_ms" not in single


def test_a_wrong_path_or_method_says_what_is_meant(http: httpx.Client) -> None:
    told = {
        path: http.post(path, json={}).json()["error"]["message"]
        for path in ("/chat/completions", "/tokenise")
    }
    assert told["/chat/completions"] == "Not Found; did you mean /v1/chat/completions?"
    assert told["/tokenise"] == "Not Found; did you mean /tokenize?"
    asked = http.get("/v1/chat/completions")
    assert asked.status_code == 405
    assert asked.json()["error"]["message"] == "Method Not Allowed: use POST"
