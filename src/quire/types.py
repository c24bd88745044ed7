"""The types that flow between the parts. Knows token ids and plain values only: no arrays, no text model."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.params import SamplingParams

SEED_MASK = (1 << 64) - 1

Pooling = Literal["mean", "last", "cls"]

UNSEEN = -1
"""Stands for a token that an earlier, unfinished step samples for the same slot (ScheduledSeq.tokens)."""


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


@dataclass(slots=True, frozen=True)
class NewSeq:
    """A sequence that takes a slot in this step. `tokens` holds the prompt and, after a preemption, its output."""

    slot: int
    request: Request
    index: int
    tokens: list[int]


class ScheduledSeq(msgspec.Struct, frozen=True, array_like=True):
    """What one sequence computes in a step: `tokens` (then `draft`) at positions start, start+1, ...

    `tokens` may end in UNSEEN: the token that the step before samples for the slot. The executor fills it in.
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


def ends(request: Request, reason: FinishReason, error: str | None = None) -> list[Delta]:
    """The only delta of each sample of a request that never runs."""
    usage = Usage(len(request.tokens), 0, 0)
    return [
        Delta(request.id, i, [], usage, finish_reason=reason, error=error) for i in range(request.sampling.n)
    ]


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


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a front needs to know about the model that runs. `defaults` are its own sampling parameters.

    `generates` is false for encoders. `pooling` is how the model's own vectors are made, `scores` and `labels` are
    those of a classifier (model/pooling.py). Tokens of a second text are `segment_size` higher, where that is not 0.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int = 20
    max_input_len: int | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    generates: bool = True
    pooling: Pooling | None = None
    scores: str | None = None
    labels: tuple[str, ...] = ()
    segment_size: int = 0
