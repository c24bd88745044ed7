"""Keeps an engine process ahead: it has imported what engines need, and waits for its model."""

from __future__ import annotations

import asyncio

from quire.client.engine_process import Spawned, spawn

AHEAD = "quire.engine.start"


class Spare:
    """The process that the next engine takes; another follows it, from the first engine on. For one event loop."""

    def __init__(self) -> None:
        self._next: asyncio.Task[Spawned] | None = None

    async def take(self, patient: bool) -> Spawned:
        """Return a process that waits for its launch. `patient` is for ranks, which a server of many models has not."""
        while True:
            taken, self._next = self._next or self._begin(), self._begin()
            spawned = await taken
            if spawned.process.returncode is None:
                return spawned
            await spawned.end()

    async def close(self) -> None:
        """End the process."""
        if self._next is not None:
            await (await self._next).end()

    def _begin(self) -> asyncio.Task[Spawned]:
        return asyncio.create_task(spawn(False, AHEAD))
