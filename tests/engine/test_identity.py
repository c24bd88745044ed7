"""Identities of engines: equal for what answers alike, different for everything that changes an answer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine import identity as module
from quire.engine.identity import files_digest, identity
from quire.engine.plan import plan_engine


def of(path: Path, **options: Any) -> str:
    return identity(plan_engine(EngineConfig.from_options(model=str(path), threads=1, **options)))


@pytest.fixture
def model(tiny_model: Callable[..., str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def test_a_copy_is_the_same_and_a_fine_tune_is_not(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "another"))
    assert of(model) == of(copy) == of(model, max_num_seqs=3, seed=5, enable_prefix_caching=False)
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    assert of(copy) != of(model)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "int8"},
        {"logprobs_mode": "processed_logprobs"},
        {"chat_template": "{{ messages }}"},
        {"chat_template": "{{ messages }}" * 30},  # longer than a file name may be
    ],
    ids=str,
)
def test_what_changes_an_answer_changes_the_identity(options: dict[str, Any], model: Path) -> None:
    assert of(model, **{"dtype": "bfloat16", **options}) != of(model, dtype="bfloat16")


def test_an_instruction_set_has_an_identity_of_its_own(model: Path) -> None:
    assert of(model, isa="scalar") != of(model)


def test_large_files_are_told_apart_by_their_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE", 1 << 10)
    file = tmp_path / "weights.safetensors"
    data = bytearray(3 * module.STRIDE + 77)
    found = set()
    for place in (0, module.STRIDE - 1, module.STRIDE, 2 * module.STRIDE + 9, len(data) - 1):
        changed = bytearray(data)
        changed[place] = 1
        file.write_bytes(changed)
        found.add(files_digest(tmp_path))
    file.write_bytes(data)
    assert len(found | {files_digest(tmp_path)}) == 6
