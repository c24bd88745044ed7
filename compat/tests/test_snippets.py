"""The snippets of the articles run as they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from snippets import PROMISES, SNIPPETS, Snippet, all_snippets, port_is_taken, run_one

from conftest import Installed, shared

FOUND = all_snippets() if (SNIPPETS / "snippets.json").exists() else []
RUNNABLE = [snippet for snippet in FOUND if snippet.runs]
pytestmark = pytest.mark.skipif(not FOUND, reason=f"the articles are not at {SNIPPETS}")


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the local models are made; processes that run the tests share it."""
    root = shared(tmp_path_factory) / "zoo"
    root.mkdir(exist_ok=True)
    return root


@pytest.mark.parametrize("snippet", RUNNABLE, ids=lambda snippet: snippet.file)
def test_a_snippet_runs(
    snippet: Snippet, installed: Installed, zoo: Path, record_property: Callable[[str, object], None]
) -> None:
    if port_is_taken():
        pytest.skip("port 8000, which the articles name, is in use")
    result = run_one(snippet.file, zoo, installed.variables)
    record_property("snippet", result)
    assert result["ran"], result["output"]


def test_every_snippet_runs_or_has_its_promise_tested() -> None:
    left = {snippet.file for snippet in FOUND if not snippet.runs}
    assert left == set(PROMISES)
    assert len([snippet for snippet in RUNNABLE if snippet.about["runs_here"]]) == 34
