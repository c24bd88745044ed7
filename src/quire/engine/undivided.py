"""A model on one rank, as the engine's start makes it; `quire.ranks.division` is the same for several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from quire.devices.protocol import Executable, KVCache, Peers
from quire.engine.memory_release import MemoryRelease
from quire.engine.plan import EnginePlan, tapped
from quire.model.loaded import ServedModel
from quire.progress import Told, untold

if TYPE_CHECKING:
    from quire.runtime.runner import Earlier, Runner


class Undivided:
    """Loads and compiles a planned model, with no other ranks."""

    peers: Peers | None = None  # the ranks of the engine's own stage
    earlier: Earlier | None = None  # stages that begin a step before the engine does
    intact: Callable[[], None] | None = None  # raises an error if a rank has ended

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan

    def load(self, told: Told = untold) -> ServedModel:
        """Read the engine's share of the weights: see `ModelFiles.load`."""
        shard = replace(self.plan.shard, peers=self.peers)
        return self.plan.files.load(self.plan.backend, shard, told=told)

    def load_checked(self) -> ServedModel:
        """Read the weights anew for an engine that gave them back."""
        model = self.load()
        model.wait()
        return model

    def kv_cache(self) -> KVCache:
        """Make room for all sequences."""
        return self.plan.kv_cache()

    def executable(self, model: ServedModel, kv: Any) -> Executable:
        """Compile the model for the largest step; `kv` is of `kv_cache`."""
        plan = self.plan
        return plan.backend.compile(tapped(model, plan.need.taps), kv, plan.limits)

    def memory_release(self, runner: Runner, model: ServedModel) -> MemoryRelease[ServedModel]:
        """Make what gives memory back while the engine sleeps."""
        return MemoryRelease(runner, model, *self.makers)

    @property
    def makers(self) -> tuple[Any, ...]:
        """Return the functions by which MemoryRelease makes parts anew."""
        return self.load_checked, self.kv_cache, self.executable, self.plan.backend.free_memory

    def wait_ready(self) -> None:
        """Wait until all ranks have loaded."""

    def close(self) -> None:
        """End the other ranks."""
