"""Speculative decoding: a drafter that options ask for, or predictions that requests bring."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine.directory import speculative_options
from quire.engine.feature import Joined
from quire.engine.plan import Need, Planning
from quire.errors import ConfigError
from quire.spec_decode.controller import Controller
from quire.spec_decode.make import Drafter, find_drafter, make_proposer, plan_draft
from quire.spec_decode.part import SpeculationPart


class Speculation:
    """Drafts tokens that the target verifies. `drafter` None: only requests that predict their output get drafts."""

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter

    def need(self, planning: Planning) -> Need:
        """Return what the drafter takes on the last stage. ConfigError if it does not fit the target."""
        drafter = self._drafter
        if drafter is None:
            return Need()
        if planning.shard.stages > 1 and drafter.runs_model:
            raise ConfigError(
                "--pipeline-parallel-size: a model that drafts needs all layers of the target; leave out the draft "
                "model, or draft with --spec-method ngram or suffix"
            )
        if not planning.shard.ends:
            return Need(most_draft=drafter.limit(None))
        return plan_draft(drafter, planning)

    def join(self, engine: Joined) -> None:
        """Load the drafter, and add the slot part that reports to it."""
        drafter, proposer, limit, cache = self._drafter, None, 0, None
        if drafter is not None:
            proposer, limit, cache = make_proposer(drafter, engine)
        controller = Controller(drafter is None or drafter.options.adaptive)
        part = SpeculationPart(
            proposer, limit, controller, engine.inputs, lambda *a: engine.count_allowed(*a)
        )
        engine.runner.add_part(part, last=True)
        if cache is not None:
            engine.runner.caches.append(cache)
            engine.memory.keeps_weights = True  # the drafter shares them


def make(config: EngineConfig) -> Speculation:
    """Find the drafter that options ask for. ModelError if there is none at that place."""
    return Speculation(find_drafter(speculative_options(config), config.model.download_dir))
