"""Prompts of `quire bench throughput` that come from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli import main


def test_rows_of_prompts_keep_their_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": "Once upon a time", "output_tokens": 3},
        {"input_ids": [1] * 2000, "output_tokens": 3},
        {"input_ids": [0, 40], "output_tokens": 5},
        {"prompt": "One day"},
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    words = ["--dataset-path", str(tmp_path / "data.jsonl"), "--num-iters", "1", "--output-len", "2"]
    main(["bench", "throughput", *words, "--output-json", str(tmp_path / "out.json")])
    figures = json.loads((tmp_path / "out.json").read_text())
    assert "3 requests" in capsys.readouterr().out
    assert figures["output_tok_s"] * figures["elapsed_s"] == pytest.approx(3 + 5 + 2)
    for content, said in (
        ("[1, 2]", "is not JSONL of prompts"),
        ('{"input_ids": [1], "output_tokens": 5000}', "no prompt that fits"),
    ):
        (tmp_path / "data.jsonl").write_text(content)
        with pytest.raises(SystemExit):
            main(["bench", "throughput", *words])
        assert said in capsys.readouterr().err
