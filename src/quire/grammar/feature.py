"""Constrained decoding: joins when the first request has a grammar or a thinking budget."""

from __future__ import annotations

from functools import partial

from quire.config import EngineConfig
from quire.engine.directory import load_tokenizer
from quire.engine.feature import Joined
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.gate import GrammarGate
from quire.grammar.part import GrammarPart
from quire.grammar.vocabulary import Vocabulary, vocabulary_of


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
