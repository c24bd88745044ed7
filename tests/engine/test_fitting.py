"""A model that is too large: the error says which ranks and which quantization would fit, and these do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="a plan for a GPU needs its backend")

from quire.config import EngineConfig
from quire.engine.plan import plan_engine
from quire.errors import ResourceError
from tests.tiny import write_checkpoint

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}


def configured(model: Path, **options: Any) -> EngineConfig:
    options = {"device": "sm_90", "gpu_memory_utilization": 1.0, "max_model_len": 64, **options}
    return EngineConfig.from_options(model=str(model), **options)


def refusal(share: float, **options: Any) -> str:
    """What is said with the memory of this share of the weights, beside the workspace."""
    config = configured(**options)
    memory = plan_engine(config, 1 << 40).memory
    with pytest.raises(ResourceError, match="do not fit in") as said:
        plan_engine(config, int(share * memory.weights) + memory.workspace)
    assert "\n" not in str(said.value)
    assert "`quire plan` shows what a model takes" in str(said.value)
    return str(said.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama", "bfloat16", **WIDE)


@pytest.mark.parametrize(
    ("share", "ranks", "quantization"), [(0.9, "2", "int8"), (0.45, "4", "int4"), (0.2, "8", None)]
)
def test_what_would_fit_is_named(model: Path, share: float, ranks: str, quantization: str | None) -> None:
    said = refusal(share, model=model)
    found = re.search(r"--tensor-parallel-size (\d+)", said), re.search(r"--quantization (\w+) \(", said)
    assert [one and one[1] for one in found] == [ranks, quantization]


def test_weights_that_are_quantized_need_ranks(model: Path) -> None:
    said = refusal(0.9, model=model, quantization="int4")
    assert "--tensor-parallel-size 2 (" in said
    assert "--quantization int8 (" not in said


def test_ranks_of_a_cpu_share_its_memory(model: Path) -> None:
    said = refusal(0.9, model=model, device="cpu")
    assert "--tensor-parallel-size" not in said
    assert "--quantization int8 (" in said


def test_nothing_fits(model: Path) -> None:
    assert "no number of ranks and no quantization would fit" in refusal(0.01, model=model)


def test_other_memory_is_another_matter(model: Path) -> None:
    with pytest.raises(ResourceError, match="ask for less") as said:
        plan_engine(configured(model, num_gpu_blocks_override=1 << 30), 1 << 40)
    assert "would fit" not in str(said.value)
