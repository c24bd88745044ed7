"""`LLMEngine`: an engine for programs with a loop of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from quire.client.outputs import OutputStream, RequestOutput
from quire.config import EngineConfig
from quire.engine.local import LocalCall, News
from quire.errors import EngineError, RequestError
from quire.llm.prompts import Prompt
from quire.llm.running import push, raise_error
from quire.logits_processor import ProcessorClass
from quire.params import OutputKind, SamplingParams
from quire.types import Delta
from vllm.entrypoints.llm import LLM


class LLMEngine(LLM):
    """Engine for programs with a loop of their own: `add_request`, then `step` until nothing is unfinished.

    The engine computes on its own thread; `step` waits for what it has computed since the last call.
    """

    def _start(self, config: EngineConfig, processors: Sequence[ProcessorClass] = ()) -> None:
        super()._start(config, processors)
        self._news: News = SimpleQueue()
        self._open: dict[str, tuple[LocalCall, OutputStream]] = {}  # by the caller's request id
        self._names: dict[str, str] = {}  # the caller's request ids by the engine's

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        prompt_text: str | None = None,
        **ignored: Any,
    ) -> str:
        """Queue a request and return its id.

        Raises RequestError if the prompt or parameters are refused, or if the id belongs to an unfinished request.
        """
        if request_id in self._open:
            raise RequestError(f"request_id {request_id!r} belongs to an unfinished request", "request_id")
        (stream,) = self._streams([prompt], [params.clone()], [priority], tokenization_kwargs, lora_request)
        stream.output.request_id = request_id
        stream.output.prompt = stream.output.prompt or prompt_text
        self._names[stream.request.id] = request_id
        self._open[request_id] = self._submit_streams([stream], self._news), stream
        return request_id

    def step(self) -> list[RequestOutput]:
        """Return the outputs that have grown since the last call; wait for one. Empty if nothing is unfinished.

        Each output is reported as its parameters' `output_kind` says. Raises EngineError if the engine has failed.
        """
        while self._open:
            changed = {name: self._open[name][1] for name in self._grown() if name in self._open}
            outputs = [self._reported(name, stream) for name, stream in changed.items()]
            if found := [output for output in outputs if output is not None]:
                return found
        return []

    def _grown(self) -> list[str]:
        """List the ids of requests with new deltas, each once."""
        batches, names = [self._news.get()], dict[str, None]()
        while True:
            try:
                batches.append(self._news.get_nowait())
            except Empty:
                break
        for deltas in batches:
            if isinstance(deltas, BaseException):
                raise EngineError(f"the engine failed: {deltas}") from deltas
            for delta in deltas:
                names.update(dict.fromkeys(self._pushed(delta)))
        return list(names)

    def _pushed(self, delta: Delta) -> list[str]:
        name = self._names.get(delta.request_id)
        if name is None:
            return []
        call, stream = self._open[name]
        push(call, stream, delta)
        return [name]

    def _reported(self, name: str, stream: OutputStream) -> RequestOutput | None:
        if stream.finished:
            del self._open[name], self._names[stream.request.id]
            raise_error(stream)
        kind = stream.request.sampling.output_kind
        if kind is OutputKind.FINAL_ONLY and not stream.finished:
            return None
        return stream.new_part() if kind is OutputKind.DELTA else stream.snapshot()

    def abort_request(self, request_ids: str | Sequence[str], internal: bool = False) -> None:
        """End requests; `step` reports them once more, with the finish reason "abort"."""
        for name in [request_ids] if isinstance(request_ids, str) else request_ids:
            if name in self._open:
                call, stream = self._open[name]
                for index in range(stream.request.sampling.n):
                    call.abort(stream.request.id, index)

    def has_unfinished_requests(self) -> bool:
        return bool(self._open)

    def get_num_unfinished_requests(self) -> int:
        return len(self._open)


__all__ = ["LLMEngine"]
