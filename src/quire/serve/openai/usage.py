"""Token counts in OpenAI's shape: of a whole call, and of each chunk of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from quire.serve.call import Call
from quire.serve.openai.protocol import (
    AnswerMetrics,
    CompletionTokensDetails,
    PromptTokensDetails,
    SamplingFields,
    UsageInfo,
)
from quire.serve.options import ServerConfig
from quire.types import Usage


class UsageReport:
    """Decides which parts of an answer carry usage."""

    def __init__(self, config: ServerConfig, body: SamplingFields) -> None:
        options = body.stream_options
        self._predicted = body.prediction is not None
        wanted = body.return_metrics
        self._metrics = config.enable_per_request_metrics if wanted is None else wanted
        self._details = config.enable_prompt_tokens_details
        forced = config.enable_force_include_usage
        self.in_end = forced or bool(options and options.include_usage)
        self._in_chunks = forced or (self.in_end and bool(options and options.continuous_usage_stats))

    def progress(self, call: Call) -> dict[str, int]:
        """Say how much of the prompts is computed, in llama.cpp's shape."""
        done = sum(stream.output.num_computed_tokens for stream in call.streams)
        return {"total": call.usage.num_prompt, "cache": call.usage.num_cached, "processed": done}

    def metrics(self, call: Call) -> AnswerMetrics | None:
        """The times of a call of one sample, if they are to be reported."""
        if not self._metrics or len(call.streams) != 1 or call.streams[0].request.sampling.n != 1:
            return None
        times, found = call.generation.times[0], AnswerMetrics()
        if not times.first_token:
            return found
        found.time_to_first_token_ms = 1000 * (times.first_token - times.arrival)
        found.queue_time_ms = 1000 * max(0.0, (times.scheduled or times.arrival) - times.arrival)
        seconds = times.last_token - times.first_token
        found.generation_time_ms = 1000 * seconds
        found.others_prompts_time_ms = 1000 * times.prefill_wait
        if times.num_output > 1 and seconds > 0:
            found.mean_itl_ms = 1000 * seconds / (times.num_output - 1)
            found.tokens_per_second = (times.num_output - 1) / seconds
        elif times.last_token > times.arrival:  # a single token has no time after the first
            found.tokens_per_second = times.num_output / (times.last_token - times.arrival)
        return found

    def of(self, usage: Usage, num_reasoning: int | None = None) -> UsageInfo:
        """`num_reasoning` of the output tokens are reasoning; None if the answer does not report it."""
        cached = PromptTokensDetails(usage.num_cached) if self._details else None
        total = usage.num_prompt + usage.num_output
        info = UsageInfo(usage.num_prompt, usage.num_output, total, cached)
        if self._predicted or num_reasoning is not None:
            accepted = (usage.num_accepted, usage.num_rejected) if self._predicted else (0, 0)
            info.completion_tokens_details = CompletionTokensDetails(*accepted, num_reasoning or 0)
        return info

    def at_start(self, usage: Usage) -> Any:
        """The usage field of the first chunk, which carries no output."""
        return self.in_chunk(lambda: Usage(usage.num_prompt, usage.num_cached, 0))

    def in_chunk(self, usage: Callable[[], Usage]) -> Any:
        """The usage field of a chunk before the end: the running counts, null, or nothing."""
        if self._in_chunks:
            return self.of(usage())
        return None if self.in_end else UNSET
