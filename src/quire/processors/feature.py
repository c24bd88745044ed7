"""Rows of logits that Python reads or changes: joins when options or a request ask for it."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine.feature import Joined
from quire.engine.plan import Need, Planning
from quire.logits_processor import load_processors
from quire.processors.part import ProcessorPart


class ProcessorFeature:
    """Runs logits processors, and reports log-probabilities that a sampler does not give."""

    def need(self, planning: Planning) -> Need:
        """Return nothing: rows are copied one step at a time."""
        return Need()

    def join(self, engine: Joined) -> None:
        """Add the slot part. ConfigError if a class cannot be imported or is none of logits processors."""
        model = engine.config.model
        classes = load_processors((*model.logits_processors, *engine.processors))
        part = ProcessorPart(engine.sampler, classes, model.logprobs_mode, engine.config)
        engine.sampling.processors = part
        engine.runner.add_part(part, last=True)  # it follows the tokens that other parts sample


def make(config: EngineConfig) -> ProcessorFeature:
    """Make the feature."""
    return ProcessorFeature()
