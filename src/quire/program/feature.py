"""Composed requests: joins when the first beam search, choice or program comes."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine.feature import Joined
from quire.program.host import Programs
from quire.program.texts import Texts


class ProgramFeature:
    """Answers a request by several others."""

    def join(self, engine: Joined) -> None:
        """Become the core's host."""
        caching = engine.config.cache.enable_prefix_caching
        texts = Texts(engine.tokenizer, engine.plan.memory.max_model_len, caching)
        engine.core.host = Programs(engine.core, texts, lambda: engine.features.join("grammar").compiler)


def make(config: EngineConfig) -> ProgramFeature:
    """Make the feature."""
    return ProgramFeature()
