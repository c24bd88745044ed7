"""Anthropic's own client, unmodified."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.serve.running import Server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as official:
        yield official


HELLO = [{"role": "user", "content": "hello"}]


def test_message_streamed_and_whole_are_equal(client: anthropic.Anthropic) -> None:
    wanted = {
        "model": "scripted",
        "max_tokens": 80,
        "messages": HELLO,
        "system": "be brief",
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**wanted)  # type: ignore[call-overload]
    with client.messages.stream(**wanted) as stream:  # type: ignore[arg-type]
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text == text == final.content[0].text != ""  # type: ignore[union-attr]
    assert whole.stop_reason == final.stop_reason
    assert whole.role == "assistant"
    assert final.usage.output_tokens == whole.usage.output_tokens
    total = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert total == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model="scripted", max_tokens=3, messages=HELLO)  # type: ignore[arg-type]
    assert cut.stop_reason == "max_tokens"
    free = client.messages.create(model="scripted", max_tokens=1000, messages=HELLO, extra_body={"seed": 3})  # type: ignore[arg-type]
    assert free.stop_reason == "end_turn"
    word = free.content[0].text[5:9]  # type: ignore[union-attr]
    stopped = client.messages.create(
        model="scripted",
        max_tokens=1000,
        messages=HELLO,  # type: ignore[arg-type]
        stop_sequences=[word],
        extra_body={"seed": 3},
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)


def test_counting_agrees_with_usage(client: anthropic.Anthropic) -> None:
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": " you"}]}
    ]
    counted = client.messages.count_tokens(model="scripted", messages=blocks)  # type: ignore[arg-type]
    answer = client.messages.create(model="scripted", max_tokens=2, messages=blocks)  # type: ignore[arg-type]
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_a_final_assistant_message_is_continued(client: anthropic.Anthropic) -> None:
    open_ended = [*HELLO, {"role": "assistant", "content": "Well,"}]
    longer = client.messages.count_tokens(model="scripted", messages=open_ended)  # type: ignore[arg-type]
    closed = [*open_ended, {"role": "user", "content": ""}]
    assert longer.input_tokens < client.messages.count_tokens(model="scripted", messages=closed).input_tokens  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {
                "tools": [{"type": "code_execution_20250522", "name": "code"}],
                "tool_choice": {"type": "tool", "name": "code"},
            },
            "code_execution",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "budget_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"extra_body": {"stop": ["x"]}}, "stop_sequences"),
    ],
)
def test_refusals_have_their_shape(
    client: anthropic.Anthropic, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as caught:
        client.messages.create(**{"model": "scripted", "max_tokens": 5, "messages": HELLO, **fields})  # type: ignore[call-overload]
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_other_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=5, messages=HELLO)  # type: ignore[arg-type]
    poison = [{"role": "user", "content": "!poison"}]
    with pytest.raises(anthropic.InternalServerError, match="not finite"):
        client.messages.create(model="scripted", max_tokens=50, messages=poison)  # type: ignore[arg-type]
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(
            model="scripted",
            max_tokens=50,
            messages=poison,  # type: ignore[arg-type]
        ) as stream,
    ):
        stream.get_final_message()


def test_keys_that_anthropic_leaves_out_are_left_out(server: Server) -> None:
    body = {"model": "scripted", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    (block,) = server.post("/v1/messages", body).json()["content"]
    assert block.keys() == {"type", "text"}
    assert '"citations"' not in server.post("/v1/messages", {**body, "stream": True}).text


def test_an_error_names_the_field_that_was_sent(server: Server) -> None:
    body = {"model": "scripted", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    answer = server.post("/v1/messages", {**body, "stop_sequences": [""]})
    assert answer.json()["error"]["message"].startswith("stop_sequences")
    answer = server.post("/v1/messages", {**body, "stop_sequences": [str(i) for i in range(100)]})
    assert answer.status_code == 200, answer.text
    error = server.post("/v1/responses", {"input": "x", "max_output_tokens": 1 << 30}).json()["error"]
    assert error["param"] == "max_output_tokens"


def test_ids_of_requests_and_the_list_of_models(server: Server) -> None:
    """As Anthropic's own clients read them."""
    with server.client as http:
        version = {"anthropic-version": "2023-06-01"}
        body = {"model": "nobody", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
        answer = http.post("/v1/messages", json=body, headers=version)
        assert answer.json()["request_id"] == answer.headers["request-id"]
        assert http.post("/v1/messages", json={**body, "model": "scripted"}).headers["request-id"]
        found = http.get("/v1/models", headers=version)
        assert found.headers["request-id"]
        models = found.json()
        assert models["has_more"] is False
        assert [m["id"] for m in models["data"]] == ["scripted", "alias"]
        assert (models["first_id"], models["last_id"]) == ("scripted", "alias")
        assert {"type", "id", "display_name", "created_at"} == models["data"][0].keys()
        missing = http.get("/v1/models/nobody", headers=version)
        assert missing.json()["type"] == "error"
        assert http.get("/v1/models").json()["object"] == "list"
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["scripted", "alias"]
        one = client.models.retrieve("alias")
        assert one.created_at.tzinfo is not None
        message = client.messages.create(
            model="scripted", max_tokens=4, messages=[{"role": "user", "content": "x"}]
        )
        assert message._request_id
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("nobody")
        assert caught.value.request_id
