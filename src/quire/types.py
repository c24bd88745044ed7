"""The types that flow between the parts. Knows token ids and plain values only: no arrays, no text model."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_N = 1024
MAX_CONSTRAINT_BYTES = 1 << 20
SEED_MASK = (1 << 64) - 1


Pooling = Literal["mean", "last", "cls"]


class OutputKind(str, enum.Enum):
    """What is told of a sample: everything so far, the new part, or only the end result.

    The engine always tells new parts, of FINAL_ONLY with the first token and with the end.
    """

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


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
    """What an output must look like: exactly one of the first six. Names are vLLM's.

    `json` is a JSON Schema (text, object or boolean), `regex` must match the whole output, `choice` lists texts of
    which the output is one, `grammar` is EBNF (`root ::= ...`) or Lark (`start: ...`), `json_object` asks for
    any JSON object. `structural_tag` lets free text run until a trigger and constrains what follows it; see
    `quire.grammar.tags` for its two notations. JSON is written without whitespace unless `whitespace_pattern` (a
    regex, at each place where JSON allows some) says otherwise or `disable_any_whitespace` is False. With
    `select`, every choice is scored by its mean log-probability a token, and the best is the output.
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
            raise RequestError("structured_outputs: select scores choices: give choice", param)

    @property
    def kind(self) -> str:
        """Which of the six is given."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)


def _json_text(name: str, value: dict[str, Any] | bool) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RequestError(f"{name} is not JSON: {error}", "structured_outputs") from error


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn and when a request ends. Names and defaults are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps all tokens. `logprobs` -1 returns the whole vocabulary.
    `max_tokens` None means up to the model's length. With `seed` s, sample i of n draws as a request with
    n = 1 and seed s + i would.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Seq[str] | None = ()
    stop_token_ids: Seq[int] | None = ()
    bad_words: Seq[str] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Seq[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        put = msgspec.structs.force_setattr
        put(self, "stop", _strings("stop", self.stop or ()))
        put(self, "bad_words", _strings("bad_words", self.bad_words or ()))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _refuse("allowed_token_ids", [], "None or hold at least one token id")
        if self.top_k == -1:
            put(self, "top_k", 0)
        kinds = [kind.value for kind in OutputKind]
        if self.output_kind not in kinds:
            raise _refuse("output_kind", self.output_kind, f"one of {', '.join(kinds)}")
        put(self, "output_kind", OutputKind(self.output_kind))
        self._check()

    def _check(self) -> None:
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
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        if len(self.stop or ()) > MAX_STOP_STRINGS:
            raise _refuse("stop", f"{len(self.stop or ())} strings", f"at most {MAX_STOP_STRINGS} strings")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids without text", "stop")
        for token, bias in (self.logit_bias or {}).items():
            if type(token) is not int or token < 0 or not isinstance(bias, (int, float)):
                raise _refuse("logit_bias", {token: bias}, "a map from token id to a number")
            if not -100.0 <= bias <= 100.0:
                raise _refuse("logit_bias", {token: bias}, "a map to numbers in [-100, 100]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One prompt and how to continue it. Crosses the process border; the engine core never sees text.

    `seed` is resolved (64 bits) by whoever made the request. `max_tokens` is resolved against the model's
    length. `eos_token_ids` is empty where the request ignores them. `salt` separates prefix caches. With `pooling`
    the request makes no token: it ends with one vector, the mean, the last or the first of the final hidden states, and
    what the model does to it.
    `grammar` is what the output must match, in llguidance's notation: resolved from `sampling.structured_outputs`
    by whoever made the request. With `choices` (token ids) it makes the likeliest of them
    instead. Prompt log-probabilities are due for the tokens after position `scored_from`.
    """

    id: str
    tokens: list[int]
    sampling: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    adapter: str | None = None
    priority: int = 0
    salt: str = ""
    arrival: float = 0.0
    pooling: Pooling | None = None
    grammar: str | None = None
    choices: tuple[tuple[int, ...], ...] = ()
    scored_from: int = 0

    def sample_seed(self, index: int) -> int:
        """The seed of parallel sample `index`."""
        return (self.seed + index) & SEED_MASK

    @property
    def reads_every_position(self) -> bool:
        """Whether results are needed at each prompt position, so that a cached prefix is of no use."""
        return self.sampling.prompt_logprobs is not None or self.pooling in ("mean", "cls")


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request while it lives in the scheduler, which alone writes to it.

    `num_computed` counts tokens whose KV is in `blocks`; the rest of `tokens` and `draft` is pending.
    """

    request: Request
    index: int
    tokens: list[int]
    arrival_order: int = 0
    slot: int = -1
    draft: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    num_cached: int = 0
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.tokens)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) + len(self.draft) - self.num_computed


@dataclass(slots=True, frozen=True)
class NewSeq:
    """A sequence that takes a slot in this step. `tokens` holds the prompt and, after a preemption, its output."""

    slot: int
    request: Request
    index: int
    tokens: list[int]


class ScheduledSeq(msgspec.Struct, frozen=True, array_like=True):
    """What one sequence computes in a step: `tokens` (then `draft`) at positions start, start+1, ...

    `new_blocks` extends the slot's block table. `wants_logits`: the chunk reaches the end, so sample.
    """

    slot: int
    start: int
    tokens: list[int]
    draft: list[int]
    new_blocks: list[int]
    wants_logits: bool


@dataclass(slots=True, frozen=True)
class ScheduledBatch:
    """One step, as a delta against the state that the executor keeps by slot.

    Order of effect: `freed` slots are forgotten, `copies` (source block, destination block) are made,
    `new` slots are set up, `seqs` are computed.
    """

    step: int
    new: list[NewSeq]
    seqs: list[ScheduledSeq]
    freed: list[int]
    copies: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) + len(s.draft) for s in self.seqs)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and of the most likely ones at its place, from the raw logits.

    `rank` is 1 for the most likely token of the vocabulary. `top_ids` and `top` are sorted, best first.
    """

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top: list[float]


