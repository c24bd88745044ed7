"""`AsyncLLM`: the engine process of the server, for a program that brings its own event loop and web framework."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quire.client.adapters import LoadedAdapter, LoadedAdapters, requests_for, with_adapter
from quire.client.client import AsyncEngine, ClientOptions
from quire.client.grammar_check import GrammarChecker
from quire.client.maker import load_maker
from quire.client.metrics import Metrics
from quire.client.outputs import OutputStream, RequestOutput
from quire.client.requests import Front
from quire.client.vectors import PoolingOutput, VectorRequestOutput
from quire.config import EngineConfig
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
from quire.llm.options import EngineOptions, as_arguments, engine_config
from quire.llm.pooling import pooled_request, pooling_output
from quire.llm.prompts import Prompt, salt_of, tokens_of
from quire.params import OutputKind, PoolingParams, SamplingParams
from quire.text.tokenizer import Tokenizer
from quire.types import Delta, FinishReason, Request

if TYPE_CHECKING:
    from quire.weights import adapter as adapter_files
    from quire.weights import download
else:
    adapter_files, download = Lazy("quire.weights.adapter"), Lazy("quire.weights.download")

T = TypeVar("T")
MAKER = "quire.client.start"


class AsyncLLM:
    """A model in a process of its own. Any event loop, or several, may await its methods.

    Creating it starts the engine and waits until it is ready; ConfigError and ModelError say why it cannot start.
    Requests of all callers share one batch. A generator that is closed or cancelled (a client that disconnects) aborts
    its request. `shutdown` ends the engine process.
    """

    def __init__(self, vllm_config: EngineConfig, *, maker: str = MAKER, **ignored: Any) -> None:
        """`ignored` are vLLM's other arguments (executor_class, log_stats, ...), which change nothing here."""
        self.config = vllm_config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-async", daemon=True)
        self._thread.start()
        self._numbers = itertools.count()
        self._live: dict[str, str] = {}  # engine's id by the caller's
        self._adapters, self._loading = LoadedAdapters(), asyncio.Lock()
        metrics = Metrics("", "vllm")
        self._engine = self._run(_make_engine(vllm_config, ClientOptions(maker=maker), metrics)).result()
        self._grammars = GrammarChecker(vllm_config, maker)
        self._close = weakref.finalize(self, _close, self._loop, self._thread, self._engine, self._grammars)
        try:
            info = self._run(self._engine.start()).result()
            self._front: Front = load_maker(maker).start_front(vllm_config, info)
            metrics.name_model(info.name, vllm_config.cache, info.max_model_len)
        except BaseException:
            self._close()
            raise

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineOptions,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> AsyncLLM:
        """Start an engine with the options of vLLM's `AsyncEngineArgs`."""
        with as_arguments():
            return cls(engine_args.create_engine_config())

    @classmethod
    def from_options(cls, model: str = "", **options: Any) -> AsyncLLM:
        """Start an engine with the options that `LLM` takes."""
        with as_arguments():
            return cls(engine_config({"model": str(model), **options}))

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig, **ignored: Any) -> AsyncLLM:
        return cls(vllm_config)

    # --- requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        **ignored: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output each time it grows, as `sampling_params.output_kind` says; leaving early aborts the request.

        Raises RequestError for a prompt or parameters that are refused, EngineError if the request fails.
        """
        stream = await self._bridged(
            self._stream(prompt, sampling_params.clone(), tokenization_kwargs, priority, lora_request)
        )
        stream.output.prompt = stream.output.prompt or prompt_text
        stream.output.request_id = request_id
        kind = stream.request.sampling.output_kind
        async for deltas in self._deltas(stream.request, request_id):
            for delta in deltas:
                self._push(stream, delta)
            if stream.failure is not None:
                raise named(stream.failure, request_id)
            if stream.finished or kind is not OutputKind.FINAL_ONLY:
                yield stream.new_part() if kind is OutputKind.DELTA else stream.snapshot()
            if stream.finished:
                return

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncIterator[VectorRequestOutput[PoolingOutput]]:
        """Yield the vector of one text."""
        adapter = await self._bridged(self._adapter(lora_request))
        _, tokens = tokens_of(self._front, prompt, tokenization_kwargs)
        request = pooled_request(self._front, self._new_id(request_id), tokens, pooling_params)
        request = with_adapter(request, adapter, self._front.info)
        async for deltas in self._deltas(request, request_id):
            for delta in deltas:
                if delta.finish_reason is FinishReason.ERROR:
                    raise named(delta.failure, request_id)
                if delta.embedding is not None:
                    output = pooling_output(request, delta.embedding)
                    yield VectorRequestOutput(request_id, output, tokens, delta.usage.num_cached)

    async def abort(self, request_id: str | Sequence[str], internal: bool = False) -> None:
        """End requests; their generators yield what there is and finish with the reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            inner = self._live.get(name)
            if inner is not None:
                await self._bridged(_abort(self._engine, inner))

    async def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        kwargs: Mapping[str, Any] | None,
        priority: int,
        lora_request: Any,
    ) -> OutputStream:
        """Make the request of a prompt and check its grammar; runs on the engine's loop."""
        front = self._front
        adapter = await self._adapter(lora_request)
        text, tokens = await asyncio.to_thread(tokens_of, front, prompt, kwargs)
        request = front.request(
            self._new_id(""), tokens, params, priority=priority, salt=salt_of(prompt), clamp=True
        )
        constraint = params.structured_outputs
        if constraint is not None and not request.choices:
            grammar = await self._grammars.check(constraint, front.info)
            request = msgspec.structs.replace(request, grammar=grammar)
        stream = front.stream(with_adapter(request, adapter, front.info), text)
        stream.output.lora_request = lora_request
        return stream

    async def _adapter(self, lora_request: Any) -> LoadedAdapter | None:
        """Find the adapter of a request, loaded if it is new; runs on the engine's loop."""
        (asked,) = requests_for(lora_request, 1)
        if asked is None:
            return None
        config = self.config
        if not config.lora.enable_lora:
            raise RequestError("lora_request: adapters are off: start with enable_lora=True", "lora_request")
        async with self._loading:
            found = self._adapters.find_request(asked)
            if found is None:
                model = config.model
                path = await asyncio.to_thread(
                    download.find_adapter, asked.lora_path, model.download_dir, model.hf_token
                )
                digest = str(await self._engine.do(LoadAdapter(str(path))))
                number = asked.lora_int_id
                tokens = (
                    await asyncio.to_thread(adapter_files.table_rows, path) if config.lora.spare_tokens else 0
                )
                name, given = asked.lora_name, asked.lora_path
                found = self._adapters.add(name, given, str(path), digest, number, tokens=tokens)
        return found

    async def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter before its first request. EngineError: it cannot be loaded."""
        await self._bridged(self._adapter(lora_request))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; running requests finish with it. False: no adapter has the number."""
        found = self._adapters.numbered(lora_id)
        digest = None if found is None else self._adapters.remove(found.name)
        if digest is not None:
            await self._bridged(self._engine.do(UnloadAdapter(digest)))
        return found is not None

    async def list_loras(self) -> set[int]:
        """List the numbers of the loaded adapters."""
        return {one.number for one in self._adapters.all}

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory, whatever others are used. False: no adapter has the number."""
        found = self._adapters.numbered(lora_id)
        if found is not None:
            await self._bridged(self._engine.do(LoadAdapter(found.path, pin=True)))
        return found is not None

    def _new_id(self, name: str) -> str:
        return f"{name}-{next(self._numbers)}"

    async def _deltas(self, request: Request, name: str) -> AsyncIterator[list[Delta]]:
        """Yield the deltas of a request, on the caller's loop."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[list[Delta] | BaseException]()

        async def pump() -> None:
            news: list[Delta] | BaseException
            try:
                with self._engine.submit([request]) as generation:
                    while news := await generation.take():
                        loop.call_soon_threadsafe(queue.put_nowait, news)
                news = []
            except QuireError as error:
                news = error
            loop.call_soon_threadsafe(queue.put_nowait, news)

        self._live[name] = request.id
        running = self._run(pump())
        try:
            while news := await queue.get():
                if isinstance(news, BaseException):
                    raise news
                yield news
        finally:
            self._live.pop(name, None)
            running.cancel()

    def _push(self, stream: OutputStream, delta: Delta) -> None:
        for part in stream.parts(delta):
            chunk = stream.push(part)
            if chunk is None:
                return
            if chunk.abort:
                self._loop.call_soon_threadsafe(
                    self._engine.end_sample, delta.request_id, delta.index, FinishReason.STOP
                )

    # --- the engine

    async def get_tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    async def get_supported_tasks(self) -> tuple[str, ...]:
        info = self._front.info
        made = ("classify", "score") if info.scores is not None else ("embed",)
        return (("generate",) if info.generates else ()) + made

    def get_num_unfinished_requests(self) -> int:
        return self._engine.num_live

    @property
    def is_running(self) -> bool:
        return self._engine.state == "ready"

    @property
    def is_stopped(self) -> bool:
        return self._engine.state == "stopped"

    @property
    def errored(self) -> bool:
        return self._engine.state in ("restarting", "stopped")

    @property
    def dead_error(self) -> EngineError:
        return EngineError(f"the engine is {self._engine.state}")

    async def check_health(self) -> None:
        """Raise EngineError unless the engine makes progress or answers."""
        if not self._engine.healthy:
            raise self.dead_error

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Does nothing: `metrics_text` has all figures."""

    async def metrics_text(self) -> bytes:
        """Write all metrics in Prometheus' text format."""
        await self._bridged(self._engine.stats())
        return self._engine.metrics.text()[0]

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return bool(await self._bridged(self._engine.do(ResetPrefixCache(reset_running_requests))))

    async def reset_mm_cache(self) -> None:
        """Does nothing: no input but text is cached."""

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back, as `LLM.sleep` does. New requests are refused until `wake_up`."""
        await self._bridged(self._engine.do(Sleep(level, mode)))

    async def release_kv_cache_memory(self) -> None:
        await self.sleep(1)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._bridged(self._engine.do(WakeUp(None if tags is None else tuple(tags))))

    async def is_sleeping(self) -> bool:
        return self._engine.sleeping

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Compute nothing until `resume_generation`; nothing is given back."""
        await self.sleep(0, mode)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        await self.wake_up()

    async def is_paused(self) -> bool:
        return self._engine.sleeping

    async def start_profile(
        self, profile_prefix: str | None = None, delay_iterations: int = 0, max_iterations: int = 0
    ) -> None:
        verb = StartProfile(profile_prefix, delay_iterations, max_iterations)
        await self._bridged(self._engine.do(verb))

    async def stop_profile(self) -> str | None:
        """Write the trace of steps and return its path."""
        path = await self._bridged(self._engine.do(StopProfile()))
        return None if path is None else str(path)

    def shutdown(self, timeout: float | None = None) -> None:
        """Abort what runs and end the engine process."""
        self._close()

    def _run(self, job: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(job, self._loop)

    async def _bridged(self, job: Coroutine[Any, Any, T]) -> T:
        """Await `job`, which runs on the engine's loop, from the caller's."""
        return await asyncio.wrap_future(self._run(job))


async def _make_engine(config: EngineConfig, options: ClientOptions, metrics: Metrics) -> AsyncEngine:
    return AsyncEngine(config, options, metrics)


async def _abort(engine: AsyncEngine, request_id: str) -> None:
    engine.abort_visibly(request_id)


def _close(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, engine: AsyncEngine, grammars: GrammarChecker
) -> None:
    """End the engine process and the loop's thread."""

    async def stop() -> None:
        await grammars.close()
        await engine.stop()

    asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
