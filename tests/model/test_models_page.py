"""docs/models.md has the table of families as the registry has it."""

from __future__ import annotations

import importlib
from pathlib import Path

from quire.model.families import DECODERS, ENCODERS, MODEL_TYPES
from tests.model.models_table import KIN, checked, markdown


def test_the_table_is_current() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert markdown() in page, (
        "run `python -m tests.model.models_table` and put its output into docs/models.md"
    )


def test_the_registry_and_the_families_agree() -> None:
    registered = {**DECODERS, **ENCODERS}
    for module in set(registered.values()):
        families = importlib.import_module(f"quire.model.families.{module}").FAMILIES
        assert set(families) == {name for name, place in registered.items() if place == module}
    kinds = [*MODEL_TYPES.values()]
    assert set(kinds) <= registered.keys()
    assert sorted(name for name in kinds if name in DECODERS) == sorted(DECODERS)


def test_every_decoder_is_checked_against_something() -> None:
    assert set(DECODERS) == {*checked(), *KIN}
