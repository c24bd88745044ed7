"""`matched_stop`: SGLang's name for what ended a choice, in the answers of OpenAI's endpoints."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from quire.serve.call import Call, Piece
from quire.serve.errors import HttpError
from quire.serve.openai import chat as chats
from quire.serve.openai import completions
from quire.serve.service import Service
from quire_compat.sglang.calls import matched

Choices = list[dict[str, Any]]
Answering = completions.CompletionAnswer | chats.ChatAnswer

_encode = msgspec.json.Encoder().encode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


async def complete(service: Service, http: HttpRequest) -> Matching:
    """Answer /v1/completions as Quire does, with `matched_stop`."""
    return Matching(await completions.complete(service, http))


async def chat(service: Service, http: HttpRequest) -> Matching:
    """Answer /v1/chat/completions as Quire does, with `matched_stop`."""
    return Matching(await chats.chat(service, http))


class Matching:
    """Adds `matched_stop` to another answer: to each choice of a body, and to the last chunk of one in a stream."""

    def __init__(self, inner: Answering) -> None:
        self._inner = inner

    @property
    def call(self) -> Call:
        return self._inner.call

    @property
    def streaming(self) -> bool:
        return self._inner.streaming

    def whole(self) -> bytes:
        answer: dict[str, Any] = _fields(self._inner.whole())
        choices: Choices = _choices(answer["choices"])
        streams = self.call.streams
        count = len(choices) // len(streams)
        samples = [one for stream in streams for one in completions.best(stream.output.outputs, count)]
        for choice, sample in zip(choices, samples, strict=True):
            choice["matched_stop"] = matched(sample) if _stopped(choice) else None
        return _encode({**answer, "choices": choices})

    def step(self, pieces: list[Piece]) -> bytes:
        events = self._inner.step(pieces)
        ends = {}
        for place, chunk in pieces:
            if chunk.finish_reason == "stop":
                samples = self.call.streams[place].output.outputs
                ends[place * len(samples) + chunk.index] = matched(samples[chunk.index])
        if not ends:
            return events
        return b"".join(_ended(one, ends) + b"\n\n" for one in events.split(b"\n\n") if one)

    def end(self) -> bytes:
        return self._inner.end()

    def error_event(self, error: HttpError) -> bytes:
        return self._inner.error_event(error)


def _stopped(choice: dict[str, Any]) -> bool:
    return bytes(choice.get("finish_reason", b"")) == b'"stop"'


def _ended(event: bytes, ends: dict[int, int | str | None]) -> bytes:
    """Add `matched_stop` to an event if it ends a choice; `ends` has the matches by the choice's index."""
    chunk: dict[str, Any] = _fields(event.removeprefix(b"data: "))
    choices: Choices = _choices(chunk["choices"])
    last = [choice for choice in choices if _stopped(choice)]
    for choice in last:
        choice["matched_stop"] = ends[int(bytes(choice["index"]))]
    return b"data: " + _encode({**chunk, "choices": choices}) if last else event
