"""The gate of grammars: holds requests until their grammar is compiled. Knows no scheduler."""

from __future__ import annotations

from concurrent.futures import Future

from quire.grammar.compiler import Grammar, GrammarCompiler
from quire.types import Request


class GrammarGate:
    """Compiles the grammars of requests beside the steps."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._jobs: dict[str, Future[Grammar]] = {}

    def hold(self, request: Request) -> Future[Grammar] | None:
        """Return the compilation of the grammar of `request`, unless it has none or that is compiled."""
        job = self._jobs.get(request.id)
        if job is None:
            if request.grammar is None or self._compiler.find(request.grammar) is not None:
                return None
            job = self._jobs[request.id] = self._compiler.submit(request.grammar, request.owner)
        if not job.done():
            return job
        del self._jobs[request.id]
        job.result()
        return None

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self._jobs.pop(request_id, None)
