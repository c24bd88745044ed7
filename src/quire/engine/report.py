"""Reports an engine's start: its parts, its memory, and where the time went."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from quire.devices.protocol import Arithmetic, KVSpec
from quire.model.cost import Cost
from quire.runtime.memory import GIB, MemoryPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StartReport:
    """The parts of the engine, and of its start-up time (seconds, in order)."""

    model: str = ""
    backend: str = ""
    threads: int = 1
    dtype: str = ""
    kv_dtype: str = ""
    parameters: int = 0
    cost: Cost = field(default_factory=Cost)
    kv_spec: KVSpec = field(default_factory=lambda: KVSpec(1, 1, 1, "float32"))
    arithmetic: Arithmetic = "fp32"
    memory: MemoryPlan = field(default_factory=lambda: MemoryPlan(0, 0, 0, 0, 0, 1, 0))
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def log(self) -> None:
        memory = self.memory
        logger.info("%s: %d parameters, %s weights, %s KV cache; %s", self.model, self.parameters, self.dtype,
                    self.kv_dtype, self.backend)  # fmt: skip
        logger.info(
            "memory: %.2f GiB weights, %.2f GiB workspace, %.2f GiB KV cache (%d blocks, %d tokens) of %.2f GiB free",
            memory.weights / GIB, memory.workspace / GIB, memory.kv_cache / GIB, memory.num_blocks,
            memory.num_tokens, memory.available / GIB,
        )  # fmt: skip
        if memory.rows is not None:
            logger.info("recurrent states: %s", memory.rows.described())
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        logger.info("started in %.2f s: %s", sum(self.phases.values()), parts)
