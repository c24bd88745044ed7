"""The scheduler's own record of a live sequence and of its sibling samples. Knows token ids only."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from quire.radix import RadixNode
from quire.types import Delta, FinishReason, Request, Sequence, SequenceStatus, TokenLogprobs, Usage


@dataclass(slots=True, eq=False, kw_only=True)
class LiveSequence(Sequence):
    """A Sequence with what the scheduler works out once, so that no step does it again.

    `key` orders sequences, lower first. `cursor` is the prefix index's place of the last indexed full block
    and `index_at` the `num_computed` from which on there is one more. The sequence ends at `max_total`
    tokens, or at a token of `end_ids` once it has `min_total`. `tokens` is the request's own list until a
    slot is taken. News of the first `num_told` tokens are out; one that is `quiet` tells only of its first token
    and its end.
    """

    group: Group
    key: tuple[int, int]
    cursor: RadixNode[int]
    num_prompt_tokens: int
    max_total: int
    min_total: int
    end_ids: frozenset[int]
    num_told: int
    quiet: bool
    index_at: int = 0

    @property
    def match_limit(self) -> int:
        """How many tokens may be reused: not the last one, nor any whose logits are still due."""
        limit = len(self.tokens) - 1
        if self.request.pooling in ("mean", "cls"):
            return 0
        if self.index == 0 and self.request.sampling.prompt_logprobs is not None:
            due = self.num_prompt_logprobs
            if due < self.num_prompt_tokens - 1:
                return min(limit, due)
        return limit

    def cut(self, count: int) -> tuple[int, FinishReason | None, int | None]:
        """Of the last `count` tokens keep those up to the end, if it is among them, and drop the others.

        Returns how many stay, the finish reason and the stop reason.
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
            if reason is not None:
                del tokens[total:]
                asked = reason is FinishReason.STOP and token not in self.request.eos_token_ids
                return total - first, reason, token if asked else None
        return count, None, None

    def take_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Of `entries` (for the tokens at start + 1, ...) those not delivered yet; marks them delivered."""
        due = min(len(entries), self.num_prompt_tokens - 1 - start)
        fresh = entries[max(0, self.num_prompt_logprobs - start) : max(0, due)]
        self.num_prompt_logprobs += len(fresh)
        return fresh

    def delta(self, reason: FinishReason | None = None, error: str | None = None) -> Delta:
        """News of the tokens that nobody was told of."""
        usage = Usage(self.num_prompt_tokens, self.num_cached, self.num_output)
        news, self.num_told = self.tokens[self.num_told :], len(self.tokens)
        return Delta(self.request.id, self.index, news, usage, finish_reason=reason, error=error)


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one request that still live. `held` wait for another one to compute the prompt."""

    request: Request
    live: list[LiveSequence] = field(default_factory=list)
    held: list[LiveSequence] = field(default_factory=list)
    prompt_counted: bool = False

    @property
    def namespace(self) -> Hashable:
        """Prefixes are shared between requests of one adapter and salt only."""
        return (self.request.adapter, self.request.salt)

    def prompt_holder(self) -> tuple[LiveSequence | None, bool]:
        """A running sample that has the KV of the whole prompt, and whether one is about to have it."""
        computing = False
        for seq in self.live:
            if seq.status is SequenceStatus.RUNNING:
                if seq.num_computed >= seq.num_prompt_tokens:
                    return seq, False
                computing = True
        return None, computing


def refusal(request: Request, max_model_len: int, max_total: int) -> str | None:
    """Why `request` can never run where a sequence has at most `max_model_len` tokens and KV for `max_total`."""
    num_prompt = len(request.tokens)
    if num_prompt == 0:
        return "the prompt is empty; give at least one token"
    if request.max_tokens < 1 and request.pooling is None:
        return f"max_tokens must be at least 1, got {request.max_tokens}"
    room = 0 if request.pooling is not None else 1
    if num_prompt + room > max_model_len:
        return (
            f"the prompt has {num_prompt} tokens, but max_model_len is {max_model_len}, "
            f"including {room} for output; shorten the prompt or raise --max-model-len"
        )
    if num_prompt + room > max_total:
        return (
            f"the prompt has {num_prompt} tokens, but the whole KV cache holds {max_total}, "
            f"including {room} for output; shorten the prompt or raise --kv-cache-memory-bytes"
        )
    return None
