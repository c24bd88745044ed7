"""Writes what the samples of a call have made as lines of text, which another engine reads to go on. Knows no HTTP.

A line is a delta in base64 of msgpack, without what is the same as before: its tokens, and where there is more to tell
how the sample ended, its counts, its log-probabilities.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.client.outputs import OutputStream
from quire.errors import RequestError
from quire.types import Delta, FinishReason, Made, Request, TokenLogprobs, Usage

_pack = msgspec.msgpack.Encoder().encode


class Teller:
    """Writes the deltas of a call's requests as lines."""

    def __init__(self, requests: list[Request]) -> None:
        self._places = {request.id: place for place, request in enumerate(requests)}
        self._counts: dict[tuple[int, int], tuple[int, ...]] = {}
        self._lines: list[bytes] = []

    def take(self, delta: Delta) -> None:
        """Note a delta that is about to become text. Those of programs, which start again, are not told."""
        if delta.events is not None:
            return
        place, usage = self._places[delta.request_id], delta.usage
        counts: tuple[int, ...] | None
        counts = usage.num_cached, usage.num_accepted, usage.num_rejected, usage.num_computed
        if self._counts.get((place, delta.index)) == counts:
            counts = None
        else:
            self._counts[place, delta.index] = counts
        told: list[Any] = [place, delta.index, delta.tokens, delta.finish_reason, delta.stop_reason]
        told += [delta.complete or None, counts, delta.logprobs, delta.prompt_logprobs]
        while told[-1] is None:
            told.pop()
        self._lines.append(b64encode(_pack(told)))

    def lines(self) -> list[bytes]:
        """Return the lines since the last call."""
        lines, self._lines = self._lines, []
        return lines


class _Told(msgspec.Struct, array_like=True, frozen=True):
    """A line as it is read: the fields of a Delta, with the place of its prompt and the counts of its usage."""

    place: int
    index: int
    tokens: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    complete: bool | None = None
    counts: tuple[int, int, int, int] | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


_line = msgspec.msgpack.Decoder(_Told)
ENDS = (None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


def read_lines(lines: Iterable[str], requests: Sequence[Request], vocab_size: int) -> list[Delta]:
    """Read what a Teller wrote about like requests as deltas of these. RequestError: it cannot be so."""
    counts: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    made: Counter[tuple[int, int]] = Counter()
    found = []
    for line in lines:
        try:
            told = _line.decode(b64decode(line, validate=True))
        except (ValueError, msgspec.MsgspecError) as error:
            raise RequestError(f"sent: a line is not one that a replica writes: {error}", "sent") from error
        sample = told.place, told.index
        if not (0 <= told.place < len(requests) and 0 <= told.index < requests[told.place].sampling.n):
            raise RequestError(f"sent: there is no sample {told.index} of prompt {told.place}", "sent")
        request = requests[told.place]
        scored = [one.token for one in told.logprobs or ()]
        if not all(0 <= token < vocab_size for token in (*told.tokens, *scored)):
            raise RequestError(f"sent: token ids are from 0 to {vocab_size - 1}", "sent")
        made[sample] += len(told.tokens)
        if made[sample] > request.max_tokens or told.finish_reason not in ENDS:
            raise RequestError(f"sent: sample {told.index} cannot have come so far", "sent")
        if (told.logprobs is not None) != (request.sampling.wants_logprobs and bool(told.tokens)) or (
            scored != told.tokens and told.logprobs is not None
        ):
            raise RequestError("sent: the log-probabilities are not those of the tokens", "sent")
        own = counts[sample] = told.counts or counts.get(sample, (0, 0, 0, 0))
        if min(own) < 0 or own[0] > len(request.tokens):
            raise RequestError("sent: the counts of usage cannot be", "sent")
        usage = Usage(len(request.tokens), own[0], made[sample], *own[1:])
        delta = Delta(request.id, told.index, told.tokens, usage, told.logprobs, told.prompt_logprobs)
        delta.finish_reason, delta.stop_reason = told.finish_reason, told.stop_reason
        delta.complete = bool(told.complete)
        found.append(delta)
    return found


def resumed(stream: OutputStream, past: Sequence[Delta]) -> Request:
    """Push what another engine has reported into a new stream; return the request that goes on from there.

    RequestError: it goes on after its end, or cannot be resumed.
    """
    request, samples = stream.request, stream.output.outputs
    if request.is_composed:
        raise RequestError("this request is answered by several: send it again instead", "sent")
    drafted, num_scored = [(0, 0)] * request.sampling.n, 0
    for delta in past:
        if samples[delta.index].finished:
            raise RequestError(f"sent: sample {delta.index} goes on after its end", "sent")
        num_scored += len(delta.prompt_logprobs or ())
        drafted[delta.index] = delta.usage.num_accepted, delta.usage.num_rejected
        for part in stream.parts(delta):
            stream.push(part)
    if num_scored > max(0, len(request.tokens) - 1 - request.scored_from):
        raise RequestError("sent: more log-probabilities than the prompt has tokens", "sent")
    if any(not sample.finished and len(sample.token_ids) >= request.max_tokens for sample in samples):
        raise RequestError("sent: a sample that goes on has all its tokens", "sent")
    cached = stream.output.num_cached_tokens
    made = tuple(Made(one.token_ids, cached, *drafted[one.index], one.finished) for one in samples)
    return msgspec.structs.replace(request, made=made, scored_from=request.scored_from + num_scored)
