"""The bodies of the endpoints that make vectors, and of those that tokenize."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.serve.openai.protocol import (
    CacheSalt,
    CountOrAll,
    Int32,
    Messages,
    Name,
    Positive,
    Prompt,
    RequestId,
    TokenId,
)
from quire.types import Pooling

Texts = str | list[str]
Task = Literal["embed", "classify", "encode", "token_embed", "token_classify"]


class TextsRequest(msgspec.Struct, kw_only=True):
    """The fields of every body whose texts become vectors: `input`, or one conversation."""

    input: Prompt | None = None
    messages: Messages | None = None
    model: Name | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: CountOrAll | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Int32 = 0
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None
    use_activation: bool | None = None


class VectorsRequest(TextsRequest, kw_only=True):
    """The fields of every body whose answer is vectors."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    endianness: Literal["native", "little", "big"] = "native"
    pooling: Pooling | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class PoolingRequest(VectorsRequest, kw_only=True):
    """POST /pooling."""

    task: Task | None = None


class EmbeddingRequest(VectorsRequest, kw_only=True):
    """POST /v1/embeddings."""


class ClassifyRequest(TextsRequest, kw_only=True):
    """POST /classify."""


class PairsRequest(msgspec.Struct, kw_only=True):
    """The fields of every body whose texts are scored in pairs."""

    model: Name | None = None
    truncate_prompt_tokens: CountOrAll | None = None
    truncation_side: Literal["left", "right"] | None = None
    max_tokens_per_query: Positive | None = None
    max_tokens_per_doc: Positive | None = None
    instruction: str | None = None
    priority: Int32 = 0
    request_id: RequestId | None = None
    use_activation: bool | None = None


class ScoreRequest(PairsRequest, kw_only=True):
    """POST /score: one first text for all second texts, or as many as there are second texts."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    items: Texts | None = None


class RerankDocument(msgspec.Struct):
    text: str


class RerankRequest(PairsRequest, kw_only=True):
    """POST /rerank. `top_n` 0 returns all documents."""

    documents: list[str | RerankDocument]
    query: str | None = None
    queries: str | None = None
    top_n: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    return_documents: bool = True


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a text, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    return_token_offsets: bool | None = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: Name | None = None
