"""Vectors of texts: joins when the first request asks for one."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine.feature import Joined
from quire.pooling.part import PoolingPart


class PoolingFeature:
    """Pools hidden states into vectors."""

    def join(self, engine: Joined) -> None:
        """Add the slot part."""
        engine.runner.add_part(PoolingPart(engine.plan.model.pooling, engine.adapter_heads))


def make(config: EngineConfig) -> PoolingFeature:
    """Make the feature."""
    return PoolingFeature()
