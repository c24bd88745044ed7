"""Bodies of the endpoints that make vectors, and of the endpoints that tokenize."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from quire.fields import INT32, Dimensions, TokenId, says
from quire.serve.fields import common
from quire.serve.fields.common import Count, Messages, Prompt
from quire.serve.fields.foreign import LABELS, OTHERS_IGNORED, OTHERS_REFUSED
from quire.serve.fields.shapes import MESSAGES, TOOLS, Fields, Refused
from quire.types import Pooling

Texts = str | list[str]
Task = Literal["embed", "classify", "encode", "token_embed", "token_classify"]
Activation = Annotated[bool, says("false returns the model's outputs as they are")]


class TextsRequest(msgspec.Struct, kw_only=True):
    """The fields of every body whose texts become vectors: `input`, or one conversation."""

    model: common.Model | None = None
    input: Annotated[Prompt, says("a text, texts, token ids, or lists of them")] | None = None
    messages: Annotated[Messages, says("a conversation instead of input")] | None = None
    add_generation_prompt: Annotated[bool, says("begin an answer's turn after the messages")] = False
    continue_final_message: Annotated[bool, says("leave the last message open")] = False
    chat_template: common.Template | None = None
    chat_template_kwargs: common.TemplateWords | None = None
    add_special_tokens: Annotated[bool, says("add the tokenizer's special tokens")] | None = None
    truncate_prompt_tokens: common.Truncate | None = None
    truncation_side: common.TruncationSide | None = None
    priority: common.Priority = 0
    cache_salt: common.CacheSalt | None = None
    request_id: common.RequestId | None = None
    use_activation: Activation | None = None


class VectorsRequest(TextsRequest, kw_only=True):
    """The fields of every body whose answer is vectors."""

    encoding_format: Annotated[
        Literal["float", "base64", "bytes", "bytes_only"],
        says("float, base64, bytes (the numbers alone) or bytes_only"),
    ] = "float"
    embed_dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"],
        says("float32, float16, bfloat16, fp8_e4m3 or fp8_e5m2, for base64 and bytes"),
    ] = "float32"
    endianness: Annotated[
        Literal["native", "little", "big"], says("little, big or native (little), for base64 and bytes")
    ] = "native"
    pooling: (
        Annotated[
            Pooling, says("mean, last, cls, or all (a vector of each token); the model's own way by default")
        ]
        | None
    ) = None
    dimensions: Dimensions | None = None


class PoolingRequest(VectorsRequest, kw_only=True):
    """POST /pooling."""

    task: (
        Annotated[
            Task,
            says(
                "embed, classify or encode as the model does; token_embed or token_classify: a result of each token"
            ),
        ]
        | None
    ) = None


class EmbeddingRequest(VectorsRequest, kw_only=True):
    """POST /v1/embeddings."""


class ClassifyRequest(TextsRequest, kw_only=True):
    """POST /classify."""


class PairsRequest(msgspec.Struct, kw_only=True):
    """The fields of every body whose texts are scored in pairs."""

    model: common.Model | None = None
    truncate_prompt_tokens: common.Truncate | None = None
    truncation_side: common.TruncationSide | None = None
    max_tokens_per_query: (
        Annotated[Count, says("keep this many tokens of each first text; 0 keeps all")] | None
    ) = None
    max_tokens_per_doc: (
        Annotated[Count, says("keep this many tokens of each second text; 0 keeps all")] | None
    ) = None
    instruction: Annotated[str, says("a text before each first text")] | None = None
    priority: common.Priority = 0
    request_id: common.RequestId | None = None
    use_activation: Activation | None = None


First = Annotated[Texts, says("another name of text_1")]
Second = Annotated[Texts, says("another name of text_2")]


class ScoreRequest(PairsRequest, kw_only=True):
    """POST /score: one first text for all second texts, or as many as there are second texts."""

    text_1: Annotated[Texts, says("a text or texts")] | None = None
    text_2: Annotated[Texts, says("a text or texts")] | None = None
    queries: First | None = None
    documents: Second | None = None
    data_1: First | None = None
    data_2: Second | None = None
    items: Second | None = None


class RerankDocument(msgspec.Struct):
    text: str


class RerankRequest(PairsRequest, kw_only=True):
    """POST /rerank. `top_n` 0 returns all documents."""

    query: Annotated[str, says("a text")] | None = None
    queries: Annotated[str, says("another name of query")] | None = None
    documents: Annotated[list[str | RerankDocument], says("texts, or objects with a text")]
    top_n: Annotated[int, says("return this many documents; 0 returns all", ge=0, le=INT32)] = 0
    return_documents: Annotated[bool, says("repeat the texts in the answer")] = True


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a text, or a conversation."""

    model: common.Model | None = None
    prompt: Annotated[str, says("a text")] | None = None
    messages: Annotated[Messages, says("the conversation, as text or text parts")] | None = None
    tools: common.Tools | None = None
    add_generation_prompt: common.BeginAnswer = None
    continue_final_message: common.GoOn = False
    chat_template: common.Template | None = None
    chat_template_kwargs: common.TemplateWords | None = None
    add_special_tokens: Annotated[bool, says("add the tokenizer's special tokens")] | None = None
    return_token_strs: Annotated[bool | None, says("return the tokens as text")] = False
    return_token_offsets: Annotated[
        bool | None, says("return where each token begins and ends in the text")
    ] = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: common.Model | None = None
    tokens: Annotated[list[TokenId], says("token ids")]


_IGNORED = {**LABELS, **OTHERS_IGNORED}
_REFUSED = {
    **OTHERS_REFUSED,
    "padding": Refused("inputs are not padded", ("do_not_pad",)),
    **dict.fromkeys(("normalize", "softmax", "activation"), Refused("use use_activation", (True,))),
    "inputs": Refused("use input"),
}
_INNER = {"messages": MESSAGES}

EMBEDDINGS = Fields(
    path="/v1/embeddings", body=EmbeddingRequest, ignored=_IGNORED, refused=_REFUSED, inner=_INNER
)
POOLING = Fields(path="/pooling", body=PoolingRequest, ignored=_IGNORED, refused=_REFUSED, inner=_INNER)
CLASSIFY = Fields(path="/classify", body=ClassifyRequest, ignored=_IGNORED, refused=_REFUSED, inner=_INNER)
SCORE = Fields(path="/score", body=ScoreRequest, ignored=_IGNORED, refused=_REFUSED)
RERANK = Fields(
    path="/rerank",
    body=RerankRequest,
    ignored={
        **_IGNORED,
        "rank_fields": "documents have one text",
        "max_chunks_per_doc": "documents are not split",
    },
    refused=_REFUSED,
)
TOKENIZE = Fields(
    path="/tokenize",
    body=TokenizeRequest,
    ignored={name: why for name, why in _IGNORED.items() if name != "return_token_offsets"},
    refused=OTHERS_REFUSED,
    inner={**_INNER, "tools": TOOLS},
)
DETOKENIZE = Fields(path="/detokenize", body=DetokenizeRequest, ignored=_IGNORED, refused=OTHERS_REFUSED)
