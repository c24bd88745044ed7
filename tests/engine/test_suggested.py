"""The table of models to try: its figures are the planner's, and the choice follows the machine's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.suggested import Suggestion, first_model, suggestions
from tests.suggested_models import SHAPES, figures

TABLE = {each.model: each for each in suggestions()}
MOST_TOKENIZER = 16 << 20  # bytes


def test_the_table_has_the_models_whose_shapes_are_known_smallest_first() -> None:
    assert TABLE.keys() == SHAPES.keys()
    assert list(TABLE.values()) == sorted(TABLE.values(), key=lambda each: each.bytes)


@pytest.mark.parametrize("model", SHAPES)
def test_figures_are_those_of_the_plan_of_such_a_file(model: str, tmp_path: Path) -> None:
    """The files' tensors have the size that the hub tells, but for the tokenizer."""
    found, planned = TABLE[model], figures(model, tmp_path)
    assert 0 < found.bytes - planned["bytes"] < MOST_TOKENIZER
    assert (found.parameters, found.context) == (planned["parameters"], planned["context"])
    assert found.memory == pytest.approx(planned["memory"], rel=0.1)  # the workspace depends on the machine
    assert found.read == pytest.approx(planned["read"], rel=0.02)


def test_the_choice_is_the_largest_that_fits_and_answers_quickly() -> None:
    chosen = {free: first_model(free * 10**9) for free in (1, 4, 8, 24, 32, 64)}
    assert chosen[1] is None
    assert {free: each.model.split("/")[1] for free, each in chosen.items() if each} == {
        4: "Qwen3-0.6B-GGUF",
        8: "Llama-3.2-3B-Instruct-GGUF",
        24: "Qwen3-4B-GGUF",
        32: "gpt-oss-20b-GGUF",
        64: "Qwen3-30B-A3B-GGUF",
    }


def test_a_rate_is_bounded_by_what_a_token_reads() -> None:
    model = Suggestion("a/b", "Q4_K_M", "MIT", 10**9, 5 * 10**8, 4096, memory=10**9, read=5 * 10**8)
    assert model.rate(10.0) == 20.0
    assert model.fits(2 * 10**9)
    assert not model.fits(2 * 10**9 - 2)
