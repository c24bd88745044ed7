"""Constrained decoding: joins when the first request has a grammar or a thinking budget."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from quire.config import EngineConfig
from quire.engine.directory import load_tokenizer
from quire.engine.feature import Joined
from quire.grammar.compiler import Grammar, GrammarCompiler
from quire.grammar.part import GrammarPart
from quire.grammar.vocabulary import Vocabulary, vocabulary_of
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


class GrammarFeature:
    """Compiles grammars beside the steps, and samples by them."""

    compiler: GrammarCompiler

    def join(self, engine: Joined) -> None:
        """Add the slot part and the gate."""
        plan = engine.plan  # `vocabulary` keeps no engine, which would refer to itself
        tokenizer = engine.tokenizer or partial(load_tokenizer, plan.config.model)

        def vocabulary() -> Vocabulary:
            return vocabulary_of(tokenizer(), plan.model.spec.vocab_size, plan.model.eos_token_ids)

        self.compiler = GrammarCompiler(vocabulary)
        jumps = plan.config.grammar.enable_jump_forward
        part = GrammarPart(engine.sampling, plan.model.spec.vocab_size, self.compiler, jumps)
        engine.runner.add_part(part)
        engine.count_allowed = part.count_allowed
        engine.core.add_gate(GrammarGate(self.compiler))


def make(config: EngineConfig) -> GrammarFeature:
    """Make the feature."""
    return GrammarFeature()
