"""OpenAI's completions and chat completions as structs, with vLLM's extra fields. Knows shapes, no engine.

What becomes of each field is in `quire.serve.fields`. In answers, UNSET fields are left out and None is `null`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire import fields
from quire.fields import says
from quire.params import RepetitionDetectionParams
from quire.serve.fields import common
from quire.serve.fields.common import Count, CountOrAll, Progress, Prompt
from quire.serve.fields.foreign import ANSWERS_REFUSED, LABELS, OTHERS_IGNORED
from quire.serve.fields.shapes import INNER, Fields
from quire.serve.openai.logprobs import CompletionLogprobs, PromptLogprobs

Extras = dict[str, Any]


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
    """The fields of sampling, in every OpenAI body. None takes the model's default."""

    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    min_p: fields.MinP | None = None
    repetition_penalty: fields.RepetitionPenalty | None = None
    presence_penalty: fields.PresencePenalty | None = None
    frequency_penalty: fields.FrequencyPenalty | None = None
    logit_bias: Annotated[dict[str, float], says("values added to logits, by token id")] | None = None
    seed: common.Seed64 | None = None
    stop_token_ids: fields.StopTokenIds | None = None
    ignore_eos: fields.IgnoreEos = False
    min_tokens: fields.MinTokens | None = None
    allowed_token_ids: fields.AllowedTokenIds | None = None
    bad_words: fields.BadWords | None = None
    repetition_detection: (
        Annotated[
            RepetitionDetectionParams,
            says("ends the output at a repeated pattern: max_pattern_size, min_pattern_size, min_count"),
        ]
        | None
    ) = None
    include_stop_str_in_output: fields.IncludeStop = False
    skip_special_tokens: fields.SkipSpecialTokens = True
    structured_outputs: Annotated[Extras, says("a constraint on the answer (vLLM)")] | None = None
    guided_json: Annotated[str | Extras, says("JSON Schema (older vLLM)")] | None = None
    guided_regex: Annotated[str, says("regular expression (older vLLM)")] | None = None
    guided_choice: Annotated[list[str], says("list of texts (older vLLM)")] | None = None
    guided_grammar: Annotated[str, says("grammar (older vLLM)")] | None = None
    guided_whitespace_pattern: Annotated[str, says("white space in JSON (older vLLM)")] | None = None
    json_schema: Annotated[str | Extras, says("JSON Schema (SGLang)")] | None = None
    regex: Annotated[str, says("regular expression (SGLang)")] | None = None
    ebnf: Annotated[str, says("grammar (SGLang)")] | None = None
    grammar: Annotated[str, says("grammar (llama.cpp)")] | None = None
    response_schema: Annotated[Extras, says("JSON Schema (Gemini)")] | None = None
    format: Annotated[str | Extras, says('"json" or a JSON Schema (Ollama)')] | None = None
    logprob_token_ids: fields.LogprobTokenIds | None = None
    thinking_token_budget: fields.ThinkingBudget | None = None
    stream_interval: fields.StreamInterval | None = None
    vllm_xargs: Annotated[Extras, says("arguments for the engine's logits processors")] | None = None
    truncate_prompt_tokens: common.Truncate | None = None
    truncation_side: common.TruncationSide = "left"
    priority: common.Priority = 0
    cache_salt: common.CacheSalt | None = None
    request_id: common.RequestId | None = None


class SamplingFields(DrawFields, kw_only=True):
    """The fields that completions and chats share."""

    model: common.Model | None = None
    stream: common.Stream = False
    stream_options: Annotated[StreamOptions, says("include_usage, continuous_usage_stats")] | None = None
    n: fields.Samples | None = None
    stop: fields.Stop | None = None
    max_tokens: Annotated[Count, says("most tokens of output")] | None = None
    response_format: (
        Annotated[Extras, says("text, json_object (with a schema or without), json_schema or structural_tag")]
        | None
    ) = None
    prompt_logprobs: fields.PromptLogprobs | None = None
    spaces_between_special_tokens: fields.SpacesBetween = True
    add_special_tokens: common.AddSpecial = None
    return_token_ids: Annotated[bool, says("token ids of prompt and output")] | None = None
    return_metrics: (
        Annotated[bool, says("the times of the request in the answer, as `metrics` (docs/latency.md)")] | None
    ) = None
    return_tokens_as_token_ids: Annotated[bool, says("write tokens in logprobs as token_id:N")] | None = None
    prediction: Annotated[Prediction, says("a text that the output may follow, to draft from")] | None = None
    speculative_decoding: fields.Speculative = True
    use_beam_search: (
        Annotated[bool, says("true returns the n best sequences of a beam search (docs/beam-search.md)")]
        | None
    ) = None
    beam_width: Annotated[Count, says("sequences that the search keeps, n by default")] | None = None
    length_penalty: fields.LengthPenalty | None = None
    early_stopping: fields.EarlyStopping | None = None
    num_beam_groups: fields.BeamGroups | None = None
    diversity_penalty: fields.DiversityPenalty | None = None
    no_repeat_ngram_size: fields.NoRepeatNgram | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Tokens of predicted outputs. The rejected ones are computed, and are no part of completion_tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int = 0
    audio_tokens: int = 0


class AnswerMetrics(msgspec.Struct, omit_defaults=True):
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
