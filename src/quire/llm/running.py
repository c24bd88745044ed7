"""RunningEngine: an engine of this process, its start and end, and the calls that wait for their requests."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.client.adapters import LoadedAdapter, LoadedAdapters, LoRARequest, requests_for
from quire.client.front import Front
from quire.client.metrics import Metrics
from quire.client.outputs import OutputStream, RequestOutput
from quire.client.start import start_front
from quire.config import EngineConfig
from quire.engine import registry
from quire.engine.feature import Features
from quire.engine.local import LocalCall, LocalEngine, News
from quire.engine.start import Started, begin_start, finish_start
from quire.engine.verbs import (
    LoadAdapter,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    WakeUp,
)
from quire.errors import EngineError, QuireError, RequestError, named
from quire.lazy import Lazy
from quire.llm.observer import PREFIX, LocalObserver
from quire.params import StructuredOutputsParams
from quire.sched import Scheduler
from quire.text.tokenizer import Tokenizer
from quire.types import UNKNOWN_MODEL, Delta, EngineStats, FinishReason, Request
from quire.weights.hub import find_adapter

if TYPE_CHECKING:
    from rich import console, progress

    from quire import logits_processor
    from quire.client import chunks
    from quire.llm import metrics
    from quire.llm.metrics import Metric
    from quire.logits_processor import ProcessorClass
    from quire.weights import adapter as adapter_files
else:
    metrics, logits_processor = Lazy("quire.llm.metrics"), Lazy("quire.logits_processor")
    chunks, adapter_files = Lazy("quire.client.chunks"), Lazy("quire.weights.adapter")
    console, progress = Lazy("rich.console"), Lazy("rich.progress")

Tqdm = bool | Callable[..., Any]


class RunningEngine:
    """Starts an engine and runs requests on it."""

    def _start(self, config: EngineConfig, processors: Sequence[ProcessorClass] = ()) -> None:
        with ThreadPoolExecutor(1) as executor:  # reads the tokenizer while this thread reads the weights
            front = executor.submit(start_front, config, UNKNOWN_MODEL, seed=config.seed)
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
        self._asleep = False
        self._adapters = LoadedAdapters()
        self._loading = threading.Lock()

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

    def stats(self) -> EngineStats:
        """Read the engine's counters and gauges."""
        return self._engine.ask(lambda core: core.stats())

    def watch_steps(self, watch: Callable[[Scheduler], None] | None) -> None:
        """Call `watch` with the scheduler after each step, on the engine's thread; None ends that."""
        scheduler = self._core.scheduler
        self._core.on_step = None if watch is None else lambda *times: watch(scheduler)

    def get_metrics(self) -> list[Metric]:
        """Read counters, gauges and histograms under vLLM's names (vllm:...)."""
        return self._engine.ask(lambda core: metrics.read_metrics(self._observer.counts, core.stats()))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes. Running requests keep theirs, unless they are reset: then they compute them again.

        Returns True: it always succeeds.
        """
        return bool(self._engine.do(ResetPrefixCache(reset_running_requests)))

    def reset_mm_cache(self) -> None:
        """Does nothing: no input but text is cached."""

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: the KV cache at level 1, the weights too at level 2, nothing at level 0.

        Running requests are ended (mode "abort"), finished first ("wait"), or resumed afterwards ("keep").
        """
        self._asleep = True
        try:
            self._engine.do(Sleep(level, mode))
        except BaseException:
            self._asleep = False
            raise

    def release_kv_cache_memory(self) -> None:
        """Sleep at level 1."""
        self.sleep(1)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again; only "weights" or "kv_cache" if `tags` say so. It sleeps until both are there."""
        self._asleep = bool(self._engine.do(WakeUp(None if tags is None else tuple(tags))))

    def is_sleeping(self) -> bool:
        return self._asleep

    def start_profile(
        self, profile_prefix: str | None = None, delay_iterations: int = 0, max_iterations: int = 0
    ) -> None:
        """Trace steps until `stop_profile` (Chrome's format), in the directory of `profiler_config`."""
        self._engine.do(StartProfile(profile_prefix, delay_iterations, max_iterations))

    def stop_profile(self) -> str | None:
        """Write the trace and return its path; None if none was started."""
        path = self._engine.do(StopProfile())
        return None if path is None else str(path)

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refused: there are no worker processes, and the engine runs no foreign code."""
        raise QuireError(
            "collective_rpc is not supported: this engine has no workers; use the methods of LLM"
        )

    def apply_model(self, func: Callable[[Any], Any]) -> Any:
        """Refused: the model is a recorded plan, not a module of torch."""
        raise QuireError("apply_model is not supported: the model is no torch module; use logits_processors")

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter before its first request. True: it was not loaded before. ModelError: it cannot be."""
        (request,) = requests_for(lora_request, 1)
        known = request is not None and self._adapters.find_request(request) is not None
        self._adapters_of(lora_request, 1)
        return not known

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; running requests finish with it. False: no adapter has the number."""
        with self._loading:
            found = self._numbered(lora_id)
            digest = None if found is None else self._adapters.remove(found.name)
            if digest is not None:
                self._engine.do(UnloadAdapter(digest))
        return found is not None

    def list_loras(self) -> set[int]:
        """List the numbers of the loaded adapters."""
        return {one.number for one in self._adapters.all}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory, whatever others are used. False: no adapter has the number."""
        found = self._numbered(lora_id)
        if found is not None:
            self._load_adapter(found.path, pin=True)
        return found is not None

    def _numbered(self, number: int) -> LoadedAdapter | None:
        return next((one for one in self._adapters.all if one.number == number), None)

    def _adapters_of(self, lora_request: Any, count: int) -> list[LoadedAdapter | None]:
        """Find the adapter of each of `count` prompts; new ones are loaded."""
        each = requests_for(lora_request, count)
        if any(each) and not self.config.lora.enable_lora:
            raise RequestError("lora_request: adapters are off: start with enable_lora=True", "lora_request")
        return [None if one is None else self._adapter_of(one) for one in each]

    def _adapter_of(self, request: LoRARequest) -> LoadedAdapter:
        with self._loading:
            found = self._adapters.find_request(request)
            if found is not None:
                return found
            config = self.config.model
            path = str(find_adapter(request.lora_path, config.download_dir, config.hf_token))
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

    def _finish(self, call: LocalCall, streams: list[OutputStream], use_tqdm: Tqdm) -> list[RequestOutput]:
        """Wait until all are finished. If one fails, abort the rest."""
        by_id = {s.request.id: s for s in streams}
        with call, Progress(len(streams), use_tqdm) as shown:
            for deltas in call:
                for delta in deltas:
                    stream = by_id[delta.request_id]
                    if push(call, stream, delta) and stream.finished:
                        raise_error(stream)
                        shown.advance()
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


class Progress:
    """A progress bar on stderr that counts finished requests; a class like tqdm takes its place."""

    def __init__(self, total: int, use_tqdm: Tqdm) -> None:
        self._bar: Any = None
        self._advance: Callable[[], object] = lambda: None
        self._end: Callable[[], object] = lambda: None
        if not isinstance(use_tqdm, bool):
            self._bar = use_tqdm(total=total, desc="Processed prompts")
            self._advance, self._end = (lambda: self._bar.update(1)), self._bar.close
        elif use_tqdm and total > 1:
            columns = progress.Progress.get_default_columns()
            bar = progress.Progress(
                *columns,
                progress.TextColumn("{task.completed}/{task.total}"),
                console=console.Console(stderr=True),
                transient=True,
            )
            task = bar.add_task("generating", total=total)
            bar.start()
            self._advance, self._end = (lambda: bar.advance(task)), bar.stop

    def advance(self) -> None:
        self._advance()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
