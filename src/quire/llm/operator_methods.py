"""The methods of `LLM` for its operator: figures, caches, sleep, traces, adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.client.adapters import requests_for
from quire.engine.verbs import ResetPrefixCache, Sleep, StartProfile, StopProfile, UnloadAdapter, WakeUp
from quire.errors import QuireError
from quire.llm.metrics import Metric, read_metrics
from quire.llm.running import RunningEngine
from quire.sched import Scheduler
from quire.types import EngineStats


class OperatorMethods(RunningEngine):
    """Reads and changes the state of an engine."""

    def stats(self) -> EngineStats:
        """Read the engine's counters and gauges."""
        return self._engine.ask(lambda core: core.stats())

    def watch_steps(self, watch: Callable[[Scheduler], None] | None) -> None:
        """Call `watch` with the scheduler after each step, on the engine's thread; None ends that."""
        scheduler = self._core.scheduler
        self._core.on_step = None if watch is None else lambda *times: watch(scheduler)

    def get_metrics(self) -> list[Metric]:
        """Read counters, gauges and histograms under vLLM's names (vllm:...)."""
        return self._engine.ask(lambda core: read_metrics(self._observer.counts, core.stats()))

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
            found = self._adapters.numbered(lora_id)
            digest = None if found is None else self._adapters.remove(found.name)
            if digest is not None:
                self._engine.do(UnloadAdapter(digest))
        return found is not None

    def list_loras(self) -> set[int]:
        """List the numbers of the loaded adapters."""
        return {one.number for one in self._adapters.all}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory, whatever others are used. False: no adapter has the number."""
        found = self._adapters.numbered(lora_id)
        if found is not None:
            self._load_adapter(found.path, pin=True)
        return found is not None
