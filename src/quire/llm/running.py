"""RunningEngine: an engine of this process, its start and end, and the calls that wait for their requests."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.client.metrics import Metrics, RequestTimes
from quire.client.outputs import OutputStream, RequestOutput
from quire.client.requests import Front
from quire.client.start import start_front
from quire.config import EngineConfig
from quire.engine import registry
from quire.engine.feature import Features
from quire.engine.local import LocalCall, LocalEngine, News
from quire.engine.start import Started, begin_start, finish_start
from quire.engine.verbs import LoadAdapter
from quire.errors import EngineError, RequestError, named
from quire.fields import refusal
from quire.lazy import Lazy
from quire.llm.prompts import Prompt, rendered_of, salt_of, tokens_of
from quire.params import OutputKind, SamplingParams, StructuredOutputsParams, integers
from quire.progress import untold
from quire.text.tokenizer import Tokenizer
from quire.types import UNKNOWN_MODEL, Delta, FinishReason, Request, ScheduledBatch

PREFIX = "vllm"


class LocalObserver:
    """Follows the requests of one engine of this process. All methods but `begin` are for the engine thread."""

    def __init__(self, counts: Metrics) -> None:
        self.counts = counts
        self._live: dict[str, tuple[RequestTimes, set[int]]] = {}

    def begin(self, request: Request) -> RequestTimes:
        """Begin to follow a request that is about to be queued; its times fill as it runs."""
        times = RequestTimes(request, time.monotonic())
        self._live[request.id] = times, set(range(request.sampling.n))
        return times

    def scheduled(self, batch: ScheduledBatch) -> None:
        now = time.monotonic()
        for new in batch.new:
            if new.request.id in self._live:
                self.counts.scheduled(self._live[new.request.id][0], now)

    def stepped(self, deltas: list[Delta]) -> None:
        now = time.monotonic()
        known = [
            (self._live[delta.request_id][0], delta) for delta in deltas if delta.request_id in self._live
        ]
        self.counts.step(known, now)
        for times, delta in known:
            if delta.finish_reason is not None:
                samples = self._live[delta.request_id][1]
                samples.discard(delta.index)
                if not samples:
                    del self._live[delta.request_id]
                    self.counts.end(times, delta.finish_reason, now)

    def dropped(self, request_id: str) -> None:
        self._live.pop(request_id, None)


if TYPE_CHECKING:
    from quire import logits_processor, meter
    from quire.client import adapters, chunks
    from quire.client.adapters import LoadedAdapter, LoadedAdapters, LoRARequest
    from quire.logits_processor import ProcessorClass
    from quire.weights import adapter as adapter_files
    from quire.weights import download
else:
    adapters, download = Lazy("quire.client.adapters"), Lazy("quire.weights.download")
    chunks, adapter_files = Lazy("quire.client.chunks"), Lazy("quire.weights.adapter")
    logits_processor, meter = Lazy("quire.logits_processor"), Lazy("quire.meter")

Kwargs = Mapping[str, Any]
Sampling = SamplingParams | Sequence[SamplingParams]
Tqdm = bool | Callable[..., Any]


class RunningEngine:
    """Starts an engine and runs requests on it."""

    def _start(self, config: EngineConfig, processors: Sequence[ProcessorClass] = ()) -> None:
        with ThreadPoolExecutor(1) as executor:  # reads the tokenizer while this thread reads the weights
            front = executor.submit(start_front, replace(config, seed=config.seed or 0), UNKNOWN_MODEL)
            tokenizer = executor.submit(_tokenizer_of, front)  # the engine keeps this one, not the front
            started, model = begin_start(config, processors, tokenizer.result)
            with started.report.phase("tokenizer"):
                self._front = front.result()
        self._front.info = started.info
        finish_start(started, model)
        self.config = config
        self.report = started.report
        self._core = started.core
        counts = Metrics("", PREFIX)
        counts.stats = started.core.stats()
        counts.name_model(started.info.name, config.cache, started.info.max_model_len)
        self._observer = LocalObserver(counts)
        self._engine = LocalEngine(started.core, self._observer)
        self._close = weakref.finalize(self, _close, self._engine, started)
        # Bound to the engine alone: its thread would keep alive an object that it can reach.
        self._front.compile_grammar = partial(_compile_grammar, self._engine, started.features)
        if processors:
            self._front.processors += logits_processor.load_processors(tuple(processors))
        self._front.takes_functions = True
        self._ids = itertools.count()
        self._enqueued: list[tuple[LocalCall, list[OutputStream]]] = []
        self._asleep = False
        self._loading = threading.Lock()

    @cached_property
    def _adapters(self) -> LoadedAdapters:
        """The loaded adapters, by name."""
        return adapters.LoadedAdapters()

    def shutdown(self) -> None:
        """Stop the engine. Running calls, and later ones, raise EngineError."""
        self._close()

    @property
    def threads(self) -> int:
        return self.report.threads

    @property
    def vocab_size(self) -> int:
        return self._front.info.vocab_size

    @property
    def name(self) -> str:
        return self._front.info.name

    @property
    def max_model_len(self) -> int:
        return self._front.info.max_model_len

    def get_tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of processes that compute: 1."""
        return 1

    def _adapters_of(self, lora_request: Any, count: int) -> list[LoadedAdapter | None]:
        """Find the adapter of each of `count` prompts; new ones are loaded."""
        if lora_request is None:
            return [None] * count
        each = adapters.requests_for(lora_request, count)
        if any(each) and not self.config.lora.enable_lora:
            raise RequestError("lora_request: adapters are off: start with enable_lora=True", "lora_request")
        return [None if one is None else self._adapter_of(one) for one in each]

    def _adapter_of(self, request: LoRARequest) -> LoadedAdapter:
        with self._loading:
            found = self._adapters.find_request(request)
            if found is not None:
                return found
            config = self.config.model
            path = str(download.find_adapter(request.lora_path, config.download_dir, config.hf_token))
            digest = self._load_adapter(path)
            name, number = request.lora_name, request.lora_int_id
            tokens = adapter_files.table_rows(Path(path)) if self.config.lora.spare_tokens else 0
            return self._adapters.add(
                name, request.lora_path, path, digest, number, asked=request, tokens=tokens
            )

    def _load_adapter(self, path: str, pin: bool = False) -> str:
        return str(self._engine.do(LoadAdapter(path, pin)))

    def _new_id(self) -> str:
        return str(next(self._ids))

    def _submit(self, requests: Sequence[Request]) -> LocalCall:
        if self._asleep:
            raise EngineError("the engine sleeps: call wake_up first")
        for request in requests:
            self._observer.begin(request)
        return self._engine.submit(requests)

    def _submit_streams(self, streams: Sequence[OutputStream], news: News | None = None) -> LocalCall:
        if self._asleep:
            raise EngineError("the engine sleeps: call wake_up first")
        for stream in streams:
            stream.times = self._observer.begin(stream.request)
        return self._engine.submit([stream.request for stream in streams], news)

    def _whole(
        self,
        prompts: Sequence[Prompt],
        params: Sampling | None,
        priority: Sequence[int] | None,
        tokenization_kwargs: Kwargs | None,
        lora_request: Any = None,
    ) -> list[OutputStream]:
        """Make the streams of prompts whose results are read at their end."""
        each = self._params_for(params, len(prompts), output_kind=OutputKind.FINAL_ONLY)
        return list(self._streams(prompts, each, priority, tokenization_kwargs, lora_request))

    def _streams(
        self,
        prompts: Sequence[Prompt],
        each: Sequence[SamplingParams],
        priority: Sequence[int] | None,
        tokenization_kwargs: Kwargs | None = None,
        lora_request: Any = None,
    ) -> Iterator[OutputStream]:
        each_adapter = self._adapters_of(lora_request, len(prompts))
        if priority is not None and integers(priority) is None:
            raise refusal("priority", priority, "a list of integers")
        if priority is not None and len(priority) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts need as many priorities, got {len(priority)}", "priority"
            )
        for i, prompt in enumerate(prompts):
            text, tokens = tokens_of(self._front, prompt, tokenization_kwargs)
            request = self._front.request(
                self._new_id(),
                tokens,
                each[i],
                priority=priority[i] if priority else 0,
                salt=salt_of(prompt),
                rendered=rendered_of(prompt),
                clamp=True,
            )
            adapter, info = each_adapter[i], self._front.info
            if adapter is not None or info.spare_tokens:
                request = adapters.with_adapter(request, adapter, info)
            stream = self._front.stream(request, text)
            stream.output.lora_request = None if adapter is None else adapter.asked
            yield stream

    def _params_for(self, params: Sampling | None, count: int, **changes: Any) -> Sequence[SamplingParams]:
        """Make a checked copy for each prompt, with `changes`, so that later changes by the caller do no harm."""
        if params is None:
            params = self._front.default_params()
        if isinstance(params, SamplingParams):
            return [params.clone(**changes)] * count
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise refusal("sampling_params", params, "SamplingParams, or a list of them")
        if len(params) != count:
            raise RequestError(
                f"{count} prompts need as many SamplingParams, got {len(params)}", "sampling_params"
            )
        return [one.clone(**changes) for one in params]

    def _enqueue(self, streams: list[OutputStream]) -> list[str]:
        self._enqueued.append((self._submit_streams(streams), streams))
        return [stream.request.id for stream in streams]

    def _run(self, streams: list[OutputStream], use_tqdm: Tqdm) -> list[RequestOutput]:
        return self._finish(self._submit_streams(streams), streams, use_tqdm)

    def _finish(self, call: LocalCall, streams: list[OutputStream], use_tqdm: Tqdm) -> list[RequestOutput]:
        """Wait until all are finished. If one fails, abort the rest."""
        by_id = {s.request.id: s for s in streams}
        with call, nullcontext(untold) if use_tqdm is False else meter.shown(len(streams), use_tqdm) as told:
            for deltas in call:
                for delta in deltas:
                    stream = by_id[delta.request_id]
                    if push(call, stream, delta) and stream.finished:
                        raise_error(stream)
                        told(1)
        return [s.output for s in streams]

    def _compute(self, requests: Sequence[Request]) -> list[list[float]]:
        """Run pooled requests and return their vectors in order. QuireError if one fails."""
        vectors: dict[str, list[float]] = {}
        texts = chunks.split_long(requests, self._front.longest_input)
        with self._submit([part for parts in texts for part in parts]) as call:
            for deltas in call:
                for delta in deltas:
                    if delta.finish_reason is FinishReason.ERROR:
                        raise named(delta.failure, delta.request_id)
                    if delta.embedding is not None:
                        vectors[delta.request_id] = delta.embedding
        is_embedding = self._front.info.scores is None
        return [chunks.joined(parts, [vectors[part.id] for part in parts], is_embedding) for parts in texts]


def _tokenizer_of(front: Future[Front]) -> Tokenizer:
    found = front.result().tokenizer
    if found is None:
        raise EngineError("this engine has no tokenizer")
    return found


def _compile_grammar(engine: LocalEngine, features: Features, params: StructuredOutputsParams) -> str:
    """Return the text of a constraint that compiles. RequestError gives the reason if there is none."""
    registry.load("grammar")  # on this thread, not on the engine's
    compiler = engine.ask(lambda core: features.join("grammar").compiler)
    return str(compiler.check(params))


def _close(engine: LocalEngine, started: Started) -> None:
    engine.close()
    started.core.end()
    started.features.end()
    started.close()


def push(call: LocalCall, stream: OutputStream, delta: Delta) -> bool:
    """Pass a delta on; end a sample whose text contains a stop string. False if the sample had already ended."""
    pushed = False
    for part in stream.parts(delta):
        chunk = stream.push(part)
        if chunk is None:
            break
        pushed = True
        if chunk.abort:
            call.abort(delta.request_id, delta.index)
    return pushed


def raise_error(stream: OutputStream) -> None:
    if stream.failure is not None:
        raise named(stream.failure, stream.request.id)
