"""docs/models.md has the table of families as the registry has it."""

from __future__ import annotations

from pathlib import Path

from quire.model.families import FAMILIES
from quire.model.families.table import markdown


def test_the_table_is_current() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert markdown() in page, (
        "run `python -m quire.model.families.table` and put its output into docs/models.md"
    )


def test_every_model_type_is_named_once() -> None:
    kinds = [family.model_type for family in FAMILIES.values()]
    assert len(set(kinds)) == len(kinds)
