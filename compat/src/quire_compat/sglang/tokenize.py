"""/tokenize: Quire's own, and lists of prompts."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest

from quire.serve.errors import invalid
from quire.serve.fields.shapes import Fields
from quire.serve.native import tokenize as native
from quire.serve.native.protocol import TOKENIZE, TokenizeRequest
from quire.serve.service import Service
from quire_compat.sglang.calls import MAX_PROMPTS


class TokenizeBody(TokenizeRequest, kw_only=True):
    """POST /tokenize: one text, texts, or a conversation."""

    prompt: str | list[str] | None = None  # type: ignore[assignment]


class ManyTokenized(msgspec.Struct):
    """Answer of /tokenize to a list of prompts."""

    count: list[int]
    max_model_len: int
    tokens: list[list[int]]
    token_strs: list[list[str] | None] | None = None
    token_offsets: list[list[list[int]] | None] | None = None


FIELDS = Fields(
    path="/tokenize",
    body=TokenizeBody,
    taken={**TOKENIZE.taken, "prompt": "a text, or a list of texts"},
    ignored=TOKENIZE.ignored,
    refused=TOKENIZE.refused,
    inner=TOKENIZE.inner,
)


async def tokenize(service: Service, http: HttpRequest) -> bytes:
    """Answer one prompt with its tokens, and a list of prompts with lists."""
    body = await service.read(http, FIELDS)
    prompts = body.prompt
    if not isinstance(prompts, list):
        return await native.tokenize(service, http, body)
    service.check_model(body.model)
    if body.messages is not None or len(prompts) > MAX_PROMPTS:
        raise invalid(f"give either messages or at most {MAX_PROMPTS} prompts", "prompt", "invalid_value")

    def job() -> bytes:
        found = [native.tokenized(service, msgspec.structs.replace(body, prompt=one)) for one in prompts]
        return msgspec.json.encode(
            ManyTokenized(
                [one.count for one in found],
                service.front.info.max_model_len,
                [one.tokens for one in found],
                [one.token_strs for one in found] if body.return_token_strs else None,
                [one.token_offsets for one in found] if body.return_token_offsets else None,
            )
        )

    return await service.work(http, job)
