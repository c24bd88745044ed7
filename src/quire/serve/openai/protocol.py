"""OpenAI's completions and chat completions as structs, with vLLM's extra fields. Knows shapes, no engine.

What becomes of each field is in `quire.serve.fields`. In answers, UNSET fields are left out and None is `null`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Positive = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
CountOrAll = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
TokenId = Count
Name = Annotated[str, Meta(max_length=1024)]
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=4096)]
Message = dict[str, Any]
Messages = Annotated[list[Message], Meta(min_length=1)]
Stop = str | list[str]
Prompt = str | list[str | TokenId | list[TokenId]]


class Repetition(msgspec.Struct):
    """Ends the output where a pattern of tokens of some size is repeated `min_count` times."""

    max_pattern_size: Count = 0
    min_pattern_size: Count = 0
    min_count: Count = 0


class StreamOptions(msgspec.Struct):
    """`include_usage` ends the stream with its usage; `continuous_usage_stats` adds it to every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class PredictedText(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class Prediction(msgspec.Struct):
    """OpenAI's predicted output: text that the answer may follow."""

    content: str | list[PredictedText]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class DrawFields(msgspec.Struct, kw_only=True):
    """How tokens are drawn, in every OpenAI body. None takes the model's default; SamplingParams checks ranges."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: CountOrAll | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    min_tokens: Count | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    stream_interval: Positive | None = None
    vllm_xargs: dict[str, Any] | None = None
    thinking_token_budget: CountOrAll | None = None
    repetition_detection: Repetition | None = None
    truncate_prompt_tokens: CountOrAll | None = None
    truncation_side: Literal["left", "right"] = "left"
    priority: Int32 = 0
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None


class SamplingFields(DrawFields, kw_only=True):
    """The fields that completions and chats share."""

    model: Name | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    spaces_between_special_tokens: bool = True
    prompt_logprobs: CountOrAll | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_metrics: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    prediction: Prediction | None = None
    speculative_decoding: bool = True
    use_beam_search: bool | None = None
    beam_width: Count | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: Count | None = None
    diversity_penalty: float | None = None
    no_repeat_ngram_size: Count | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Tokens of predicted outputs. The rejected ones are computed, and are no part of completion_tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int = 0
    audio_tokens: int = 0


class AnswerMetrics(msgspec.Struct):
    """Times of one request, in vLLM's names: milliseconds, and tokens per second of generation.

    `others_prompts_time_ms`, which vLLM lacks, is the part of the generation time that prompts of others took.
    """

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    others_prompts_time_ms: float | None = None


class UsageInfo(msgspec.Struct):
    """Token counts of a whole call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
