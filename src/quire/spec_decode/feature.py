"""Speculative decoding: a drafter that options ask for, or predictions that requests bring."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine.directory import speculative_options
from quire.engine.feature import Joined
from quire.engine.plan import Need, Planning
from quire.errors import ConfigError
from quire.spec_decode.make import Drafter, find_drafter, make_drafting, plan_draft
from quire.spec_decode.part import SpeculationPart


class Speculation:
    """Drafts tokens that the target verifies. `drafter` None: only requests that predict their output get drafts."""

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter

    def need(self, planning: Planning) -> Need:
        """Return what the drafter takes on the last stage. ConfigError if it does not fit the target."""
        drafter = self._drafter
        if drafter is None or not planning.shard.ends:
            return Need()
        if planning.shard.stages > 1 and drafter.runs_model:
            raise ConfigError(
                "--pipeline-parallel-size: a model that drafts needs all layers of the target; leave out the draft "
                "model, or draft with --spec-method ngram or suffix"
            )
        return plan_draft(drafter, planning)

    def join(self, engine: Joined) -> None:
        """Load the drafter, and add the slot part that reports to it."""
        drafting = make_drafting(self._drafter, engine)
        part = SpeculationPart(
            *(drafting.proposer, drafting.limit, drafting.controller, engine.inputs),
            lambda slot, draft: engine.count_allowed(slot, draft),
        )
        engine.runner.add_part(part, last=True)
        if drafting.cache is not None:
            engine.runner.caches.append(drafting.cache)
            engine.memory.keeps_weights = True  # the drafter shares them


def make(config: EngineConfig) -> Speculation:
    """Find the drafter that options ask for. ModelError if there is none at that place."""
    return Speculation(find_drafter(speculative_options(config), config.model.download_dir))
