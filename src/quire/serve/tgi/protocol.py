"""The body and the answers of TGI's /generate and /generate_stream as structs. Names are those of TGI 3."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quire.serve.openai.protocol import Count, Int64, Positive


class Grammar(msgspec.Struct):
    """The form of the output: a JSON Schema, a regular expression, or a named schema."""

    type: Literal["json", "regex", "json_schema"]
    value: str | dict[str, Any]


class Parameters(msgspec.Struct, kw_only=True):
    """How tokens are drawn. Without any parameter of drawing, the likeliest token is taken."""

    max_new_tokens: Positive | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: Positive | None = None
    top_p: float | None = None
    seed: Int64 | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: list[str] | None = None
    best_of: Positive | None = None
    return_full_text: bool | None = None
    truncate: Positive | None = None
    details: bool = False
    decoder_input_details: bool = False
    top_n_tokens: Count | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None


class TgiRequest(msgspec.Struct, kw_only=True):
    """POST /generate and /generate_stream."""

    inputs: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)
    stream: bool = False


class Token(msgspec.Struct):
    id: int
    text: str
    logprob: float | None
    special: bool = False


class PrefillToken(msgspec.Struct):
    id: int
    text: str
    logprob: float | None


class Details(msgspec.Struct, omit_defaults=True):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] = []
    best_of_sequences: list[dict[str, Any]] | None = None


class Generated(msgspec.Struct, omit_defaults=True):
    """Answer of /generate."""

    generated_text: str
    details: Details | None = None


class StreamDetails(msgspec.Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamEvent(msgspec.Struct):
    """An event of /generate_stream; the last one has the whole text."""

    index: int
    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None
    top_tokens: list[Token] = []
