"""Engines whose checksums are right and whose plans are not: refused before anything native runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.build import build_engine
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.model.info import EngineLimits
from tests.engine_files import rewrite, rewrite_weights
from tests.tiny import write_checkpoint

BIG = 2**31 - 1


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("engines")
    made = {}
    for family in ("llama", "qwen2_moe"):
        model = write_checkpoint(folder / f"{family}-model", family)
        made[family] = folder / family
        build_engine(EngineConfig.from_options(model=str(model)), made[family], EngineLimits())
    return made


def run(engine: Path) -> None:
    LLM(str(engine), num_gpu_blocks_override=64).generate(
        ["Once upon"], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False
    )


def spec(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["spec"].update(changes)


def rope(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["spec"]["rope"].update(changes)


def fewer_experts(found: dict[str, Any]) -> None:
    moe = found["weights"]["layers"][0]["moe"]
    moe["experts"] = moe["experts"][:2]


def offsets(found: dict[str, Any]) -> None:
    for tensor in found["tensors"]:
        if "layout" in tensor["about"]:
            tensor["about"]["offsets"] = True


def no_mixture(found: dict[str, Any]) -> None:
    found["weights"]["layers"][0]["moe"] = None


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("qwen2_moe", fewer_experts, "experts: there are 2, the router names 7"),
        ("qwen2_moe", no_mixture, "layer 0 has not the mixture"),
        ("llama", spec(num_heads=2**28 + 4), "num_heads must be"),
        ("llama", spec(num_heads=8), "store_kv: the input is not"),
        ("llama", spec(num_kv_heads=0), "num_kv_heads must be"),
        ("llama", spec(num_layers=BIG), "num_layers must be"),
        ("llama", spec(num_layers=1000), "windows has 3 entries for 1000 layers"),
        ("llama", spec(num_layers=4, windows=[None] * 4), "weights of 3 layers, the model has 4"),
        ("llama", spec(head_dim=BIG), "head_dim must be"),
        ("llama", spec(vocab_size=640), "the head gives 320 logits"),
        ("llama", spec(norm_eps=1e300), "norm_eps must be"),
        ("llama", rope(kind="yarn", original_max_position=64, beta_slow=0.0), "beta_slow of the rope"),
        ("llama", rope(kind="longrope", original_max_position=64), "factors of the rope"),
        ("llama", rope(rotary_dim=BIG), "rotary_dim of the rope"),
        ("llama", spec(windows=[-1, None, None]), "windows must be at least 1"),
        ("llama", offsets, "no groups, offsets or scales"),
        ("llama", lambda found: found.update(eos_token_ids=[-1]), "eos_token_ids holds -1"),
        ("llama", lambda found: found.update(eos_token_ids=[320]), "eos_token_ids holds 320"),
        ("llama", lambda found: found["tensors"][0].update(offset=8), "does not lie on a page"),
        ("llama", lambda found: found["tensors"][-1].update(nbytes=1 << 40), "does not lie on a page inside"),
        ("llama", lambda found: found["tensors"][0]["about"].update(rows=1 << 24), "another size than its shape"),
        ("llama", lambda found: found["tensors"][0]["about"].update(cols=-1), "cannot be used"),
    ],
)  # fmt: skip
def test_impossible_plans_are_refused(
    family: str, change: Callable[[dict[str, Any]], Any], said: str, engines: dict[str, Path], tmp_path: Path
) -> None:
    engine = Path(shutil.copytree(engines[family], tmp_path / "engine"))
    rewrite(engine, change)
    with pytest.raises(QuireError, match=said):
        run(engine)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_screens_have_possible_bounds(value: float, engines: dict[str, Path], tmp_path: Path) -> None:
    engine = Path(shutil.copytree(engines["llama"], tmp_path / "engine"))

    def change(data: bytearray, manifest: dict[str, Any]) -> None:
        screened = next(t for t in manifest["tensors"] if t["about"].get("screened"))
        end = screened["offset"] + screened["nbytes"]
        data[end - 4 : end] = np.float32(value).tobytes()

    rewrite_weights(engine, change)
    with pytest.raises(QuireError, match="bounds that are negative or not finite"):
        run(engine)


def test_a_head_that_is_no_number_is_not_screened(engines: dict[str, Path], tmp_path: Path) -> None:
    """All logits are NaN: no row is a candidate, and the step says so instead of writing to one."""
    engine = Path(shutil.copytree(engines["llama"], tmp_path / "engine"))

    def change(data: bytearray, manifest: dict[str, Any]) -> None:
        head = next(t for t in manifest["tensors"] if t["about"].get("screened"))
        rows, columns = head["about"]["rows"], head["about"]["cols"]
        floats = np.frombuffer(data, np.float32, rows * columns, head["offset"])
        floats[:] = np.nan

    rewrite_weights(engine, change)
    with pytest.raises(QuireError, match="NaN"):
        run(engine)
