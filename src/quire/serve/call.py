"""The running requests of one HTTP call: text from their Deltas, stop strings, ends. Knows no HTTP shapes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.client.client import AsyncEngine
from quire.client.metrics import RequestTimes
from quire.client.outputs import Chunk, OutputStream
from quire.client.requests import Front
from quire.errors import EngineError
from quire.params import OutputKind
from quire.serve.errors import invalid, timed_out
from quire.serve.options import ServerConfig
from quire.serve.threads import FEW_SCORES
from quire.serve.tools import Reading
from quire.types import Delta, Request, Usage

if TYPE_CHECKING:
    from quire.serve.resumption import Resumption

log = logging.getLogger("quire.serve")

SLICE_SECONDS = 0.005
"""The text of one call is made for so long before others go on."""

MAX_SCORES = 1 << 23
"""MAX_SCORES entries of log-probabilities make an answer of some 600 MB."""
TOO_LARGE = (
    f"the answer would hold more than {MAX_SCORES} log-probabilities: ask for fewer, or in several calls"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, the text of its prompt if known, the field that constrains it, and how to read its output."""

    request: Request
    text: str | None = None
    constrained_by: str | None = None
    reading: Reading | None = None

    def stream(self, front: Front) -> OutputStream:
        return front.stream(self.request, self.text, None if self.reading is None else self.reading.stops)


class Piece(NamedTuple):
    """New output of one sample of one prompt."""

    prompt: int
    chunk: Chunk


class EngineCall:
    """The requests of one HTTP call in the engine. Leaving its `with` block aborts what still runs."""

    resumption: Resumption | None = None  # what it has made elsewhere
    fingerprint = ""  # of the servers that answer alike

    def __init__(
        self, engine: AsyncEngine, call_id: str, created: int, requests: list[Request], config: ServerConfig
    ) -> None:
        self.id = call_id
        self.created = created
        self.generation = engine.submit(requests)
        self._config = config
        self._timer: asyncio.TimerHandle | None = None
        timeout = config.request_timeout
        if timeout is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout, self.generation.fail, timed_out(timeout))

    async def take(self) -> list[Delta]:
        """Take the deltas since the last call; empty at the end.

        Raises EngineError if the engine died, or the error given to `fail`.
        """
        return await self.generation.take()

    def fail(self, error: Exception) -> None:
        """End everything; a waiting reader gets `error`."""
        self.generation.fail(error)

    def __enter__(self) -> EngineCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.generation.close()
        if self._config.enable_log_requests:
            self._log()

    def _log(self) -> None:
        """Log one line per request with its counts and times."""
        for times in self.generation.times:
            self._log_request(times, {})

    def _log_request(self, times: RequestTimes, fields: dict[str, Any]) -> None:
        log.info(
            "request done",
            extra={
                "fields": {
                    "request_id": self.id,
                    **fields,
                    "queue_s": round(max(0.0, (times.scheduled or times.arrival) - times.arrival), 4),
                    "ttft_s": round(max(0.0, times.first_token - times.arrival), 4),
                    "total_s": round(time.monotonic() - times.arrival, 4),
                }
            },
        )


