"""A live sequence and its group of samples: the scheduler's own records. Knows token ids only."""

from __future__ import annotations

import enum
import sys
from collections.abc import Hashable, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.params import OutputKind, RepetitionDetectionParams, SamplingParams
from quire.radix import RadixNode
from quire.sched.prefix import PrefixMatch
from quire.types import Delta, FinishReason, Request, TokenLogprobs, Usage

if TYPE_CHECKING:
    from quire.sched.states import RunningState

VOCABULARY = 1 << 17
"""VOCABULARY stands for the size of a large one."""


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


WAITING, RUNNING, FINISHED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.FINISHED


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sample of a request while it lives. Only the scheduler writes to it.

    `tokens` are the known tokens: the prompt and the output so far (the request's own list until the sequence
    gets a slot). Steps in flight sample `num_unseen` more. `num_computed` counts tokens whose KV is in `blocks`,
    or will be once the steps in flight are done; the rest of `tokens`, unseen tokens and `draft` is pending.

    The remaining fields are computed once, so that steps don't repeat the work. `key` orders sequences, lower first.
    `cursor` is the prefix index's node of the last indexed full block; at `index_at` computed tokens there is another
    one to index. The sequence ends at `max_total` tokens, or at a token of `end_ids` once it has `min_total`. The first
    `num_reported` tokens have been reported; after its first token, a sequence reports every `report_every` tokens, and
    its end. A waiting fork holds the blocks of `base` until it is admitted.
    """

    request: Request
    index: int
    tokens: list[int]
    group: Group
    key: tuple[int, float, int]
    cursor: RadixNode[int]
    num_prompt_tokens: int
    max_total: int
    min_total: int
    end_ids: frozenset[int]
    num_reported: int
    report_every: int
    constrained: bool
    num_prompt_logprobs: int
    slot: int = -1
    draft: list[int] = field(default_factory=list)
    drafting: bool = False  # the last result came with a draft
    num_computed: int = 0
    num_unseen: int = 0
    blocks: list[int] = field(default_factory=list)
    num_passed: int = 0  # first blocks that no further token sees through a window
    state: RunningState | None = None  # while it runs, if the model has recurrent states
    base: PrefixMatch | None = None
    repetition: RepetitionDetectionParams | None = None
    status: SequenceStatus = WAITING
    num_cached: int = 0
    num_accepted: int = 0  # tokens of drafts
    num_rejected: int = 0
    held: list[TokenLogprobs] = field(default_factory=list)  # of tokens not reported yet
    num_preemptions: int = 0
    arrival: float = 0.0  # seconds, if there is a target for steps
    prefill_end: int = 0  # its tokens when it got its slot: up to there it is a prompt, computed in chunks
    index_at: int = sys.maxsize
    prompt_width: int = 0  # log-probabilities of a token of the prompt
    output_width: int = 0

    @property
    def num_settled(self) -> int:
        """Count the known tokens whose KV later steps may read and nothing writes again.

        A constrained sequence may have to recompute the last token of a step in flight.
        """
        return min(self.num_computed, len(self.tokens)) - (self.constrained and self.num_unseen)

    @property
    def match_limit(self) -> int:
        """Count the tokens that may be reused: neither the last one nor positions whose results are still due."""
        limit = len(self.tokens) - 1
        if self.request.pooling in ("mean", "cls", "all") or self.request.sampling.skip_reading_prefix_cache:
            return 0
        return min(limit, self.num_prompt_logprobs) if self.scores_due else limit

    @property
    def scores_due(self) -> bool:
        """Tell whether it has log-probabilities of the prompt to tell."""
        due = self.num_prompt_logprobs < self.num_prompt_tokens - 1
        return due and not self.index and self.request.sampling.scores_prompt

    def cut(self, count: int) -> tuple[int, FinishReason | None, int | None]:
        """Drop what follows the end of the sequence, if the end is among its last `count` tokens.

        Returns how many of them stay, the finish reason and the stop reason.
        """
        tokens = self.tokens
        first = len(tokens) - count
        for total in range(first + 1, len(tokens) + 1):
            token = tokens[total - 1]
            reason = None
            if token in self.end_ids and total >= self.min_total:
                reason = FinishReason.STOP
            elif total >= self.max_total:
                reason = FinishReason.LENGTH
            elif self.repetition is not None and total >= self.min_total and self._repeats(total):
                reason = FinishReason.REPETITION
            if reason is not None:
                del tokens[total:]
                requested = reason is FinishReason.STOP and token not in self.request.eos_token_ids
                return total - first, reason, token if requested else None
        return count, None, None

    def _repeats(self, total: int) -> bool:
        """Tell whether the output up to `total` ends in a pattern that `repetition` counts often enough."""
        rule, tokens = self.repetition, self.tokens
        assert rule is not None
        longest = min(rule.max_pattern_size, (total - self.num_prompt_tokens) // rule.min_count)
        for size in range(max(1, rule.min_pattern_size), longest + 1):
            last = total - size * (rule.min_count - 1)
            if all(tokens[i] == tokens[i - size] for i in range(total - 1, last - 1, -1)):
                return True
        return False

    def take_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Take the `entries` (for the tokens at start + 1, ...) not delivered yet, and mark them delivered."""
        due = min(len(entries), self.num_prompt_tokens - 1 - start)
        fresh = entries[max(0, self.num_prompt_logprobs - start) : max(0, due)]
        self.num_prompt_logprobs += len(fresh)
        return fresh

    def usage(self) -> Usage:
        made = len(self.tokens) - self.num_prompt_tokens
        return Usage(self.num_prompt_tokens, self.num_cached, made, self.num_accepted, self.num_rejected)

    def delta(self, reason: FinishReason | None = None, error: str | None = None) -> Delta:
        """Report all tokens not reported yet."""
        tokens, self.num_reported = self.tokens[self.num_reported :], len(self.tokens)
        logprobs, self.held = self.held or None, []
        return Delta(self.request.id, self.index, tokens, self.usage(), logprobs, None, reason, error=error)


