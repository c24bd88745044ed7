"""A model divided among ranks, as the engine's start makes it: each part with the other ranks' parts."""

from __future__ import annotations

from quire.devices.protocol import Executable
from quire.engine.identity import agreement
from quire.engine.plan import EnginePlan, device_of
from quire.engine.undivided import Undivided
from quire.model.loaded import ServedModel
from quire.ranks.control import Ranks
from quire.ranks.executable import EarlierStages, RankedExecutable, RankedKVCache, RankedMemoryRelease
from quire.ranks.numa import bind_rank
from quire.runtime.runner import Runner


class Division(Undivided):
    """The other ranks, and the engine's own parts that command them."""

    def __init__(self, plan: EnginePlan) -> None:
        """Start the other ranks, which load while the engine does. ConfigError if the model cannot be divided."""
        super().__init__(plan)
        config, spec, memory = plan.config, plan.model.spec, plan.memory
        agreed = agreement(config, plan.model, plan.backend.fingerprint)
        self._ranks = ranks = Ranks(config, spec.stream_width, plan.limits, agreed)
        launches = plan.backend.choices.launches
        several = config.parallel.pipeline_parallel_size > 1
        stages = EarlierStages(ranks, memory.block_size) if several else None
        # A device launches all at once, so other stages need not begin before it.
        self._ahead: EarlierStages | None = stages if launches else None
        self.earlier = None if launches else stages
        table = (plan.limits.max_seqs, memory.max_blocks) if launches else (0, 0)
        ranks.start(plan.limits, memory.cache_sizes, plan.need.taps, table)
        # After their start: they would inherit it.
        bind_rank(device_of(config, 0), 0, config.parallel.ranks_per_node)
        self.peers, self.intact = ranks.connection, ranks.check

    def wait_ready(self) -> None:
        self._ranks.wait_ready()

    def close(self) -> None:
        self._ranks.close()

    def kv_cache(self) -> RankedKVCache:
        return RankedKVCache(super().kv_cache(), self._ranks, self._ahead)

    def executable(self, model: ServedModel, kv: RankedKVCache) -> Executable:
        own, size = super().executable(model, kv.own), self.plan.memory.block_size
        return RankedExecutable(own, self._ranks, size, self._ahead)

    def memory_release(self, runner: Runner, model: ServedModel) -> RankedMemoryRelease[ServedModel]:
        return RankedMemoryRelease(self._ranks, runner, model, *self.makers)
