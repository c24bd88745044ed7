"""Parameters of a request with their checks: sampling and structured outputs. No arrays, no text model."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sized
from collections.abc import Sequence as Seq
from copy import deepcopy
from operator import index
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire import fields
from quire.errors import RequestError
from quire.fields import INT64, MAX_BEAMS, check, refusal, says

MAX_STOP_STRINGS = 256
MAX_CONSTRAINT_BYTES = 1 << 20
MAX_BAD_WORDS = 4096
MAX_WORD_CHARACTERS = 1 << 16  # of all stop strings, or all bad words, together
MAX_STOP_TOKENS = 1024
MAX_BIASED_TOKENS = 16384
MAX_PATTERN = 4096


class OutputKind(str, enum.Enum):
    """How much of a sample each update reports: everything so far, the new part, or only the end result.

    The engine always reports new parts. For FINAL_ONLY it reports the first token and the end.
    """

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


ABSENT = {
    "watermarking": "Quire does not watermark its output",
    "routed_experts_prompt_start": "Quire does not report which experts a token used",
    "trace_decode_token_ids": "Quire does not replay traces",
}


def integers(value: object) -> list[int] | None:
    """Read integers of any kind, NumPy's too, from a list, a tuple or an array; None if it holds something else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        return None
    if all(type(item) is int for item in value):
        return list(value)
    if any(isinstance(item, bool) for item in value):
        return None
    try:
        return list(map(index, value))
    except TypeError:
        return None


def _token_ids(name: str, value: object, most: int | None = None) -> tuple[int, ...]:
    ids = integers(value)
    if ids is None or any(token < 0 for token in ids):
        raise refusal(name, value, "a list of token ids (integers >= 0)")
    _check_length(name, ids, most)
    return tuple(ids)


def _strings(name: str, value: object, most: int | None = None) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) and s for s in value):
        raise refusal(name, value, "a non-empty string or a list of them")
    _check_length(name, value, most)
    if most is not None and sum(map(len, value)) > MAX_WORD_CHARACTERS:
        raise RequestError(f"{name} must have at most {MAX_WORD_CHARACTERS} characters in all", name)
    return tuple(value)


def _check_length(name: str, value: Sized, most: int | None) -> None:
    if most is not None and len(value) > most:
        raise refusal(name, f"{len(value)} entries", f"at most {most} entries")


CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form that an output must have: exactly one of the first six fields. Names are vLLM's.

    `json` is a JSON Schema (text, object or boolean); `regex` must match the whole output; `choice` lists the texts
    that are allowed; `grammar` is EBNF (`root ::= ...`) or Lark (`start: ...`); `json_object` asks for any JSON
    object; `structural_tag` leaves text free until a trigger and constrains what follows it (`quire.grammar.tags`
    describes its two notations). JSON is written without whitespace unless `whitespace_pattern` (a regex for each
    place where JSON allows whitespace) says otherwise or `disable_any_whitespace` is False. With `select`, the output
    is the choice with the highest mean log-probability per token.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Seq[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    select: bool = False

    def __post_init__(self) -> None:
        put, param = msgspec.structs.force_setattr, "structured_outputs"
        if self.json_object is False:
            put(self, "json_object", None)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            what = (
                f"has both {given[0]} and {given[1]}" if given else f"names none of {', '.join(CONSTRAINTS)}"
            )
            raise RequestError(f"structured_outputs {what}: give exactly one", param)
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, (dict, bool)):
                put(self, name, _json_text(name, value))
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise refusal(name, value, "a string")
            if value is not None and len(value) > MAX_CONSTRAINT_BYTES:
                raise refusal(name, f"{len(value)} characters", f"at most {MAX_CONSTRAINT_BYTES} characters")
        if self.choice is not None:
            put(self, "choice", _strings("choice", list(self.choice)))
            if not self.choice or sum(map(len, self.choice)) > MAX_CONSTRAINT_BYTES:
                raise refusal(
                    "choice", f"{len(self.choice)} texts", "a list of at least one text, 1 MiB in all"
                )
        if self.select and self.choice is None:
            raise RequestError("structured_outputs: select needs choice", param)

    @property
    def kind(self) -> str:
        """Name the field that is given."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)


class GuidedDecodingParams(StructuredOutputsParams, frozen=True, kw_only=True, omit_defaults=True):
    """The name of StructuredOutputsParams in older vLLM. The choice of a back end changes nothing."""

    backend: str | None = None
    backend_was_auto: bool = False
    disable_fallback: bool = False

    def current(self) -> StructuredOutputsParams:
        """Return the same constraint under its current name."""
        names = StructuredOutputsParams.__struct_fields__
        return StructuredOutputsParams(**{name: getattr(self, name) for name in names})


def _json_text(name: str, value: dict[str, Any] | bool) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RequestError(f"{name} is not JSON: {error}", "structured_outputs") from error


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ends an output whose last tokens repeat a pattern. Names are vLLM's.

    A pattern has `min_pattern_size` to `max_pattern_size` tokens and is repeated `min_count` times in a row.
    `max_pattern_size` 0 detects nothing.
    """

    max_pattern_size: Annotated[int, Meta(ge=0, le=MAX_PATTERN)] = 0
    min_pattern_size: Annotated[int, Meta(ge=0, le=MAX_PATTERN)] = 0
    min_count: Annotated[int, Meta(ge=0, le=MAX_PATTERN)] = 0

    def __post_init__(self) -> None:
        where = "repetition_detection"
        check(self, RepetitionDetectionParams, f"{where}.")
        if self.min_pattern_size > self.max_pattern_size:
            message = f"{where}.min_pattern_size must be at most max_pattern_size ({self.max_pattern_size})"
            raise RequestError(message, f"{where}.min_pattern_size")
        if self.max_pattern_size and self.min_count < 2:
            message = f"{where}.min_count must be at least 2, got {self.min_count}"
            raise RequestError(message, f"{where}.min_count")


class BeamRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A beam search over `beam_width` sequences. A score is the sum of log-probabilities / length ** length_penalty.

    `early_stopping` None is vLLM's search: it runs for all steps, and the prompt counts as length. Otherwise the search
    is transformers': True stops at `beam_width` ended sequences, False if no live beam looks better, "never" if none
    can be better.

    With `num_beam_groups` the beams are divided into groups that search in turn (diverse beam search, Vijayakumar et
    al. 2016, arXiv:1610.02424): a token loses `diversity_penalty` for each beam of earlier groups that took it in the
    same step. `no_repeat_ngram_size` bans runs of this many tokens that prompt or output hold already.
    """

    beam_width: Annotated[int, says("sequences that the search keeps", ge=1, le=MAX_BEAMS)]
    length_penalty: fields.LengthPenalty = 1.0
    early_stopping: fields.EarlyStopping | None = None
    num_beam_groups: fields.BeamGroups = 1
    diversity_penalty: fields.DiversityPenalty = 0.0
    no_repeat_ngram_size: fields.NoRepeatNgram = 0

    def __post_init__(self) -> None:
        check(self, BeamRules)
        groups, penalty = self.num_beam_groups, self.diversity_penalty
        if self.beam_width % groups:
            raise refusal("num_beam_groups", groups, f"a divisor of beam_width ({self.beam_width})")
        if (groups > 1) != (penalty > 0):
            raise RequestError(
                "num_beam_groups above 1 and a diversity_penalty above 0 go together: give both or neither",
                "num_beam_groups" if groups == 1 else "diversity_penalty",
            )

    @property
    def of_group(self) -> BeamRules:
        """Make the rules of each group by itself."""
        return msgspec.structs.replace(
            self, beam_width=self.beam_width // self.num_beam_groups, num_beam_groups=1, diversity_penalty=0.0
        )

    def score(self, total: float, prompt_len: int, num_tokens: int, ended: bool) -> float:
        """Score a sequence of `num_tokens` new tokens whose log-probabilities sum to `total`."""
        length = num_tokens
        if self.early_stopping is None:
            length = max(1, prompt_len + num_tokens - (1 if ended else 0))
        return total / math.pow(length, self.length_penalty)


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """How tokens are sampled and when a request ends. Names, order and defaults are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps all tokens. `logprobs` -1 returns the whole vocabulary.
    `max_tokens` None means up to the model's length. With `seed` s, sample i of n equals the sample of a request
    with n = 1 and seed s + i; -1 is no seed.

    `logprob_token_ids` adds the log-probabilities of these tokens at each place, `prompt_logprob_token_ids` the same in
    the prompt; `prompt_logprob_start` is the first position of the prompt to score. `stream_interval` n reports every n
    tokens, and `return_progress` each computed part of the prompt. `skip_reading_prefix_cache` computes all of it anew.
    `extra_args` is for logits processors.
    `logits_processors` are functions of (output token ids, row of logits), or of (prompt token ids, output token ids,
    row), that return the row to sample from; `LLM` alone takes them.

    `prediction` is text or tokens that the output may follow: what it does follow is computed many tokens at a time.
    Neither it nor `speculative_decoding` (false: draft nothing for this request) changes the output.
    `guided_decoding` is the older name of `structured_outputs`.

    With `beam` the n outputs are the best of a beam search, which takes no draws: repetition_penalty, min_tokens,
    bad_words, allowed_token_ids, stop_token_ids and structured_outputs act on it, the other sampling parameters do not.
    """

    n: fields.Samples = 1
    presence_penalty: fields.PresencePenalty = 0.0
    frequency_penalty: fields.FrequencyPenalty = 0.0
    repetition_penalty: fields.RepetitionPenalty = 1.0
    temperature: fields.Temperature = 1.0
    watermarking: Any = None
    top_p: fields.TopP = 1.0
    top_k: fields.TopK = 0
    min_p: fields.MinP = 0.0
    seed: fields.Seed | None = None
    stop: fields.Stop | None = ()
    stop_token_ids: fields.StopTokenIds | None = ()
    ignore_eos: fields.IgnoreEos = False
    max_tokens: fields.MaxTokens | None = 16
    min_tokens: fields.MinTokens = 0
    logprobs: fields.TopLogprobs | None = None
    prompt_logprobs: fields.PromptLogprobs | None = None
    prompt_logprob_token_ids: Seq[fields.TokenId] | None = None
    prompt_logprob_start: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    logprob_token_ids: fields.LogprobTokenIds | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: fields.SkipSpecialTokens = True
    spaces_between_special_tokens: fields.SpacesBetween = True
    include_stop_str_in_output: fields.IncludeStop = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    stream_interval: fields.StreamInterval | None = None
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: fields.AllowedTokenIds | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: fields.BadWords | None = ()
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: fields.ThinkingBudget | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int | None = None
    trace_decode_token_ids: Any = None
    prediction: str | Seq[fields.TokenId] | None = None
    speculative_decoding: fields.Speculative = True
    logits_processors: Any = None
    beam: BeamRules | None = None
    guided_decoding: GuidedDecodingParams | None = None
    return_progress: bool = False

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Make parameters where None means the default. Token ids in `logit_bias` may be text, biases are clamped."""
        if given.get("logit_bias"):
            _check_map("logit_bias", given["logit_bias"])
            given["logit_bias"] = {
                int(token): min(100.0, max(-100.0, float(bias)))
                for token, bias in given["logit_bias"].items()
            }
        unset = {name for name, value in given.items() if value is None and name != "max_tokens"}
        return cls(**{name: value for name, value in given.items() if name not in unset})

    def clone(self, **changes: Any) -> SamplingParams:
        """Make a checked copy with `changes`, which shares nothing mutable with this one."""
        copies = {
            "logit_bias": self.logit_bias and dict(self.logit_bias),
            "extra_args": deepcopy(self.extra_args),
        }
        return msgspec.structs.replace(self, **{**copies, **changes})

    def __post_init__(self) -> None:
        put = msgspec.structs.force_setattr
        if self.stop != ():
            put(self, "stop", _strings("stop", self.stop or (), MAX_STOP_STRINGS))
        if self.bad_words != ():
            put(self, "bad_words", _strings("bad_words", self.bad_words or (), MAX_BAD_WORDS))
        if self.stop_token_ids != ():
            ids = _token_ids("stop_token_ids", self.stop_token_ids or (), MAX_STOP_TOKENS)
            put(self, "stop_token_ids", ids)
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            put(self, "allowed_token_ids", tuple(dict.fromkeys(ids)))  # so at most a vocabulary
            if not self.allowed_token_ids:
                raise refusal("allowed_token_ids", [], "None or a list of at least one token id")
        for name in ("logprob_token_ids", "prompt_logprob_token_ids"):
            value = getattr(self, name)
            if value is not None:
                put(self, name, _token_ids(name, value) or None)
        if self.prediction is not None and not isinstance(self.prediction, str):
            put(self, "prediction", _token_ids("prediction", self.prediction))
        if isinstance(self.repetition_detection, dict):
            known = RepetitionDetectionParams.__struct_fields__
            if not self.repetition_detection.keys() <= set(known):
                raise refusal(
                    "repetition_detection", self.repetition_detection, f"a map of {', '.join(known)}"
                )
            put(self, "repetition_detection", RepetitionDetectionParams(**self.repetition_detection))
        if self.guided_decoding is not None:
            if not isinstance(self.guided_decoding, GuidedDecodingParams):
                raise refusal("guided_decoding", self.guided_decoding, "GuidedDecodingParams")
            if self.structured_outputs is not None:
                raise RequestError("give structured_outputs or guided_decoding, not both", "guided_decoding")
            put(self, "structured_outputs", self.guided_decoding.current())
            put(self, "guided_decoding", None)
        if type(self.output_kind) is not OutputKind:
            put(self, "output_kind", _output_kind(self.output_kind))
        check(self, SamplingParams)
        for name, meant in (("thinking_token_budget", None), ("seed", None), ("top_k", 0)):
            if getattr(self, name) == -1:
                put(self, name, meant)
        if self.beam is not None:
            self._check_beam(self.beam)
        self._check_others()

    def _check_beam(self, beam: BeamRules) -> None:
        if not isinstance(beam, BeamRules):
            raise refusal("beam", beam, "BeamRules")
        if self.n > beam.beam_width:
            raise refusal("n", self.n, f"at most beam_width ({beam.beam_width})")
        for name in ("stop", "prompt_logprobs", "logit_bias"):
            if getattr(self, name):
                raise RequestError(f"{name} cannot be combined with beam search: leave it out", name)
        if self.thinking_token_budget is not None:
            name = "thinking_token_budget"
            raise RequestError(f"{name} cannot be combined with beam search: leave it out", name)
        if self.structured_outputs is not None and self.structured_outputs.select:
            message = "structured_outputs: select cannot be combined with beam search: leave one of them out"
            raise RequestError(message, "structured_outputs")

    def _check_others(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refusal("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids without text", "stop")
        for name, why in ABSENT.items():
            if getattr(self, name) not in (None, False):
                raise RequestError(f"{name} is not supported: {why}", name)
        if self.extra_args is not None:
            _check_map("extra_args", self.extra_args)
        if self.logit_bias:
            _check_map("logit_bias", self.logit_bias)
            ids = integers(list(self.logit_bias))
            if ids is not None:
                biases = dict(zip(ids, self.logit_bias.values(), strict=True))
                msgspec.structs.force_setattr(self, "logit_bias", biases)
            _check_bias(self.logit_bias)
        functions = self.logits_processors
        if functions is not None:
            if not isinstance(functions, (list, tuple)) or not all(map(callable, functions)):
                raise refusal("logits_processors", functions, "a list of functions")
            msgspec.structs.force_setattr(self, "logits_processors", tuple(functions) or None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None


def _output_kind(given: object) -> OutputKind:
    kinds = [kind.value for kind in OutputKind]
    if given not in kinds:
        raise refusal("output_kind", given, f"one of {', '.join(kinds)}")
    return OutputKind(given)


def _check_map(name: str, given: object) -> None:
    if not isinstance(given, dict):
        raise refusal(name, given, "a map")


def _check_bias(biases: dict[int, float]) -> None:
    if len(biases) > MAX_BIASED_TOKENS:
        raise refusal("logit_bias", f"{len(biases)} entries", f"at most {MAX_BIASED_TOKENS} entries")
    for token, bias in biases.items():
        if type(token) is not int or token < 0 or not isinstance(bias, (int, float)):
            raise refusal("logit_bias", {token: bias}, "a map from token id to a number")
        if not -100.0 <= bias <= 100.0:
            raise refusal("logit_bias", {token: bias}, "a map to numbers in [-100, 100]")


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """How a vector is made. Names and order are vLLM's.

    `use_activation` false leaves out the last step: scaling of an embedding to length 1, or a classifier's softmax or
    sigmoid. `dimensions` keeps the first ones. `pooling` (mean, last, cls, all) replaces the model's own way.
    """

    use_activation: bool | None = None
    dimensions: fields.Dimensions | None = None
    step_tag_id: int | None = None
    returned_token_ids: Seq[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: OutputKind = OutputKind.FINAL_ONLY
    pooling: str | None = None

    def __post_init__(self) -> None:
        for name in ("step_tag_id", "returned_token_ids", "late_interaction_params"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not supported: no model here has such a head", name)
        if self.pooling not in (None, "mean", "last", "cls", "all"):
            raise refusal("pooling", self.pooling, "mean, last, cls or all")
        check(self, PoolingParams)

    def clone(self) -> PoolingParams:
        return msgspec.structs.replace(self)


def token_lists(params: SamplingParams) -> list[tuple[str, Collection[int]]]:
    """List the given parameters that name tokens of the model, as (name, token ids)."""
    names = (
        "allowed_token_ids",
        "stop_token_ids",
        "logit_bias",
        "logprob_token_ids",
        "prompt_logprob_token_ids",
    )
    given = ((name, getattr(params, name)) for name in names)
    return [(name, tokens) for name, tokens in given if tokens]
