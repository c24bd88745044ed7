"""Synthetic requests fit the model; figures are readable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.lengths import fitted_lengths
from quire.bench.report import readable
from quire.cli import main


def test_lengths_fit_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert fitted_lengths(1024, 128, 4096) == (1024, 128)
    assert capsys.readouterr().err == ""
    assert fitted_lengths(1024, 128, 512) == (384, 128)
    assert "takes 512 tokens" in capsys.readouterr().err
    assert fitted_lengths(8, 4000, 512) == (8, 128)


@pytest.mark.parametrize(
    ("value", "text"), [(24893.4, "24,893"), (999.96, "1000"), (12.3456, "12.35"), (0.012344, "0.01234")]
)
def test_figures_have_no_exponent(value: float, text: str) -> None:
    assert readable(value) == text


def test_long_defaults_are_cut_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    options = "--input-len 4000 --output-len 3 --num-iters 1 --num-iters-warmup 0 --num-prompts 1"
    main(
        [
            "bench",
            "throughput",
            *options.replace("--num-iters-warmup 0 ", "").split(),
            "--output-json",
            str(out),
        ]
    )
    assert "note: the model takes" in capsys.readouterr().err
    assert json.loads(out.read_text())["output_tok_s"] > 0
