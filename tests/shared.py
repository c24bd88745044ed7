"""The data beside the checkout: published checkpoints, traces, tokenizers, recorded tool streams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).parents[2] / "shared"
DATA = SHARED / "data"
REFERENCE = SHARED / "reference"


def reason(path: Path) -> str:
    """Why a test is skipped that needs `path`. Names its folder, of which the report counts the tests."""
    folder = "/".join(path.relative_to(SHARED).parts[:2])
    return f"needs ../shared/{folder} beside the checkout"


def require(path: Path) -> Path:
    """Return a path in `SHARED`; skip the test if it is absent."""
    if not path.exists():
        pytest.skip(reason(path))
    return path


def needs(path: Path) -> pytest.MarkDecorator:
    """Skip the decorated test if `path` is absent."""
    return pytest.mark.skipif(not path.exists(), reason=reason(path))


def cases_of(path: Path, cases: Sequence[Any]) -> Sequence[Any]:
    """Parameters of a test that were read from `path`; one that is skipped if it is absent."""
    return cases or [pytest.param(None, marks=pytest.mark.skip(reason=reason(path)), id="absent")]
