"""Adapters: an arena that is a gate, and the verbs of its operator."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.devices.adapters import Adapter
from quire.engine.feature import Joined
from quire.engine.plan import Need, Planning
from quire.engine.verbs import LoadAdapter, UnloadAdapter
from quire.errors import ConfigError, EngineError
from quire.lora.arena import AdapterArena
from quire.lora.options import LoraConfig
from quire.lora.reader import adapter_reader, adapters_bytes


class LoraFeature:
    """Loads adapters beside the steps, and lends them to requests."""

    def __init__(self, config: LoraConfig) -> None:
        self._config = config

    def need(self, planning: Planning) -> Need:
        """Return the bytes of all slots on a rank. ConfigError if the model or its division takes no adapters."""
        parallel, shard, spec = planning.config.parallel, planning.shard, planning.model.spec
        for what, given in (
            ("--exact-across-ranks", parallel.exact_across_ranks),
            ("--tensor-parallel-size of such a model", spec.division(shard).gathers),
        ):
            if given:
                raise ConfigError(f"--enable-lora with {what} is not supported: leave out one of them")
        return Need(
            weights=adapters_bytes(planning.share, planning.backend, self._config, self._config.slots)
        )

    def join(self, engine: Joined) -> None:
        """Add the arena."""
        if not self._config.enable_lora:
            raise EngineError("adapters are not enabled: start the engine with --enable-lora")
        held: dict[int, str] = {}  # digests of adapters with a pooling head, by slot

        def place(slot: int, adapter: Adapter | None) -> int:
            engine.adapter_heads.pop(held.pop(slot, ""), None)
            if adapter is not None and adapter.pooling is not None:
                held[slot] = adapter.digest
                engine.adapter_heads[adapter.digest] = adapter.pooling
            return engine.runner.adapt(slot, adapter)

        reader = adapter_reader(lambda: engine.memory.model, engine.plan.backend, self._config)
        arena = AdapterArena(self._config.slots, reader, place)
        engine.inputs.slot_of = arena.slot_of
        engine.memory.after_load.append(arena.reload)
        engine.core.add_gate(arena)
        engine.core.handlers |= {LoadAdapter: arena.load, UnloadAdapter: arena.unload}


def make(config: EngineConfig) -> LoraFeature:
    """Make the feature."""
    return LoraFeature(config.lora)
