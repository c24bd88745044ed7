"""The types that flow between the parts. Knows token ids and plain values only: no arrays, no text model."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import msgspec

from quire.errors import ConfigError, DeviceMemoryError, EngineError, QuireError, RequestError, message_of
from quire.params import SamplingParams
from quire.steps import Event, Program

if TYPE_CHECKING:
    from quire.state_rows import StateUse

SEED_MASK = (1 << 64) - 1

Pooling = Literal["mean", "last", "cls", "all"]
MAX_EMBED_LEN = 1 << 20
"""Most tokens of a text that is split, unless options say otherwise."""


@dataclass(frozen=True, slots=True)
class PoolerOptions:
    """How vectors are made: None is the model's own pooling.

    `longest_text` is the most tokens of a text that becomes a vector in parts; None: texts are not split. `activates`:
    vectors have their last step (`use_activation`), unless a request says otherwise.
    """

    pooling: Pooling | None = None
    longest_text: int | None = None
    activates: bool = True

    @classmethod
    def read(cls, keys: dict[str, Any]) -> PoolerOptions:
        """From vLLM's keys of --pooler-config. ConfigError: a key or value is not supported."""
        given = {key: value for key, value in keys.items() if value is not None}
        splits, longest = given.pop("enable_chunked_processing", False), given.pop("max_embed_len", None)
        task, activates = given.pop("task", "auto"), given.pop("use_activation", True)
        if task not in ("auto", "embed", "classify", "encode", "token_embed", "token_classify"):
            raise ConfigError(f"--pooler-config: task {task!r} is not supported")
        if not isinstance(activates, bool):
            raise ConfigError("--pooler-config: use_activation must be true or false")
        kind = str(given.pop("pooling_type", given.pop("seq_pooling_type", "auto"))).lower()
        if given or kind not in ("auto", "none", *get_args(Pooling)):
            what = next(iter(given), f"pooling_type {kind.upper()!r}")
            raise ConfigError(
                f"--pooler-config: {what} is not supported: pooling_type is MEAN, LAST, CLS or ALL"
            )
        if not isinstance(splits, bool):
            raise ConfigError("--pooler-config: enable_chunked_processing must be true or false")
        if longest is not None and (type(longest) is not int or longest < 1):
            raise ConfigError("--pooler-config: max_embed_len must be a positive number of tokens")
        if longest is not None and not splits:
            raise ConfigError("--pooler-config: max_embed_len needs enable_chunked_processing")
        pooling = cast("Pooling | None", None if kind in ("auto", "none") else kind)
        if task.startswith("token_"):
            pooling = "all"
        return cls(pooling, (longest or MAX_EMBED_LEN) if splits else None, activates)


UNSEEN = -1
"""Stands for a token that an earlier, unfinished step samples for the same slot (ScheduledSeq.tokens)."""


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """At most `limit` tokens of reasoning, which stands between one of `begin` and one of `end`.

    Then the first `end` is forced. `opened`: the prompt has begun the reasoning.
    """

    limit: int
    begin: tuple[str, ...]
    end: tuple[str, ...]
    opened: bool


