"""/v1/messages/count_tokens: the length of a conversation as a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request as HttpRequest

from quire.lazy import Lazy
from quire.serve.anthropic.conversation import conversation
from quire.serve.anthropic.protocol import COUNT_TOKENS, CountRequest
from quire.serve.openai.conversation import render
from quire.serve.service import Service

if TYPE_CHECKING:
    from quire.serve.anthropic import input as reading
    from quire.serve.anthropic.input import Tools
else:
    reading = Lazy("quire.serve.anthropic.input")


class TokenCount(msgspec.Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


_encode = msgspec.json.Encoder().encode


async def count(service: Service, http: HttpRequest) -> bytes:
    """Read, check and count a conversation."""
    body = await service.read(http, COUNT_TOKENS)
    service.check_model(body.model)
    tools = reading.tools_of(body.tools or (), body.tool_choice)
    count = await service.work(http, lambda: _count(service, body, tools), renders=True)
    for name in tools.dropped:
        service.notice(http, name)
    return _encode(TokenCount(count))


def _count(service: Service, body: CountRequest, tools: Tools) -> int:
    chat = conversation(body, tools)
    text = render(service, chat, service.offer(chat)).text
    return len(service.front.encode(text, add_special_tokens=False))
