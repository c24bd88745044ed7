"""Features by name, and what asks for each. A feature's modules are imported when an option or a request does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from quire.config import EngineConfig
from quire.engine.directory import speculative_options
from quire.types import Request

if TYPE_CHECKING:
    from quire.engine.feature import Feature


@dataclass(frozen=True, slots=True)
class Triggers:
    """Tells which configurations and which requests ask for a feature."""

    by_options: Callable[[EngineConfig], bool] = lambda config: False
    by_request: Callable[[Request], bool] = lambda request: False


FEATURES = {
    "lora": Triggers(lambda config: config.lora.enable_lora, lambda request: request.adapter is not None),
    "grammar": Triggers(
        by_request=lambda request: request.constrained or any(gen.constrained for gen in request.gens)
    ),
    "pooling": Triggers(by_request=lambda request: request.pooling is not None),
    "spec_decode": Triggers(
        lambda config: speculative_options(config) is not None, lambda request: bool(request.prediction)
    ),
    "processors": Triggers(
        lambda config: bool(config.model.logits_processors) or config.model.logprobs_mode != "raw_logprobs",
        lambda request: (
            request.sampling.logits_processors is not None or request.sampling.logprob_token_ids is not None
        ),
    ),
    "program": Triggers(by_request=lambda request: request.is_composed),
}
"""Features in the order in which they join an engine. `quire/NAME/feature.py` has `make(config)`."""


class FeatureModule(Protocol):
    """The module `feature` of a feature's folder."""

    def make(self, config: EngineConfig) -> Feature:
        """Make the feature for a configuration."""


def load(name: str) -> FeatureModule:
    """Import the module of a feature."""
    return cast("FeatureModule", importlib.import_module(f"quire.{name}.feature"))


def of_ranks(name: str) -> Any:
    """Import a module of `quire.ranks`, which only some engines need."""
    return importlib.import_module(f"quire.ranks.{name}")
