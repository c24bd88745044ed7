"""The fields of the endpoints that make vectors, and of those that tokenize and count."""

from __future__ import annotations

from quire.serve.fields.common import (
    DRAW,
    LABELS,
    MESSAGES,
    MODEL,
    OTHERS_IGNORED,
    OTHERS_REFUSED,
    TOOLS,
)
from quire.serve.fields.openai import CONVERSATION
from quire.serve.fields.shapes import Fields, Refused
from quire.serve.native.protocol import (
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)

_CUT = {name: DRAW[name] for name in ("truncate_prompt_tokens", "truncation_side", "priority", "request_id")}
_ACTIVATED = {"use_activation": "false returns the model's outputs as they are"}
_TEXTS = {
    **MODEL,
    "input": "a text, texts, token ids, or lists of them",
    "messages": "a conversation instead of input",
    "add_generation_prompt": "begin an answer's turn after the messages",
    "continue_final_message": "leave the last message open",
    "chat_template": "a template of the request's own (--trust-request-chat-template)",
    "chat_template_kwargs": "variables of the chat template",
    "add_special_tokens": "add the tokenizer's special tokens",
    "cache_salt": DRAW["cache_salt"],
    **_CUT,
    **_ACTIVATED,
}
_VECTORS = {
    "encoding_format": "float, base64, bytes (the numbers alone) or bytes_only",
    "embed_dtype": "float32, float16 or bfloat16, for base64 and bytes",
    "endianness": "little, big or native (little), for base64 and bytes",
    "pooling": "mean, last, cls, or all (a vector of each token); the model's own way by default",
    "dimensions": "keep the first dimensions, normalized (Matryoshka)",
}
_IGNORED = {**LABELS, **OTHERS_IGNORED}
_REFUSED = {
    **OTHERS_REFUSED,
    "padding": Refused("inputs are not padded", ("do_not_pad",)),
    "normalize": Refused("use use_activation", (True,)),
    "softmax": Refused("use use_activation", (True,)),
    "activation": Refused("use use_activation", (True,)),
    "inputs": Refused("use input"),
}

EMBEDDINGS = Fields(
    path="/v1/embeddings",
    body=EmbeddingRequest,
    taken={**_TEXTS, **_VECTORS},
    ignored=_IGNORED,
    refused=_REFUSED,
    inner={"messages": MESSAGES},
)
POOLING = Fields(
    path="/pooling",
    body=PoolingRequest,
    taken={
        **_TEXTS,
        **_VECTORS,
        "task": "embed, classify or encode as the model does; token_embed or token_classify: a result of each token",
    },
    ignored=_IGNORED,
    refused=_REFUSED,
    inner={"messages": MESSAGES},
)
CLASSIFY = Fields(
    path="/classify",
    body=ClassifyRequest,
    taken=_TEXTS,
    ignored=_IGNORED,
    refused=_REFUSED,
    inner={"messages": MESSAGES},
)
_PAIRS = {
    **MODEL,
    **_CUT,
    **_ACTIVATED,
    "max_tokens_per_query": "keep this many tokens of each first text",
    "max_tokens_per_doc": "keep this many tokens of each second text",
    "instruction": "a text before each first text",
}
SCORE = Fields(
    path="/score",
    body=ScoreRequest,
    taken={
        **_PAIRS,
        "text_1": "a text or texts",
        "text_2": "a text or texts",
        **dict.fromkeys(("queries", "data_1"), "other names of text_1"),
        **dict.fromkeys(("documents", "items", "data_2"), "other names of text_2"),
    },
    ignored=_IGNORED,
    refused=_REFUSED,
)
RERANK = Fields(
    path="/rerank",
    body=RerankRequest,
    taken={
        **_PAIRS,
        "query": "a text",
        "queries": "another name of query",
        "documents": "texts, or objects with a text",
        "top_n": "return this many documents; 0 returns all",
        "return_documents": "repeat the texts in the answer",
    },
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
    taken={
        **MODEL,
        "prompt": "a text",
        **{name: CONVERSATION[name] for name in TokenizeRequest.__struct_fields__ if name in CONVERSATION},
        "add_special_tokens": "add the tokenizer's special tokens",
        "return_token_strs": "return the tokens as text",
        "return_token_offsets": "return where each token begins and ends in the text",
    },
    ignored={name: why for name, why in _IGNORED.items() if name != "return_token_offsets"},
    refused=OTHERS_REFUSED,
    inner={"messages": MESSAGES, "tools": TOOLS},
)
DETOKENIZE = Fields(
    path="/detokenize",
    body=DetokenizeRequest,
    taken={**MODEL, "tokens": "token ids"},
    ignored=_IGNORED,
    refused=OTHERS_REFUSED,
)
