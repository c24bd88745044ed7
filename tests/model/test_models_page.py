"""docs/models.md has the table of families as the registry has it."""

from __future__ import annotations

from pathlib import Path

from quire.model.families import DECODERS, ENCODERS, MODEL_TYPES, load_family
from tests.model.models_table import KIN, checked, markdown


def test_the_table_is_current() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert markdown() in page, (
        "run `python -m tests.model.models_table` and put its output into docs/models.md"
    )


def test_the_registry_and_the_families_agree() -> None:
    for name in DECODERS:
        assert MODEL_TYPES[load_family(name).model_type] == name
    assert {load_family(MODEL_TYPES[load_family(name).model_type]).model_type for name in ENCODERS} == {
        load_family(name).model_type for name in ENCODERS
    }


def test_every_decoder_is_checked_against_something() -> None:
    assert set(DECODERS) == {*checked(), *KIN}
