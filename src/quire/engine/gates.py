"""Gates: what requests wait for outside the steps. Knows requests; knows no gate by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from quire.types import Request

log = logging.getLogger("quire.engine")

IDLE_WAIT = 0.01
"""Wait at most IDLE_WAIT seconds for a gate when there is nothing to compute."""


class Gate(Protocol):
    """Holds requests until something that they need is there: a grammar, an adapter, a tokenizer."""

    def hold(self, request: Request) -> Future[Any] | None:
        """Return the work that `request` waits for, asked before each step until it is None. An exception ends the
        request.
        """

    def remove(self, request_id: str) -> None:
        """Forget a request that was held. Ignore unknown ids."""


@runtime_checkable
class Keeper(Gate, Protocol):
    """A gate that keeps something for a request until its last sample has ended."""

    def keep(self, request: Request) -> None:
        """Keep it for a continuation of a running request, which need not wait."""

    def release(self, request_id: str, index: int | None = None) -> None:
        """Take note that a sample, or a whole request, has ended. Ignore unknown ids."""


@dataclass(slots=True)
class Held:
    """A request, the place of the gate that holds it, what it waits for, and samples that were aborted meanwhile."""

    request: Request
    place: int = 0
    work: Future[Any] | None = None
    aborted: list[int] = field(default_factory=list)


class Gates:
    """Passes requests through gates, one after the other, and knows which are held.

    A composed request passes the first gate alone: the requests that answer it pass all.
    """

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = gates
        self._held: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    @property
    def ids(self) -> list[str]:
        """Return the ids of held requests."""
        return list(self._held)

    def take(self, request: Request) -> bool:
        """Hold `request` if a gate does, and return whether one does. Raises what a gate raises."""
        held = Held(request)
        if self._pass(held):
            return False
        self._held[request.id] = held
        return True

    def _pass(self, held: Held) -> bool:
        """Let a request pass gate after gate, up to one that holds it; returns whether it passed all."""
        try:
            while held.place < (1 if held.request.is_composed else len(self._gates)):  # a gate may add others
                held.work = self._gates[held.place].hold(held.request)
                if held.work is not None:
                    return False
                held.place += 1
        except Exception:
            self._forget(held)
            raise
        return True

    def _forget(self, held: Held) -> None:
        for gate in self._gates[held.place : held.place + 1]:
            try:
                gate.remove(held.request.id)
            except Exception:
                log.exception("request %s: %s.remove failed", held.request.id, type(gate).__name__)

    def wait(self) -> None:
        """Wait at most IDLE_WAIT seconds until work is done that requests wait for."""
        wait({held.work for held in self._held.values() if held.work is not None}, IDLE_WAIT, FIRST_COMPLETED)

    def ready(self) -> list[tuple[Held, Exception | None]]:
        """Let requests go that have passed all gates, each with an error if it cannot go on."""
        passed: list[tuple[Held, Exception | None]] = []
        for held in list(self._held.values()):
            try:
                if self._pass(held):
                    passed.append((held, None))
            except Exception as error:
                passed.append((held, error))
        for held, _ in passed:
            del self._held[held.request.id]
        return passed

    def abort(self, request_id: str, index: int | None) -> Request | None:
        """Remove and return a held request, unless only one of its samples ends: that is noted."""
        held = self._held[request_id]
        if index is None or held.request.sampling.n == 1:
            return self.remove(request_id)
        held.aborted.append(index)
        return None

    def remove(self, request_id: str) -> Request:
        """Remove and return a held request."""
        held = self._held.pop(request_id)
        self._forget(held)
        return held.request
