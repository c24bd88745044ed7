"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest

from quire.serve.errors import invalid
from quire.serve.native.protocol import DETOKENIZE, TOKENIZE, TokenizeRequest
from quire.serve.openai.chat_protocol import ChatRequest
from quire.serve.openai.conversation import render
from quire.serve.service import Service


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    token_offsets: list[list[int]] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


_encode = msgspec.json.Encoder().encode


async def tokenize(service: Service, http: HttpRequest, body: TokenizeRequest | None = None) -> bytes:
    body = body or await service.read(http, TOKENIZE)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt", "invalid_value")
    renders = body.messages is not None
    return await service.work(http, lambda: _encode(tokenized(service, body)), renders)


def tokenized(service: Service, body: TokenizeRequest) -> Tokenized:
    front = service.front
    if body.messages is None:
        text, special = body.prompt or "", body.add_special_tokens is not False
    else:
        conversation = ChatRequest(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
        )
        text = render(service, conversation, service.offer(conversation)).text
        special = bool(body.add_special_tokens)
    tokens, names, offsets = front.encode(text, special), None, None
    if body.return_token_offsets and front.tokenizer is not None:
        offsets = [list(place) for place in front.tokenizer.offsets(text, special)]
    if body.return_token_strs and front.tokenizer is not None:
        names = [front.tokenizer.id_to_token(token) or "" for token in tokens]
    return Tokenized(len(tokens), front.info.max_model_len, tokens, names, offsets)


async def detokenize(service: Service, http: HttpRequest) -> bytes:
    body = await service.read(http, DETOKENIZE)
    service.check_model(body.model)
    vocab = service.front.info.vocab_size
    if (largest := max(body.tokens, default=0)) >= vocab:
        raise invalid(
            f"token id {largest} is outside the vocabulary (0 to {vocab - 1})", "tokens", "invalid_value"
        )
    return await service.work(http, lambda: _encode(Detokenized(service.text_of(body.tokens))))
