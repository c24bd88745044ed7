"""The sockets of features: an engine that is planned, and one that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quire.config import EngineConfig
from quire.devices.sampling import Sampler
from quire.engine import registry
from quire.engine.core import EngineCore
from quire.engine.memory_release import MemoryRelease
from quire.engine.plan import EnginePlan, Planned
from quire.model.loaded import ServedModel
from quire.runtime.inputs import InputBuilder
from quire.runtime.runner import Runner
from quire.runtime.slots.sampling import SamplingPart
from quire.types import Request

if TYPE_CHECKING:
    from quire.model.pooling_head import PoolingHead
    from quire.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Joined:
    """A running engine, as features join it: slot parts, gates, verbs, and what features share.

    `tokenizer` loads the model's tokenizer. `processors` are classes of logits processors beside the
    configured ones. `count_allowed` says how much of a slot's draft a grammar allows;
    `adapter_heads` has the pooling heads of adapters that bring one, by digest.
    """

    plan: EnginePlan
    model: ServedModel
    sampler: Sampler
    sampling: SamplingPart
    inputs: InputBuilder
    runner: Runner
    memory: MemoryRelease[Any]
    core: EngineCore
    features: Features
    tokenizer: Callable[[], Tokenizer] | None
    processors: tuple[type, ...] = ()
    count_allowed: Callable[[int, list[int]], int] = lambda slot, draft: len(draft)
    adapter_heads: dict[str, PoolingHead] = field(default_factory=dict)

    @property
    def config(self) -> EngineConfig:
        """Return the configuration as it was planned."""
        return self.plan.config


class Feature(Protocol):
    """A folder that plugs into an engine. With an option that asks for it, it is also `Planned`."""

    def join(self, engine: Joined) -> None:
        """Add slot parts, gates, verbs or a host. EngineError if the options of the feature are off."""


class Features:
    """Makes features when something asks for them, and joins each to the engine once. Not for several threads.

    It is the first gate: a request waits while the modules of a feature that it asks for are imported beside the
    steps.
    """

    def __init__(self, config: EngineConfig, planned: Mapping[str, Planned]) -> None:
        self._config, self._planned = config, planned
        self._joined: dict[str, Feature] = {}
        self._engine: Joined | None = None
        self._held: dict[str, Future[list[str]]] = {}  # with the names of the features

    def begin(self, engine: Joined) -> None:
        """Become the engine's first gate, and join the planned features."""
        self._engine = engine
        engine.core.add_gate(self)
        for name in self._planned:
            self.join(name)

    def end(self) -> None:
        """Let the engine go."""
        self._engine = None
        self._joined.clear()

    def join(self, name: str) -> Any:
        """Join a feature, unless it has joined, and return it: a `Feature`, with what it offers to others."""
        assert self._engine is not None
        if name not in self._joined:
            feature = self._planned.get(name) or registry.load(name).make(self._config)
            feature.join(self._engine)
            self._joined[name] = feature
        return self._joined[name]

    def hold(self, request: Request) -> Future[list[str]] | None:
        """Hold a request while features that it asks for are imported, then join them. EngineError if one is off."""
        work = self._held.get(request.id)
        if work is None:
            features = registry.FEATURES.items()
            names = [
                name for name, entry in features if name not in self._joined and entry.by_request(request)
            ]
            if not names:
                return None
            thread = ThreadPoolExecutor(1, "quire-import")
            work = self._held[request.id] = thread.submit(_load, names)
            thread.shutdown(wait=False)
        if not work.done():
            return work
        del self._held[request.id]
        for name in work.result():
            self.join(name)
        return None

    def remove(self, request_id: str) -> None:
        """Forget a held request."""
        self._held.pop(request_id, None)


def _load(names: list[str]) -> list[str]:
    for name in names:
        registry.load(name)
    return names
