"""/generate: prompts in SGLang's form, streamed or whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from quire.serve.call import Call, Piece, Prompt
from quire.serve.errors import HttpError, invalid
from quire.serve.openai.texts import MAX_PROMPTS
from quire.serve.service import Service
from quire.serve.stream import DONE, event
from quire_compat.sglang.calls import GenerateBody, Part, first_of, parts_of, result
from quire_compat.sglang.fields import GENERATE

_encode = msgspec.json.Encoder().encode


async def generate(service: Service, http: HttpRequest) -> GenerateAnswer:
    """Read, check and queue a call. Raises HttpError, RequestError or OverloadedError."""
    return await queue(service, http, await service.read(http, GENERATE))


async def queue(service: Service, http: HttpRequest, body: GenerateBody) -> GenerateAnswer:
    """Check and queue a body. Raises HttpError, RequestError or OverloadedError."""
    parts, single = parts_of(body)
    if sum(part.params.n for part in parts) > MAX_PROMPTS:
        raise invalid(f"one call makes at most {MAX_PROMPTS} samples", "sampling_params.n", "invalid_value")
    adapters = {part.adapter for part in parts}
    if len(adapters) > 1:
        raise invalid("lora_path: one call takes one adapter", "lora_path", "invalid_value")
    model = service.check_model(adapters.pop())
    call_id = service.new_id("", http)
    parts = [replace(part, rid=part.rid or f"{call_id}-{place:x}") for place, part in enumerate(parts)]

    def make() -> list[Prompt]:
        return [_prompt(service, body, part, call_id) for part in parts]

    made = await service.work(http, make)
    call = await service.start(http, call_id, made, model)
    return GenerateAnswer(call, parts, single, body.stream)


def _prompt(service: Service, body: GenerateBody, part: Part, call_id: str) -> Prompt:
    request = service.front.request(
        service.next_request_id(call_id),
        part.prompt,
        part.params,
        priority=body.priority or 0,
        salt=part.salt,
        clamp=True,
    )
    field = part.constrained_by
    text = part.prompt if isinstance(part.prompt, str) else None
    return Prompt(request, text, None if field is None else f"sampling_params.{field}")


class GenerateAnswer:
    """Writes a call as SGLang does: one object, or a list of them. Events of a stream hold all text so far."""

    def __init__(self, call: Call, parts: list[Part], single: bool, streaming: bool) -> None:
        self.call, self.streaming = call, streaming
        self._parts, self._single = parts, single
        self._first = first_of(parts)

    def whole(self) -> bytes:
        found = [
            result(part, stream, index, self.call.fingerprint)
            for part, stream in zip(self._parts, self.call.streams, strict=True)
            for index in range(part.params.n)
        ]
        return _encode(found[0] if self._single else found)

    def step(self, pieces: list[Piece]) -> bytes:
        changed = dict.fromkeys((piece.prompt, piece.chunk.index) for piece in pieces)
        return b"".join(event(self._event(position, index)) for position, index in changed)

    def end(self) -> bytes:
        return DONE

    def error_event(self, error: HttpError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    def _event(self, position: int, index: int) -> dict[str, Any]:
        stream = self.call.streams[position]
        found = result(self._parts[position], stream, index, self.call.fingerprint)
        return found if self._single else {**found, "index": self._first[position] + index}