class Call(EngineCall):
    """Runs prompts and returns their output as text.

    Raises the error that keeps a prompt from being queued. An error of one sample ends the whole call.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        front: Front,
        call_id: str,
        created: int,
        prompts: list[Prompt],
        config: ServerConfig,
        resumption: Resumption | None = None,
    ) -> None:
        self.resumption = resumption
        # The turns of a conversation may all have one id.
        self.source = f"{call_id}/{len(prompts[0].request.tokens)}"
        reading = prompts[0].reading
        self.reading = None if reading is None else replace(reading, source=self.source)
        self.streams: list[OutputStream] = [prompt.stream(front) for prompt in prompts]
        self._vocab_size = front.info.vocab_size
        self._check_scores()
        self._position = {p.request.id: i for i, p in enumerate(prompts)}
        requests = [p.request for p in prompts] if resumption is None else resumption.requests
        super().__init__(engine, call_id, created, requests, config)

    @property
    def usage(self) -> Usage:
        """Count the tokens of all prompts; each prompt counts once, whatever its number of samples."""
        parts = [stream.usage for stream in self.streams]
        return Usage(
            sum(p.num_prompt for p in parts),
            sum(p.num_cached for p in parts),
            sum(p.num_output for p in parts),
            sum(p.num_accepted for p in parts),
            sum(p.num_rejected for p in parts),
        )

    async def slices(self, deltas: list[Delta]) -> AsyncIterator[list[Piece]]:
        """Yield the text of deltas in parts, between which other calls go on. Raises EngineError if a sample failed."""
        found: list[Piece] = []
        end = time.monotonic() + SLICE_SECONDS
        for delta in deltas:
            if time.monotonic() > end:
                yield found
                found = []
                await asyncio.sleep(0)
                end = time.monotonic() + SLICE_SECONDS
            if delta.num_scores > FEW_SCORES:
                await asyncio.to_thread(self._push, delta, found)
            else:
                self._push(delta, found)
            self._end_stopped(found)
        yield found

    def pieces(self, deltas: list[Delta]) -> list[Piece]:
        """Collect the text of deltas. Raises EngineError if a sample failed."""
        found: list[Piece] = []
        for delta in deltas:
            self._push(delta, found)
        self._end_stopped(found)
        return found

    async def finish(self) -> None:
        """Wait until all samples have ended; results are in `streams`."""
        # The engine does not see stop strings, so output that may hold one is checked as it arrives.
        whole = not any(stream.request.sampling.stop for stream in self.streams)
        while deltas := await self.generation.take(whole):
            async for _ in self.slices(deltas):
                pass
            if self.size > MAX_SCORES:
                raise invalid(TOO_LARGE, "logprobs", "invalid_value")

    @property
    def size(self) -> int:
        """Count the tokens, and entries of log-probabilities, of the answer."""
        total = 0
        for stream in self.streams:
            params = stream.request.sampling
            total += stream.usage.num_output * (1 + self._width(params.logprobs))
            total += len(stream.output.prompt_logprobs or ()) * self._width(params.prompt_logprobs)
        return total

    def _width(self, given: int | None) -> int:
        """Count the entries of a token where `given` are asked for."""
        return self._vocab_size if given == -1 else given or 0

    def _check_scores(self) -> None:
        """Raise 400 if log-probabilities of the prompts would make the answer too large."""
        requests = [stream.request for stream in self.streams if stream.request.sampling.prompt_logprobs]
        due = (
            (len(one.tokens) - one.scored_from) * self._width(one.sampling.prompt_logprobs)
            for one in requests
        )
        if sum(due) > MAX_SCORES:
            raise invalid(TOO_LARGE, "prompt_logprobs", "invalid_value")

    def _push(self, delta: Delta, found: list[Piece]) -> None:
        position = self._position[delta.request_id]
        stream = self.streams[position]
        for part in stream.parts(delta):
            chunk = stream.push(part)
            if chunk is None:
                return
            if chunk.error is not None or chunk.finish_reason == "error":
                raise chunk.error or EngineError("the engine failed on this request")
            if part.tokens or chunk.finish_reason is not None:  # else it is a part of the prompt's scores
                found.append(Piece(position, chunk))

    def _end_stopped(self, found: list[Piece]) -> None:
        """End the samples whose text has ended, as the engine does not see it."""
        for prompt, chunk in found:
            if chunk.abort:
                self.generation.end_sample(self.streams[prompt].request.id, chunk.index)

    def _log(self) -> None:
        for stream, times in zip(self.streams, self.generation.times, strict=True):
            usage = stream.usage
            fields: dict[str, Any] = {
                "prompt_tokens": usage.num_prompt,
                "cached_tokens": usage.num_cached,
                "output_tokens": usage.num_output,
                "finish_reason": ",".join(o.finish_reason or "abort" for o in stream.output.outputs),
            }
            kind = stream.request.sampling.output_kind
            streamed = kind is not OutputKind.FINAL_ONLY
            if self._config.enable_log_outputs and (self._config.enable_log_deltas or not streamed):
                fields["prompt"] = self._cut(stream.output.prompt or stream.output.prompt_token_ids)
                fields["outputs"] = [self._cut(sample.text) for sample in stream.output.outputs]
            self._log_request(times, fields)

    def _cut(self, text: str | list[int]) -> str | list[int]:
        return text[: self._config.max_log_len]
