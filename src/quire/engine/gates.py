"""Gates: what requests wait for outside the steps. Knows requests; knows no gate by name."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from quire.errors import message_of
from quire.types import Request

IDLE_WAIT = 0.01
"""Wait at most IDLE_WAIT seconds for a gate when there is nothing to compute."""


class Gate(Protocol):
    """Holds requests until something that they need is there: a grammar, an adapter, a tokenizer."""

    @property
    def jobs(self) -> Sequence[Future[Any]]:
        """Return the work that held requests wait for."""

    def take(self, request: Request) -> bool:
        """Hold `request` if it must wait, and return whether it must. An exception ends the request."""

    def ready(self) -> list[tuple[Request, str | None]]:
        """Let requests go whose wait is over, each with an error if it cannot go on."""

    def remove(self, request_id: str) -> None:
        """Forget a held request."""


@runtime_checkable
class Keeper(Gate, Protocol):
    """A gate that keeps something for a request until its last sample has ended."""

    def keep(self, request: Request) -> None:
        """Keep it for a continuation of a running request, which need not wait."""

    def release(self, request_id: str, index: int | None = None) -> None:
        """Take note that a sample, or a whole request, has ended. Ignore unknown ids."""


@dataclass(slots=True)
class Held:
    """A request, the place of the gate that holds it, and samples that were aborted meanwhile."""

    request: Request
    place: int
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
        return self._take(Held(request, 0))

    def _take(self, held: Held) -> bool:
        last = 1 if held.request.is_composed else len(self._gates)
        for place in range(held.place, last):
            if self._gates[place].take(held.request):
                held.place = place
                self._held[held.request.id] = held
                return True
        return False

    def wait(self) -> None:
        """Wait at most IDLE_WAIT seconds until work is done that requests wait for."""
        jobs = [job for gate in self._gates for job in gate.jobs]
        if jobs:
            wait(jobs, IDLE_WAIT, FIRST_COMPLETED)

    def ready(self) -> list[tuple[Held, str | None]]:
        """Let requests go that have passed all gates, each with an error if it cannot go on."""
        passed: list[tuple[Held, str | None]] = []
        for place, gate in enumerate(self._gates):
            if not any(held.place == place for held in self._held.values()):
                continue
            for request, error in gate.ready():
                held = self._held.pop(request.id)
                held.place += 1
                try:
                    if error is None and self._take(held):
                        continue
                except Exception as failure:
                    error = message_of(failure)
                passed.append((held, error))
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
        self._gates[held.place].remove(request_id)
        return held.request


def error_of(job: Future[Any]) -> str | None:
    """Return the message of the error of finished work; None if it succeeded."""
    error = job.exception()
    return None if error is None else message_of(error)
