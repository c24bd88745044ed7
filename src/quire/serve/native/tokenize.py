"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from quire.serve.errors import invalid
from quire.serve.openai.chat_protocol import ChatRequest
from quire.serve.openai.conversation import render
from quire.serve.openai.protocol import Messages, Name, TokenId
from quire.serve.service import Service


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: Name | None = None


class Detokenized(msgspec.Struct):
    prompt: str


tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
_encode = msgspec.json.Encoder().encode


async def tokenize(service: Service, http: HttpRequest) -> bytes:
    body = await service.read(http, tokenize_decoder)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt", "invalid_value")
    size = len(body.prompt or "") + len(str(body.messages or ""))
    return await service.work(size, lambda: _encode(_tokenized(service, body)), renders=True)


def _tokenized(service: Service, body: TokenizeRequest) -> Tokenized:
    front = service.front
    if body.messages is None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        tokens = front.encode(body.prompt or "", special)
    else:
        conversation = ChatRequest(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
        )
        tokens = front.encode(
            render(service, conversation, service.offer(conversation)), bool(body.add_special_tokens)
        )
    names = None
    if body.return_token_strs and front.tokenizer is not None:
        names = [front.tokenizer.id_to_token(token) or "" for token in tokens]
    return Tokenized(len(tokens), front.info.max_model_len, tokens, names)


async def detokenize(service: Service, http: HttpRequest) -> bytes:
    body = await service.read(http, detokenize_decoder)
    service.check_model(body.model)
    vocab = service.front.info.vocab_size
    for token in body.tokens:
        if token >= vocab:
            raise invalid(
                f"token id {token} is outside the vocabulary (0 to {vocab - 1})", "tokens", "invalid_value"
            )
    return await service.work(len(body.tokens), lambda: _encode(Detokenized(service.text_of(body.tokens))))
