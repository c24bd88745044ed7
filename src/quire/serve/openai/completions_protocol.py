"""The bodies and answers of /v1/completions as structs."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.openai.logprobs import CompletionLogprobs, PromptLogprobs
from quire.serve.openai.protocol import AnswerMetrics, Count, CountOrAll, Prompt, SamplingFields, UsageInfo


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = False
    logprobs: CountOrAll | None = None
    best_of: Count | None = None
    suffix: str | None = None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(msgspec.Struct):
    """Answer of /v1/completions, and a chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: UsageInfo | UnsetType | None = UNSET
    service_tier: str | None = None
    system_fingerprint: str | None = None
    metrics: AnswerMetrics | None = None