@dataclass(slots=True)
class StepOutput:
    """What a step made, by slot. `errors` names sequences that failed alone, with the reason.

    The last `forced[slot]` tokens of a slot were not drawn but follow from its grammar, so nothing is computed of
    them yet; slots in `ended` have an output to which the grammar lets nothing be added; those in `deferred`
    drew nothing, as their grammar was not ready: they compute their last token again.
    """

    step: int
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    embeddings: dict[int, list[float]] = field(default_factory=dict)
    forced: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    deferred: set[int] = field(default_factory=set)


class FinishReason(str, enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Usage(msgspec.Struct, array_like=True):
    """Token counts of one sequence so far."""

    num_prompt: int
    num_cached: int
    num_output: int


class Delta(msgspec.Struct, array_like=True):
    """News of one sample of one request: crosses the process border back.

    `stop_reason` is the token of `stop_token_ids` that ended it, if one did. `error` explains finish "error".
    `complete`: the grammar ended it, so the last token is text and no end-of-sequence token.
    """

    request_id: str
    index: int
    tokens: list[int]
    usage: Usage
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    embedding: list[float] | None = None
    complete: bool = False

    def join(self, news: Delta) -> None:
        """Make this both: lists are joined, the rest is the later one's."""
        self.tokens += news.tokens
        if news.logprobs is not None:
            self.logprobs = (self.logprobs or []) + news.logprobs
        if news.prompt_logprobs is not None:
            self.prompt_logprobs = (self.prompt_logprobs or []) + news.prompt_logprobs
        self.usage, self.finish_reason = news.usage, news.finish_reason
        self.stop_reason, self.error = news.stop_reason, news.error
        self.embedding, self.complete = news.embedding, news.complete


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the scheduler and counters since start; every field is plain."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_shared_blocks: int = 0  # of the used ones: held by more than one sequence
    num_cached_blocks: int = 0
    num_free_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    jump_forward_tokens: int = 0  # appended by a grammar: forward passes saved

    def as_dict(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)