@dataclass(slots=True, eq=False)
class Group:
    """The live samples of one request. Samples in `held` wait for another one to prefill the prompt."""

    request: Request
    live: list[Sequence] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)
    prompt_counted: bool = False
    list_entries: int = field(init=False)

    def __post_init__(self) -> None:
        self.list_entries = self.request.list_entries

    @property
    def namespace(self) -> Hashable:
        """Requests share prefixes only within one adapter and salt."""
        return (self.request.adapter, self.request.salt)

    def prompt_holder(self) -> tuple[Sequence | None, bool]:
        """Find a running sample with the KV of the whole prompt, and tell whether one will soon have it."""
        computing = False
        for seq in self.live:
            if seq.status is RUNNING:
                if seq.num_settled >= seq.num_prompt_tokens:
                    return seq, False
                computing = True
        return None, computing


def active_repetition(sampling: SamplingParams) -> RepetitionDetectionParams | None:
    """Return the repetition patterns that end an output, if the request names any."""
    rule = sampling.repetition_detection
    return rule if rule is not None and rule.max_pattern_size else None


def width_of(count: int | None, asked: Sized | None) -> int:
    """Count the log-probabilities of a token: its own, the `count` likeliest (-1: all), and those asked for."""
    if count is None and asked is None:
        return 0
    return 1 + (VOCABULARY if count == -1 else count or 0) + len(asked or ())


def report_interval(request: Request, default: int) -> int:
    """Count the tokens after which a sequence of `request` reports; `default` is the engine's.

    If only the end result is wanted, nothing in between is read, except that stop strings are searched, and
    log-probabilities reported, token by token.
    """
    sampling = request.sampling
    if sampling.output_kind is OutputKind.FINAL_ONLY and not sampling.stop and not sampling.wants_logprobs:
        return sys.maxsize
    return sampling.stream_interval or default


def refusal(request: Request, max_model_len: int, max_total: int) -> str | None:
    """Say why `request` can never run, given `max_model_len` and a KV cache of `max_total` tokens; None if it can."""
    num_prompt = len(request.tokens)
    if num_prompt == 0:
        return "the prompt is empty; give at least one token"
    if request.max_tokens < 1 and request.pooling is None:
        return f"max_tokens must be at least 1, got {request.max_tokens}"
    room = 0 if request.pooling is not None else 1
    if num_prompt + room > max_model_len:
        return (
            f"the prompt has {num_prompt} tokens, but max_model_len is {max_model_len}, "
            f"including {room} for output; shorten the prompt"
        )
    if num_prompt + room > max_total:
        return (
            f"the prompt has {num_prompt} tokens, but the whole KV cache holds {max_total}, "
            f"including {room} for output; shorten the prompt or raise --kv-cache-memory-bytes"
        )
    return None
