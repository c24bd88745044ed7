"""Obeys Sleep and WakeUp: ends or keeps requests, and gives memory back."""

from __future__ import annotations

from typing import Any

from quire.engine.core import EngineCore
from quire.engine.memory_release import PARTS, MemoryRelease
from quire.engine.verbs import Sleep, WakeUp
from quire.errors import EngineError


class Sleeper:
    """Puts a core to sleep and wakes it up."""

    def __init__(self, core: EngineCore, memory: MemoryRelease[Any]) -> None:
        self._core, self._memory = core, memory
        core.handlers |= {Sleep: self.sleep, WakeUp: self.wake_up}

    def sleep(self, verb: Sleep) -> bool:
        """See Sleep. EngineError for another level or mode."""
        core, level, mode = self._core, verb.level, verb.mode
        if level not in (0, 1, 2):
            raise EngineError(f"sleep: level must be 0, 1 or 2, got {level!r}")
        if mode not in ("abort", "wait", "keep"):
            raise EngineError(f"sleep: mode must be abort, wait or keep, got {mode!r}")
        if core.asleep:
            return True
        core.settle(mode)
        if level:
            core.scheduler.preempt_all()
            core.scheduler.reset_prefix_cache()
            self._memory.release(("kv_cache",) if level == 1 else PARTS)
        core.asleep = True
        return True

    def wake_up(self, verb: WakeUp) -> bool:
        """See WakeUp. EngineError for a tag that is no part of the memory."""
        tags = PARTS if verb.tags is None else verb.tags
        self._memory.restore([tag for tag in tags if tag != "scheduling"])
        self._core.asleep = self._core.asleep and not self._memory.complete
        return self._core.asleep
