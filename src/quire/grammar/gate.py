"""The gate of grammars: holds requests until their grammar is compiled. Knows no scheduler."""

from __future__ import annotations

from concurrent.futures import Future

from quire.engine.gates import error_of
from quire.grammar.compiler import Grammar, GrammarCompiler
from quire.types import Request


class GrammarGate:
    """Compiles the grammars of requests beside the steps."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._held: dict[str, tuple[Request, Future[Grammar]]] = {}

    @property
    def jobs(self) -> list[Future[Grammar]]:
        """Return the compilations that held requests wait for."""
        return [job for _, job in self._held.values()]

    def take(self, request: Request) -> bool:
        """Begin to compile the grammar of `request`, unless it has none or that is compiled."""
        if request.grammar is None or self._compiler.find(request.grammar) is not None:
            return False
        self._held[request.id] = request, self._compiler.submit(request.grammar)
        return True

    def ready(self) -> list[tuple[Request, str | None]]:
        """Let requests go whose grammar is compiled, or failed to compile: with the error."""
        done = [request_id for request_id, (_, job) in self._held.items() if job.done()]
        return [(request, error_of(job)) for request, job in map(self._held.pop, done)]

    def remove(self, request_id: str) -> None:
        """Forget a held request."""
        del self._held[request_id]
