"""The runs under bench/results/ are well formed, and the page shows what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"
RUNS = sorted((BENCH / "results").glob("*.json"))


def test_tables_and_plots_are_those_of_the_runs() -> None:
    result = subprocess.run(
        [sys.executable, str(BENCH / "report.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.stem)
def test_a_run_says_where_when_and_how(path: Path) -> None:
    run = json.loads(path.read_text())
    assert run["machine"].keys() >= {"name", "cpu", "instructions", "memory_gb", "limits"}
    assert run["date"].startswith("20")
    assert run["threads"] > 0
    assert run["commands"]
    for row in run["rows"]:
        assert row.keys() >= {"model", "task", "weights", "unit"}
        assert row["engines"]
        for value in row["engines"].values():
            assert value.get("low", 0) <= value["median"] <= value.get("high", value["median"])
