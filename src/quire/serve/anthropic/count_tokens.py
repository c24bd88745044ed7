"""/v1/messages/count_tokens: the length of a conversation as a prompt."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest

from quire.serve.anthropic.conversation import check_thinking, conversation
from quire.serve.anthropic.protocol import CountRequest
from quire.serve.openai.conversation import render
from quire.serve.service import Service


class TokenCount(msgspec.Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


decoder = msgspec.json.Decoder(CountRequest)
_encode = msgspec.json.Encoder().encode
REFUSED = {
    "output_config": "there is nothing to configure",
}


async def count(service: Service, http: HttpRequest) -> bytes:
    """Read, check and count a conversation."""
    body = await service.read(http, decoder)
    service.check_model(body.model)
    service.refuse(body, REFUSED)
    check_thinking(service, body)
    return _encode(
        TokenCount(await service.work(len(str(body.messages)), lambda: _count(service, body), renders=True))
    )


def _count(service: Service, body: CountRequest) -> int:
    chat = conversation(body)
    text = render(service, chat, service.offer(chat))
    return len(service.front.encode(text, add_special_tokens=False))
