"""Types of the fields that the bodies of several APIs share, beside the types in `quire.fields`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from quire.fields import INT32, INT64, Seed, TokenId, says

Count = Annotated[int, Meta(ge=0, le=INT32)]
Positive = Annotated[int, Meta(ge=1, le=INT32)]
CountOrAll = Annotated[int, Meta(ge=-1, le=INT32)]
Seed64 = Annotated[Seed, Meta(ge=-INT64 - 1, le=INT64)]

Model = Annotated[str, says("one of the served names; the first one by default", max_length=1024)]
Stream = Annotated[bool | None, says("answer with server-sent events")]
Progress = Annotated[bool, says("chunks with prompt_progress while the prompt is computed (llama.cpp)")]
Message = dict[str, Any]
Messages = Annotated[list[Message], Meta(min_length=1)]
Prompt = str | list[str | TokenId | list[TokenId]]
AddSpecial = Annotated[bool | None, says("add the tokenizer's special tokens to the prompt")]

Truncate = Annotated[int, says("keep this many tokens of the prompt; -1 as many as fit", ge=-1, le=INT32)]
TruncationSide = Annotated[
    Literal["left", "right"], says("which end of the prompt is cut: left (default) or right")
]
Priority = Annotated[
    int, says("lower runs first, with --scheduling-policy priority", ge=-INT32 - 1, le=INT32)
]
CacheSalt = Annotated[
    str, says("separates the prefix cache from that of other salts", min_length=1, max_length=4096)
]
RequestId = Annotated[str, says("id of the answer and of the log line", pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]

Tools = Annotated[list[dict[str, Any]], says("functions that the model may call")]
BeginAnswer = Annotated[bool | None, says("begin the answer's turn")]
GoOn = Annotated[bool, says("go on with the last message")]
Template = Annotated[str, says("a template of the request's own (--trust-request-chat-template)")]
TemplateWords = Annotated[dict[str, Any], says("variables of the chat template")]
