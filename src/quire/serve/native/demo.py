"""/generate of vLLM's demonstration server: prompt and output as one text; a stream is one JSON object per line."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest

from quire.serve.call import Call, Piece
from quire.serve.errors import HttpError
from quire.serve.fields.openai import DEMO
from quire.serve.openai.completions import queue
from quire.serve.service import Service

_encode = msgspec.json.Encoder().encode


class DemoText(msgspec.Struct):
    """Answer of /generate: the prompt with each of its outputs."""

    text: list[str]


async def generate(service: Service, http: HttpRequest) -> DemoAnswer:
    """Read, check and queue a call. Raises HttpError, RequestError or OverloadedError."""
    body = await service.read(http, DEMO)
    _, call = await queue(service, http, body)
    return DemoAnswer(call, bool(body.stream))


class DemoAnswer:
    """Writes a call as the texts so far."""

    def __init__(self, call: Call, streaming: bool) -> None:
        self.call, self.streaming = call, streaming

    def whole(self) -> bytes:
        return _encode(
            DemoText(
                [
                    (stream.output.prompt or "") + sample.text
                    for stream in self.call.streams
                    for sample in stream.output.outputs
                ]
            )
        )

    def step(self, pieces: list[Piece]) -> bytes:
        return self.whole() + b"\n"

    def end(self) -> bytes:
        return b""

    def error_event(self, error: HttpError) -> bytes:
        return error.body() + b"\n"
