"""The bodies and answers of /v1/completions as structs."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.fields import says
from quire.serve.fields.common import Count, CountOrAll, Progress, Prompt
from quire.serve.fields.foreign import ANSWERS_REFUSED, LABELS, OTHERS_IGNORED
from quire.serve.fields.parts import INNER
from quire.serve.fields.shapes import Fields
from quire.serve.openai.logprobs import CompletionLogprobs, PromptLogprobs
from quire.serve.openai.protocol import AnswerMetrics, SamplingFields, UsageInfo


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[Prompt, says("a text, texts, token ids, or lists of them")]
    suffix: (
        Annotated[str, says("what follows the output, for models with fill-in-the-middle tokens")] | None
    ) = None
    max_tokens: (
        Annotated[Count, says("most tokens of output, 16 by default; 0 with echo scores the prompt")] | None
    ) = None
    echo: Annotated[bool | None, says("repeat the prompt before the output")] = False
    logprobs: Annotated[CountOrAll, says("log-probabilities of this many tokens per position")] | None = None
    best_of: (
        Annotated[Count, says("samples to draw; the n with the highest mean log-probability are returned")]
        | None
    ) = None
    return_progress: Progress = False


COMPLETIONS = Fields(
    path="/v1/completions",
    body=CompletionRequest,
    ignored={**LABELS, **OTHERS_IGNORED},
    refused=ANSWERS_REFUSED,
    inner=INNER,
)


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
    """Answer of /v1/completions, and a chunk of its stream. `prompt_progress` is llama.cpp's."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: UsageInfo | UnsetType | None = UNSET
    service_tier: str | None = None
    system_fingerprint: str | None = None
    metrics: AnswerMetrics | None = None
    prompt_progress: dict[str, int] | UnsetType = UNSET
