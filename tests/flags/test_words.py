"""Options of llama.cpp, TGI and Ollama lead to ours, or to the reason why there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.cli import COMMANDS, Program, all_options
from quire.flags.words import _SAME, NEEDLESS, advice


def test_every_option_that_is_named_exists() -> None:
    ours = {"--" + name.replace("_", "-") for name in all_options(Program(commands=COMMANDS))}
    assert set(_SAME) <= ours
    assert not set(NEEDLESS) & ours


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve model.gguf -c 4096", "there is no option -c; did you mean --max-model-len?"),
        ("serve -hf some/model:Q4_K_M", "there is no option -hf; did you mean --model?"),
        ("chat model.gguf -ngl 99", "there is no option -ngl: a model lies whole in one device's memory"),
        ("serve --model-id some/model", "there is no option --model-id; did you mean --model?"),
        ("serve --num-shard 2", "there is no option --num-shard; did you mean --tensor-parallel-size?"),
        ("chat --temp 0.5", "there is no option --temp; did you mean --temperature?"),
        ("serve --jinja", "there is no option --jinja: it is always on"),
    ],
)
def test_a_foreign_option_is_answered(line: str, said: str) -> None:
    command = [sys.executable, "-m", "quire.cli", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_word_of_nobody_gets_no_advice() -> None:
    assert advice("--blah", ["--model"]) == ""
    assert advice("--temp", ["--model"]) == ""
