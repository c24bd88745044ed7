"""A model divided among ranks, as the engine's start sees it: `plan`'s parts, each with the other ranks' parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from quire.devices.protocol import Executable, KVCache, Peers
from quire.engine.identity import agreement
from quire.engine.plan import EnginePlan, device_of
from quire.model.loaded import ServedModel
from quire.ranks.control import Ranks
from quire.ranks.executable import EarlierStages, RankedExecutable, RankedKVCache, RankedMemoryRelease
from quire.ranks.numa import bind_rank
from quire.runtime.runner import Runner

M = TypeVar("M")


class Division:
    """The other ranks, and the engine's own parts that command them."""

    def __init__(self, plan: EnginePlan) -> None:
        """Start the other ranks, which load while the engine does. ConfigError if the model cannot be divided."""
        config, spec, memory = plan.config, plan.model.spec, plan.memory
        agreed = agreement(config, plan.model, plan.backend.fingerprint)
        self._plan, self._size = plan, memory.block_size
        self._ranks = ranks = Ranks(config, spec.stream_width, plan.limits, agreed)
        self._launches = plan.backend.choices.launches
        several = config.parallel.pipeline_parallel_size > 1
        self._stages = EarlierStages(ranks, self._size) if several else None
        self._ahead = self._stages if self._launches else None
        table = (
            (plan.limits.max_seqs, -(-memory.max_model_len // memory.block_size))
            if self._launches
            else (0, 0)
        )
        ranks.start(plan.limits, memory.cache_sizes, plan.need.taps, table)
        bind_rank(
            device_of(config, 0), 0, config.parallel.ranks_per_node
        )  # after their start: they would inherit it
        self.wait_ready, self.close, self.check = ranks.wait_ready, ranks.close, ranks.check

    @property
    def peers(self) -> Peers | None:
        """Return the connection to the ranks of the engine's own stage."""
        return self._ranks.connection

    @property
    def earlier(self) -> EarlierStages | None:
        """Return the stages before the engine's, if they need to begin before it; a device launches all at once."""
        return None if self._launches else self._stages

    def kv_cache(self) -> RankedKVCache:
        """Make a KV cache whose blocks all ranks of the stage copy."""
        return RankedKVCache(self._plan.kv_cache(), self._ranks, self._ahead)

    def executable(self, model: ServedModel, kv: RankedKVCache) -> Executable:
        """Compile an executable that the other ranks of the stage run too."""
        return RankedExecutable(self._plan.executable(model, kv.own), self._ranks, self._size, self._ahead)

    def memory_release(
        self,
        runner: Runner,
        model: M,
        load: Callable[[], M],
        make_cache: Callable[[], KVCache],
        compile: Callable[[M, Any], Executable],
        free_memory: Callable[[], int],
    ) -> RankedMemoryRelease[M]:
        """Make what gives back the memory of all ranks."""
        return RankedMemoryRelease(self._ranks, runner, model, load, make_cache, compile, free_memory)
