"""docs/operations.md names every metric."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.cgroups import MemoryGroup
from quire.client import exposition
from quire.client.metrics import Metrics
from quire.config import CacheConfig

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def test_the_page_lists_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "memory_groups", lambda: [MemoryGroup(100, 80, 0)])
    metrics = Metrics("m", "quire", 1024)
    metrics.name_model("m", CacheConfig(), 1024)
    metrics.stats.limits = (1e9, 1e9)
    families = text_string_to_metric_families(metrics.text()[0].decode())
    made = {f.name.removeprefix("quire:") for f in families if f.name.startswith("quire:")}
    table = PAGE.read_text().partition("## Metrics")[2]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    listed = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row)}
    assert listed == made
