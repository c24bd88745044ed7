"""Holds requests until their grammar is compiled. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from quire.errors import QuireError
from quire.grammar.compiler import Grammar, GrammarCompiler
from quire.types import Request


class CompilingRequests:
    """Takes requests whose grammar is not compiled yet, and returns them once it is."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._jobs: dict[str, tuple[Request, Future[Grammar]]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    @property
    def ids(self) -> list[str]:
        return list(self._jobs)

    def take(self, request: Request) -> bool:
        """Begin to compile the grammar of `request`. False: there is nothing to compile."""
        if (
            request.grammar is None
            or self._compiler is None
            or self._compiler.find(request.grammar) is not None
        ):
            return False
        self._jobs[request.id] = (request, self._compiler.submit(request.grammar))
        return True

    def remove(self, request_id: str) -> tuple[Request, Callable[[], str | None]]:
        """Return a request early. The function waits for its grammar and returns the error, if any."""
        request, job = self._jobs.pop(request_id)
        return request, lambda: _error(job)

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for another grammar."""
        if seconds and self._jobs:
            wait([job for _, job in self._jobs.values()], seconds, FIRST_COMPLETED)

    def take_compiled(self) -> list[tuple[Request, str | None]]:
        """Requests whose grammar is compiled, or failed to compile: with the error."""
        done = [request_id for request_id, (_, job) in self._jobs.items() if job.done()]
        return [(request, _error(job)) for request, job in map(self._jobs.pop, done)]


def _error(job: Future[Grammar]) -> str | None:
    error = job.exception()
    if error is None:
        return None
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
