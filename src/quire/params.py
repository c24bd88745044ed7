"""The parameters of a request with their checks: sampling and structured outputs. No arrays, no text model."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from copy import deepcopy
from typing import Any, Literal

import msgspec

from quire.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_N = 1024
MAX_BEAMS = 256
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


def _refuse(param: str, value: object, must: str) -> RequestError:
    return RequestError(f"{param} must be {must}, got {value!r}", param)


def _check_number(params: SamplingParams, name: str, low: float, high: float, must: str) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _refuse(name, value, must)
    if not low <= value <= high:
        raise _refuse(name, value, must)


def _check_int(params: SamplingParams, name: str, low: int, must: str, high: int | None = None) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high and value > high):
        raise _refuse(name, value, must)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(t) is int and t >= 0 for t in value):
        raise _refuse(name, value, "a list of token ids (integers >= 0)")
    return tuple(value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) and s for s in value):
        raise _refuse(name, value, "a non-empty string or a list of them")
    return tuple(value)


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
                raise _refuse(name, value, "a string")
            if value is not None and len(value) > MAX_CONSTRAINT_BYTES:
                raise _refuse(name, f"{len(value)} characters", f"at most {MAX_CONSTRAINT_BYTES} characters")
        if self.choice is not None:
            put(self, "choice", _strings("choice", list(self.choice)))
            if not self.choice or sum(map(len, self.choice)) > MAX_CONSTRAINT_BYTES:
                raise _refuse(
                    "choice", f"{len(self.choice)} texts", "a list of at least one text, 1 MiB in all"
                )
        if self.select and self.choice is None:
            raise RequestError("structured_outputs: select needs choice", param)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)


class GuidedDecodingParams(StructuredOutputsParams, frozen=True, kw_only=True, omit_defaults=True):
    """The name of StructuredOutputsParams in older vLLM. The choice of a back end changes nothing."""

    backend: str | None = None
    backend_was_auto: bool = False
    disable_fallback: bool = False

    def current(self) -> StructuredOutputsParams:
        """The same constraint under its current name."""
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

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        where = "repetition_detection"
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MAX_PATTERN:
                message = f"{where}.{name} must be an integer from 0 to {MAX_PATTERN}, got {value!r}"
                raise RequestError(message, f"{where}.{name}")
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
    same step. `no_repeat_ngram_size` bans runs of so many tokens that prompt or output hold already.
    """

    beam_width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.beam_width, int) or not 1 <= self.beam_width <= MAX_BEAMS:
            raise _refuse("beam_width", self.beam_width, f"an integer from 1 to {MAX_BEAMS}")
        if not isinstance(self.length_penalty, (int, float)) or not math.isfinite(self.length_penalty):
            raise _refuse("length_penalty", self.length_penalty, "a finite number")
        if self.early_stopping not in (True, False, None, "never"):
            raise _refuse("early_stopping", self.early_stopping, 'true, false, "never", or null')
        groups, penalty = self.num_beam_groups, self.diversity_penalty
        if type(groups) is not int or groups < 1 or self.beam_width % groups:
            raise _refuse("num_beam_groups", groups, f"a divisor of beam_width ({self.beam_width})")
        if not isinstance(penalty, (int, float)) or not math.isfinite(penalty) or penalty < 0:
            raise _refuse("diversity_penalty", penalty, "a number >= 0")
        if (groups > 1) != (penalty > 0):
            raise RequestError(
                "num_beam_groups above 1 and a diversity_penalty above 0 go together: give both or neither",
                "num_beam_groups" if groups == 1 else "diversity_penalty",
            )
        if type(self.no_repeat_ngram_size) is not int or self.no_repeat_ngram_size < 0:
            raise _refuse("no_repeat_ngram_size", self.no_repeat_ngram_size, "an integer >= 0")

    @property
    def of_group(self) -> BeamRules:
        """The rules of each group by itself."""
        return msgspec.structs.replace(
            self, beam_width=self.beam_width // self.num_beam_groups, num_beam_groups=1, diversity_penalty=0.0
        )

    def score(self, total: float, prompt_len: int, num_tokens: int, ended: bool) -> float:
        """The score of a sequence of `num_tokens` new tokens whose log-probabilities sum to `total`."""
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
    tokens. `skip_reading_prefix_cache` computes the whole prompt anew. `extra_args` is for logits processors.
    `logits_processors` are functions of (output token ids, row of logits), or of (prompt token ids, output token ids,
    row), that return the row to sample from; `LLM` alone takes them.

    `prediction` is text or tokens that the output may follow: what it does follow is computed many tokens at a time.
    Neither it nor `speculative_decoding` (false: draft nothing for this request) changes the output.
    `guided_decoding` is the older name of `structured_outputs`.

    With `beam` the n outputs are the best of a beam search, which takes no draws: repetition_penalty, min_tokens,
    bad_words, allowed_token_ids, stop_token_ids and structured_outputs act on it, the other sampling parameters do not.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: Any = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Seq[str] | None = ()
    stop_token_ids: Seq[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Seq[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Seq[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Seq[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: Seq[str] | None = ()
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int | None = None
    trace_decode_token_ids: Any = None
    prediction: str | Seq[int] | None = None
    speculative_decoding: bool = True
    logits_processors: Any = None
    beam: BeamRules | None = None
    guided_decoding: GuidedDecodingParams | None = None

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Parameters where None means the default. Token ids in `logit_bias` may be text, biases are clamped."""
        if given.get("logit_bias"):
            given["logit_bias"] = {
                int(token): min(100.0, max(-100.0, float(bias)))
                for token, bias in given["logit_bias"].items()
            }
        unset = {name for name, value in given.items() if value is None and name != "max_tokens"}
        return cls(**{name: value for name, value in given.items() if name not in unset})

    def clone(self, **changes: Any) -> SamplingParams:
        """A checked copy with `changes`, which shares nothing mutable with this one."""
        copies = {
            "logit_bias": self.logit_bias and dict(self.logit_bias),
            "extra_args": deepcopy(self.extra_args),
        }
        return msgspec.structs.replace(self, **{**copies, **changes})

    def __post_init__(self) -> None:
        put = msgspec.structs.force_setattr
        put(self, "stop", _strings("stop", self.stop or ()))
        put(self, "bad_words", _strings("bad_words", self.bad_words or ()))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _refuse("allowed_token_ids", [], "None or a list of at least one token id")
        for name in ("logprob_token_ids", "prompt_logprob_token_ids"):
            value = getattr(self, name)
            if value is not None:
                put(self, name, _token_ids(name, value) or None)
        if self.prediction is not None and not isinstance(self.prediction, str):
            put(self, "prediction", _token_ids("prediction", self.prediction))
        if self.thinking_token_budget == -1:
            put(self, "thinking_token_budget", None)
        if isinstance(self.repetition_detection, dict):
            put(self, "repetition_detection", RepetitionDetectionParams(**self.repetition_detection))
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise RequestError("give structured_outputs or guided_decoding, not both", "guided_decoding")
            put(self, "structured_outputs", self.guided_decoding.current())
            put(self, "guided_decoding", None)
        if self.top_k == -1:
            put(self, "top_k", 0)
        if self.seed == -1:
            put(self, "seed", None)
        kinds = [kind.value for kind in OutputKind]
        if self.output_kind not in kinds:
            raise _refuse("output_kind", self.output_kind, f"one of {', '.join(kinds)}")
        put(self, "output_kind", OutputKind(self.output_kind))
        self._check()

    def _check_beam(self, beam: BeamRules) -> None:
        if self.n > beam.beam_width:
            raise _refuse("n", self.n, f"at most beam_width ({beam.beam_width})")
        for name in ("stop", "prompt_logprobs", "logit_bias"):
            if getattr(self, name):
                raise RequestError(f"{name} cannot be combined with beam search: leave it out", name)
        if self.thinking_token_budget is not None:
            name = "thinking_token_budget"
            raise RequestError(f"{name} cannot be combined with beam search: leave it out", name)
        if self.structured_outputs is not None and self.structured_outputs.select:
            message = "structured_outputs: select cannot be combined with beam search: leave one of them out"
            raise RequestError(message, "structured_outputs")

    def _check(self) -> None:
        if self.beam is not None:
            self._check_beam(self.beam)
        _check_int(self, "n", 1, f"an integer from 1 to {MAX_N}", MAX_N)
        _check_number(self, "presence_penalty", -2.0, 2.0, "a number in [-2, 2]")
        _check_number(self, "frequency_penalty", -2.0, 2.0, "a number in [-2, 2]")
        _check_number(self, "repetition_penalty", 1e-6, 1e6, "a number greater than 0")
        _check_number(self, "temperature", 0.0, 1e6, "a finite number >= 0")
        _check_number(self, "top_p", 1e-9, 1.0, "a number in (0, 1]")
        _check_number(self, "min_p", 0.0, 1.0, "a number in [0, 1]")
        _check_int(self, "top_k", 0, "an integer >= 1, or 0 or -1 for all tokens")
        _check_int(self, "min_tokens", 0, "an integer >= 0")
        if self.seed is not None and type(self.seed) is not int:
            raise _refuse("seed", self.seed, "an integer or None")
        if self.max_tokens is not None:
            _check_int(self, "max_tokens", 1, "an integer >= 1, or None for as many as fit")
            if self.min_tokens > self.max_tokens:
                raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(self, name, -1, "an integer >= 0, -1 for the whole vocabulary, or None")
        if self.thinking_token_budget is not None:
            _check_int(self, "thinking_token_budget", 0, "an integer >= 0, or None or -1 for no bound")
        if self.prompt_logprob_start is not None:
            _check_int(self, "prompt_logprob_start", 0, "an integer >= 0, or None")
        if self.stream_interval is not None:
            _check_int(self, "stream_interval", 1, "an integer >= 1, or None")
        self._check_extras()
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "speculative_decoding",
            "flat_logprobs",
        ):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        if len(self.stop or ()) > MAX_STOP_STRINGS:
            raise _refuse("stop", f"{len(self.stop or ())} strings", f"at most {MAX_STOP_STRINGS} strings")
        for name, most in (
            ("bad_words", MAX_BAD_WORDS),
            ("stop_token_ids", MAX_STOP_TOKENS),
            ("logit_bias", MAX_BIASED_TOKENS),
        ):
            if len(getattr(self, name) or ()) > most:
                raise _refuse(name, f"{len(getattr(self, name))} entries", f"at most {most} entries")
        for name in ("stop", "bad_words"):
            if sum(map(len, getattr(self, name) or ())) > MAX_WORD_CHARACTERS:
                raise RequestError(f"{name} must have at most {MAX_WORD_CHARACTERS} characters in all", name)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids without text", "stop")
        for token, bias in (self.logit_bias or {}).items():
            if type(token) is not int or token < 0 or not isinstance(bias, (int, float)):
                raise _refuse("logit_bias", {token: bias}, "a map from token id to a number")
            if not -100.0 <= bias <= 100.0:
                raise _refuse("logit_bias", {token: bias}, "a map to numbers in [-100, 100]")

    def _check_extras(self) -> None:
        for name, why in ABSENT.items():
            if getattr(self, name) not in (None, False):
                raise RequestError(f"{name} is not supported: {why}", name)
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise _refuse("extra_args", self.extra_args, "a map from name to value")
        functions = self.logits_processors
        if functions is not None:
            if not isinstance(functions, (list, tuple)) or not all(map(callable, functions)):
                raise _refuse("logits_processors", functions, "a list of functions")
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


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """How a vector is made. Names and order are vLLM's.

    `use_activation` false leaves out the last step: scaling of an embedding to length 1, or a classifier's softmax or
    sigmoid. `dimensions` keeps the first ones. `pooling` (mean, last, cls, all) replaces the model's own way.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
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
            raise _refuse("pooling", self.pooling, "mean, last, cls or all")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise _refuse("dimensions", self.dimensions, "an integer >= 1")

    def clone(self) -> PoolingParams:
        return msgspec.structs.replace(self)


def token_lists(params: SamplingParams) -> list[tuple[str, Iterable[int]]]:
    """The parameters that name tokens of the model, as (name, token ids), without those that are not given."""
    names = (
        "allowed_token_ids",
        "stop_token_ids",
        "logit_bias",
        "logprob_token_ids",
        "prompt_logprob_token_ids",
    )
    given = ((name, getattr(params, name)) for name in names)
    return [(name, tokens) for name, tokens in given if tokens]
