"""OpenAI's own client, unmodified, against every endpoint it has a method for."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.serve import scripted
from tests.serve.running import Server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        yield official


HELLO = [{"role": "user", "content": "hello"}]


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [m.id for m in models] == ["scripted", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_completion_has_text_usage_and_reason(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="alias", prompt="once", max_tokens=11)
    assert answer.model == "alias"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        4,
        11,
        15,
    )


@pytest.mark.parametrize(
    ("prompt", "num"), [("abc", 1), (["abc", "de"], 2), ([97, 98, 99], 1), ([[97, 98], [99]], 2)]
)
def test_every_form_of_prompt(client: openai.OpenAI, prompt: object, num: int) -> None:
    answer = client.completions.create(model="scripted", prompt=prompt, max_tokens=5, n=2)  # type: ignore[call-overload]
    assert [c.index for c in answer.choices] == list(range(2 * num))
    first = client.completions.create(model="scripted", prompt="abc", max_tokens=5, temperature=0)
    ids = client.completions.create(model="scripted", prompt=[97, 98, 99], max_tokens=5, temperature=0)
    assert first.choices[0].text == ids.choices[0].text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"stop": ["quire", "日"]}, {"logprobs": 2}, {"echo": True}])
def test_streamed_completions_equal_whole_ones(
    client: openai.OpenAI, temperature: float, extra: dict[str, object]
) -> None:
    wanted = {
        "model": "scripted",
        "prompt": "tell me",
        "max_tokens": 90,
        "seed": 11,
        "temperature": temperature,
    }
    whole = client.completions.create(**wanted, **extra)  # type: ignore[call-overload]
    num = len(whole.choices)
    texts, reasons, tokens = [""] * num, [None] * num, [[] for _ in range(num)]
    usage = None
    stream = client.completions.create(**wanted, **extra, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs:
                tokens[choice.index] += zip(
                    choice.logprobs.text_offset,
                    choice.logprobs.tokens,
                    choice.logprobs.token_logprobs,
                    strict=True,
                )
    assert texts == [c.text for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    if "logprobs" in extra:
        lists = whole.choices[0].logprobs
        assert tokens[0] == list(zip(lists.text_offset, lists.tokens, lists.token_logprobs, strict=True))
        assert max(len(top) for top in lists.top_logprobs) == 3
        assert all(name in top for name, top in zip(lists.tokens, lists.top_logprobs, strict=True))
        assert len(tokens[0]) == whole.usage.completion_tokens
    assert not any("�" in text for text in texts)


def test_echo_scores_the_prompt_without_a_new_token(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="scripted", prompt="score me", max_tokens=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == "score me"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list("score me")
    assert choice.logprobs.token_logprobs[0] is None
    assert all(isinstance(x, float) for x in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset == list(range(8))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_chat_with_logprobs_and_cached_usage(client: openai.OpenAI) -> None:
    def ask() -> object:
        return client.chat.completions.create(
            model="scripted",
            messages=HELLO,
            max_completion_tokens=6,
            logprobs=True,
            top_logprobs=4,
            temperature=0,
        )

    ask()
    answer = ask()
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == 6
    for entry in choice.logprobs.content:
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        assert len(entry.top_logprobs) == 4
        assert [t.logprob for t in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"stop": "here"}, {"logprobs": True, "top_logprobs": 1}])
def test_streamed_chats_equal_whole_ones(client: openai.OpenAI, extra: dict[str, object]) -> None:
    wanted = {"model": "scripted", "messages": HELLO, "max_tokens": 1000, "seed": 5}
    whole = client.chat.completions.create(**wanted, **extra)  # type: ignore[call-overload]
    with client.chat.completions.stream(**wanted, **extra) as stream:  # type: ignore[arg-type]
        for _ in stream:
            pass
        joined = stream.get_final_completion()
    assert [c.message.content for c in joined.choices] == [c.message.content for c in whole.choices]
    assert [c.finish_reason for c in joined.choices] == [c.finish_reason for c in whole.choices]
    assert [c.logprobs and len(c.logprobs.content) for c in joined.choices] == [
        c.logprobs and len(c.logprobs.content) for c in whole.choices
    ]


def test_a_stop_string_never_leaks_and_usage_ends_with_it(client: openai.OpenAI) -> None:
    free = client.completions.create(model="scripted", prompt="x", max_tokens=200, temperature=0)
    stop = free.choices[0].text[30:36]
    cut = client.completions.create(model="scripted", prompt="x", max_tokens=200, temperature=0, stop=stop)
    assert cut.choices[0].text == free.choices[0].text.split(stop)[0]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == stop  # type: ignore[attr-defined]
    seen = (cut.choices[0].text + stop).encode()
    assert cut.usage is not None
    assert cut.usage.completion_tokens == len(seen)


def test_extra_fields_reach_the_engine(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="scripted",
        prompt="x",
        max_tokens=30,
        temperature=0,
        extra_body={
            "ignore_eos": True,
            "return_token_ids": True,
            "min_tokens": 2,
            "top_k": 5,
            "cache_salt": "a",
        },
    )
    assert answer.choices[0].token_ids == scripted.script_of("x", 30)  # type: ignore[attr-defined]
    assert answer.choices[0].prompt_token_ids == [120]  # type: ignore[attr-defined]


def test_continuing_a_final_message(client: openai.OpenAI) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    extra = {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "return_token_ids": True,
        "echo": True,
    }
    answer = client.chat.completions.create(
        model="scripted", messages=messages, max_tokens=4, extra_body=extra
    )  # type: ignore[arg-type]
    prompt = bytes(t for t in answer.prompt_token_ids if t < 256).decode()  # type: ignore[attr-defined]
    assert prompt.endswith("The answer is")
    assert (answer.choices[0].message.content or "").startswith("The answer is")


def test_template_variables_and_content_parts(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    extra = {"chat_template_kwargs": {"suffix": "THINK"}, "return_token_ids": True}
    answer = client.chat.completions.create(model="scripted", messages=parts, max_tokens=2, extra_body=extra)  # type: ignore[arg-type]
    prompt = bytes(t for t in answer.prompt_token_ids if t < 256).decode()  # type: ignore[attr-defined]
    assert "one\ntwo" in prompt
    assert prompt.endswith("THINK")


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings(client: openai.OpenAI, encoding: str) -> None:
    answer = client.embeddings.create(model="scripted", input=["one", "two"], encoding_format=encoding)  # type: ignore[arg-type]
    assert [d.index for d in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens == 6
    if encoding == "float":
        assert answer.data[0].embedding == pytest.approx(scripted.embed(list(b"one"), "last"), abs=1e-6)
    default = client.embeddings.create(model="scripted", input="one")
    assert default.data[0].embedding == pytest.approx(scripted.embed(list(b"one"), "last"), abs=1e-6)


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    wanted = {
        "model": "scripted",
        "input": "hello",
        "max_output_tokens": 900,
        "temperature": 0,
        "instructions": "be",
    }
    whole = client.responses.create(**wanted)  # type: ignore[call-overload]
    with client.responses.stream(**wanted) as stream:  # type: ignore[arg-type]
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text != ""
    assert final.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert whole.status == ("incomplete" if whole.incomplete_details else "completed")
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]


def test_a_response_goes_on_from_its_own_output(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="hello", max_output_tokens=8)
    items = [{"role": "user", "content": "hello"}, *(o.model_dump(exclude_none=True) for o in first.output)]
    items.append({"role": "user", "content": [{"type": "input_text", "text": "go on"}]})
    again = client.responses.create(model="scripted", input=items, max_output_tokens=8)  # type: ignore[arg-type]
    assert again.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 99999}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 50}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a"] * 400}, "stop"),
        ({"logit_bias": {"900000": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"extra_body": {"use_beam_search": True}, "stream": True}, "stream"),
        ({"extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs.messages"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"extra_body": {"chat_template": "x"}}, "chat_template"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=HELLO, **fields)  # type: ignore[call-overload]
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.code


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 30}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": "x" * 3000}, "prompt"),
        ({"logprobs": 50}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"min_tokens": 40}}, "min_tokens"),
        ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
    ],
)
def test_completions_refuse_by_name(client: openai.OpenAI, fields: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "scripted", "prompt": "hi", **fields})  # type: ignore[call-overload]
    assert caught.value.param == param


def test_a_model_that_is_not_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_a_poisoned_request_fails_alone(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.completions.create(model="scripted", prompt="!poison", max_tokens=9)
    with pytest.raises(openai.InternalServerError, match="breaks the queue"):
        client.completions.create(model="scripted", prompt="!poison-add", max_tokens=9)
    with pytest.raises(openai.APIError, match="not finite"):  # before the first event, or after some
        list(client.completions.create(model="scripted", prompt="!poison", max_tokens=9, stream=True))
    assert client.completions.create(model="scripted", prompt="fine", max_tokens=9).choices[0].text