class Made(msgspec.Struct, frozen=True, array_like=True):
    """Holds what one sample of a request made before the request was resumed, and where its usage stood.

    `ended`: there is nothing more to make.
    """

    tokens: list[int] = []
    num_cached: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    ended: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One prompt and how to continue it. Crosses the process border; the engine core never sees text.

    The caller resolves `seed` (64 bits), `max_tokens` (against the model's length) and `grammar`: the constraint of
    `sampling.structured_outputs` in llguidance's notation. `eos_token_ids` is empty if the request ignores them. `salt`
    separates prefix caches. With `choices` (token ids) the output is the likeliest of them. With `pooling` the request
    makes no token but one vector: the mean, last or first final hidden state ("all": each token's, one after another),
    after the model's own head, and without `activate` not scaled to length 1. Prompt log-probabilities are due for the
    tokens after position `scored_from`. `prediction` is a guess at the output. The requests of different `owner`s (API
    keys, or calls) take turns. With `program` it runs these steps; `gens` are the requests of its gens.
    `adapter` is the digest of an adapter, whose files are in `adapter_path`. Other requests are said to go on from
    `marks`, counts of tokens. A resumed request goes on from what each of its samples has `made`.
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
    prediction: tuple[int, ...] = ()
    owner: str = ""
    activate: bool = True
    thinking: ThinkingBudget | None = None
    program: Program | None = None
    gens: tuple[Request, ...] = ()
    adapter_path: str = ""
    marks: tuple[int, ...] = ()
    made: tuple[Made, ...] = ()

    def sample_seed(self, index: int) -> int:
        """The seed of parallel sample `index`."""
        return (self.seed + index) & SEED_MASK

    @property
    def open_samples(self) -> list[int]:
        """List the samples that have something to make."""
        return [i for i in range(self.sampling.n) if not (self.made and self.made[i].ended)]

    @property
    def is_composed(self) -> bool:
        """Return whether several requests answer it: a program, a beam search, or a choice."""
        return self.program is not None or self.sampling.beam is not None or bool(self.choices)

    @property
    def constrained(self) -> bool:
        """Whether its tokens are drawn through masks."""
        return self.grammar is not None or self.thinking is not None

    @property
    def list_entries(self) -> int:
        """Count the entries of its long parameters, from which tables are made when it begins to run."""
        sampling = self.sampling
        lists = (sampling.logit_bias, sampling.allowed_token_ids, self.prediction, *self.bad_words_token_ids)
        return sum(len(entries) for entries in lists if entries)

    @property
    def weight(self) -> int:
        """What the request counts for in the queue: its tokens, and for each sample the entries of its lists."""
        inner = 0 if self.program is None else self.program.weight
        inner += sum(gen.weight for gen in self.gens)
        return len(self.tokens) + inner + sum(map(len, self.choices)) + self.sampling.n * self.list_entries


@dataclass(slots=True, frozen=True)
class NewSeq:
    """A sequence that takes a slot in this step. `tokens` are the prompt and, after a preemption, its output."""

    slot: int
    request: Request
    index: int
    tokens: list[int]


class ScheduledSeq(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a step: it computes `tokens`, then `draft`, at positions start, start + 1, ...

    `tokens` may end in UNSEEN, the token that the step before samples for this slot; the executor fills it in.
    `new_blocks` extends the slot's block table. With `wants_logits` the chunk reaches the end: sample.
    """

    slot: int
    start: int
    tokens: list[int]
    draft: list[int]
    new_blocks: list[int]
    wants_logits: bool
    state: StateUse | None = None


class ScheduledBatch(msgspec.Struct, frozen=True):
    """One step, as a delta against the state that the executor keeps per slot.

    It takes effect in this order: forget `freed` slots, place the blocks of `mapped` in slabs (block, slab of each
    column), make `copies` (source block, destination block) and then `state_copies` (source row, destination row) in
    order, set up `new` slots, compute `seqs`.
    """

    step: int
    new: list[NewSeq]
    seqs: list[ScheduledSeq]
    freed: list[int]
    copies: list[tuple[int, int]]
    mapped: list[list[int]] = []
    state_copies: list[tuple[int, int]] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) + len(s.draft) for s in self.seqs)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and of the most likely ones at its place, from the raw logits.

    `rank` is 1 for the most likely token of the vocabulary. `top_ids` and `top` are sorted, best first. `asked` has
    (token, log-probability, rank) of tokens that the request names.
    """

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top: list[float]
    asked: list[tuple[int, float, int]] = []


class StepOutput(msgspec.Struct):
    """The results of a step, by slot. `errors` gives the reason for each sequence that failed on its own.

    The last `forced[slot]` tokens of a slot were not sampled but follow from its grammar, so their KV is not computed
    yet. Slots in `ended` are complete: their grammar allows nothing more. Slots in `deferred` sampled nothing because
    their grammar was not ready; they compute their last token again. Slots in `refused` failed because their requests
    contradict themselves. Steps launched before the results were collected freed slots in `moved`, compute `ahead`.
    """

    step: int
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    errors: dict[int, str] = {}
    drafts: dict[int, list[int]] = {}
    embeddings: dict[int, list[float]] = {}
    forced: dict[int, int] = {}
    ended: set[int] = set()
    deferred: set[int] = set()
    refused: set[int] = set()
    moved: set[int] = set()
    ahead: set[int] = set()


class FinishReason(str, enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"


class Usage(msgspec.Struct, array_like=True):
    """Token counts of one sequence so far: accepted and rejected of drafts, computed of a prompt that reports it."""

    num_prompt: int
    num_cached: int
    num_output: int
    num_accepted: int = 0
    num_rejected: int = 0
    num_computed: int = 0


class Delta(msgspec.Struct, array_like=True):
    """What changed for one sample of one request; crosses the process border back.

    `stop_reason` is the stop token that ended it, if any. `error` explains the finish reason "error". `complete`: the
    grammar ended it, so the last token is text and not an end-of-sequence token. `events` come from a program.
    `refused`: the request itself is at fault. `exhausted`: the device had no memory left for it.
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
    events: list[Event] | None = None
    refused: bool = False
    exhausted: bool = False

    @property
    def failure(self) -> QuireError | None:
        """The error as an exception: RequestError if the request must change, else an EngineError."""
        if self.error is None:
            return None
        if self.refused:
            return RequestError(self.error)
        return (DeviceMemoryError if self.exhausted else EngineError)(self.error)

    @property
    def num_scores(self) -> int:
        """Count the entries of its log-probabilities."""
        scores = (*(self.logprobs or ()), *(self.prompt_logprobs or ()))
        return sum(1 + len(one.top_ids) + len(one.asked) for one in scores)

    def join(self, later: Delta) -> None:
        """Append a later delta of the same sample."""
        self.tokens += later.tokens
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = (self.prompt_logprobs or []) + later.prompt_logprobs
        self.usage, self.finish_reason = later.usage, later.finish_reason
        self.stop_reason, self.error = later.stop_reason, later.error
        self.embedding, self.complete, self.refused = later.embedding, later.complete, later.refused
        self.exhausted = later.exhausted
        if later.events is not None:
            self.events = (self.events or []) + later.events


def ends(
    request: Request, reason: FinishReason, error: str | None = None, num_cached: int = 0
) -> list[Delta]:
    """One final delta per sample for a request that ends outside the queue."""
    usage = Usage(len(request.tokens), num_cached, 0)
    return [Delta(request.id, i, [], usage, finish_reason=reason, error=error) for i in request.open_samples]


def failures(request: Request, error: BaseException, num_cached: int = 0) -> list[Delta]:
    """One final delta per sample for a request that `error` ends outside the queue."""
    deltas = ends(request, FinishReason.ERROR, message_of(error), num_cached)
    for delta in deltas:
        delta.refused = isinstance(error, RequestError)
    return deltas


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the scheduler, with counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_shared_blocks: int = 0  # used blocks that more than one sequence holds
    num_cached_blocks: int = 0
    num_free_blocks: int = 0
    num_kept_blocks: int = 0  # held for programs that wait for their next call
    num_programs: int = 0  # running ones
    num_sessions: int = 0  # programs that wait for their next call
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_snapshots: int = 0  # of recurrent states
    snapshot_bytes: int = 0
    snapshots_taken: int = 0
    snapshot_hits: int = 0
    snapshots_evicted: int = 0
    num_preemptions: int = 0
    num_oom: int = 0  # steps for which the device had no memory
    memory_refusals: int = 0  # requests larger than the whole KV cache
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_per_pos: list[int] = msgspec.field(default_factory=list)
    jump_forward_tokens: int = 0  # appended by a grammar without a forward pass each
    read_bytes: float = 0.0  # by steps, as the model's cost counts them, like their operations
    operations: float = 0.0
    step_seconds: float = 0.0
    # Bytes and operations per second that the machine can do, if known.
    limits: tuple[float, float] | None = None
    longest_stays: dict[str, float] = msgspec.field(
        default_factory=dict
    )  # seconds outside forward passes, by cause

    def as_dict(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The API process's view of the model. `defaults` are its own sampling parameters.

    `generates` is false for encoders. `pooling` says how the model makes its vectors; `scores` and `labels` belong to
    classifiers. Vectors may be cut to `dimensions`: any if empty, none if None. The token ids of a second text are
    `segment_size` higher, unless it is 0. The last `spare_tokens` of the vocabulary are those that adapters may add.
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
    num_parameters: int = 0
    weight_bytes: int = 0
    spare_tokens: int = 0
    dimensions: tuple[int, ...] | None = ()
    grows: bool = False  # --max-model-len can be raised: the model was made for more
    recurrent: bool = False  # it has states, which are kept where they are asked for

    @property
    def num_rows(self) -> int:
        """The tokens that texts may have."""
        return self.segment_size or self.vocab_size


# Used until the engine has described its model.
UNKNOWN_MODEL = ModelCard(name="", max_model_len=1, vocab_size=1, eos_token_ids=())
