"""The text of a large call is made in slices, between which other calls go on; it is the same as in one piece."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import msgspec
import pytest

import quire.serve.call as module
import quire.serve.stream as streams
from quire.client.logprobs import Logprob
from quire.client.requests import Front
from quire.params import SamplingParams
from quire.serve.call import Call, Prompt
from quire.serve.errors import HttpError
from quire.serve.openai import logprobs
from quire.serve.openai.logprobs import prompt_logprobs
from quire.serve.options import ServerConfig
from quire.types import Delta, FinishReason, ModelCard, Request, TokenLogprobs, Usage
from tests.serve.scripted import MAX_LEN, VOCAB, make_tokenizer

N = 20
CARD = ModelCard(name="scripted", max_model_len=MAX_LEN, vocab_size=VOCAB, eos_token_ids=())


class Nothing:
    """An engine, and a generation, that takes requests and computes nothing."""

    def submit(self, requests: list[Request]) -> Nothing:
        return self

    def end_sample(self, request_id: str, index: int) -> None:
        """A stop string was found."""


def make_call() -> Call:
    tokenizer = make_tokenizer()
    front = Front(CARD, tokenizer, None, 0)
    request = front.request("a", "hello", SamplingParams(n=N, max_tokens=4, stop=["xy"]))
    return Call(Nothing(), front, "a", 0, [Prompt(request, "hello")], ServerConfig())  # type: ignore[arg-type]


def deltas() -> list[Delta]:
    texts = [f"ab{i:02d}".encode() if i % 2 else b"axyb" for i in range(N)]
    return [
        Delta("a", i, list(text), Usage(5, 0, 4), finish_reason=FinishReason.LENGTH)
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize("seconds", [-1.0, 1e9])
def test_others_go_on_between_slices(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", seconds)
    call = make_call()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> list[Any]:
        task = asyncio.create_task(other())
        found = [piece async for pieces in call.slices(deltas()) for piece in pieces]
        task.cancel()
        return found

    found = asyncio.run(run())
    expected = [piece for delta in deltas() for piece in make_call().pieces([delta])]
    assert [(p.chunk.index, p.chunk.text) for p in found] == [(p.chunk.index, p.chunk.text) for p in expected]
    assert [o.text for o in call.streams[0].output.outputs] == [
        f"ab{i:02d}" if i % 2 else "a" for i in range(N)
    ]
    assert turns >= N - 1 if seconds < 0 else turns == 0


def test_the_samples_of_a_request_share_the_tables_of_its_stop_strings() -> None:
    first, second, *_ = make_call().streams[0]._detok
    assert first is not None
    assert second is not None
    assert first._matcher is not second._matcher
    assert first._matcher._next is second._matcher._next  # type: ignore[union-attr]
    assert (first.push(b"ax"), second.push(b"y"), first.push(b"y")) == ("a", "y", "")
    assert (first.stopped, second.stopped) == ("xy", None)


def scored(monkeypatch: pytest.MonkeyPatch, few: int, **fields: Any) -> tuple[Call, list[Delta]]:
    """A call whose prompt's five tokens have all log-probabilities of the vocabulary."""
    monkeypatch.setattr(module, "FEW_SCORES", few)
    monkeypatch.setattr(streams, "FEW_SCORES", few)
    front = Front(replace(CARD, max_logprobs=VOCAB), make_tokenizer(), None, 0)
    params = SamplingParams(max_tokens=4, prompt_logprobs=-1, logprobs=0, **fields)
    request = front.request("a", "hello", params)
    call = Call(Nothing(), front, "a", 0, [Prompt(request, "hello")], ServerConfig())  # type: ignore[arg-type]
    scores = [
        TokenLogprobs(t, -1.0, 1, list(range(VOCAB)), [-1.0 - i for i in range(VOCAB)]) for t in b"ello"
    ]
    parts = [Delta("a", 0, [], Usage(5, 0, 0), prompt_logprobs=[one]) for one in scores]
    last = TokenLogprobs(97, -1.0, 1, [], [])
    return call, [*parts, Delta("a", 0, [97], Usage(5, 0, 1), [last], finish_reason=FinishReason.LENGTH)]


@pytest.mark.parametrize("few", [0, 1 << 30])
def test_many_log_probabilities_are_made_in_threads(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's scores come in parts, and are in the first event, which has a token."""
    call, parts = scored(monkeypatch, few)
    threads: set[int] = set()
    entry = call.streams[0]._entry

    def counted(scores: TokenLogprobs) -> dict[int, Logprob]:
        threads.add(threading.get_ident())
        return entry(scores)

    monkeypatch.setattr(call.streams[0], "_entry", counted)

    async def run() -> list[Any]:
        return [piece for part in parts async for pieces in call.slices([part]) for piece in pieces]

    found = asyncio.run(run())
    assert [piece.chunk.text for piece in found] == ["a"]
    assert (threading.get_ident() in threads) == (few > 0)
    whole = call.streams[0].output.prompt_logprobs
    assert whole is not None
    assert [None if one is None else len(one) for one in whole] == [None, *[VOCAB] * 4]
    assert call.size == 5 * VOCAB + 1
    plain = msgspec.json.encode(prompt_logprobs(call.streams[0]))
    monkeypatch.setattr(logprobs, "MANY", 10)
    assert msgspec.json.encode(prompt_logprobs(call.streams[0])) == plain


def test_log_probabilities_of_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SCORES", 4 * VOCAB)
    with pytest.raises(HttpError, match="log-probabilities: ask for fewer"):
        scored(monkeypatch, 0)
    scored(monkeypatch, 0, prompt_logprob_start=3)


@pytest.mark.parametrize("size", [0, 10, 11, 35])
def test_a_large_body_is_sent_in_parts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PART_BYTES", 10)
    body, sent = bytes(range(size)), list[dict[str, Any]]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(streams.Direct(app)({"type": "http"}, send, send))  # type: ignore[arg-type]
    parts = sent[1:]
    assert b"".join(part["body"] for part in parts) == body
    assert all(len(part["body"]) <= 10 for part in parts)
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
