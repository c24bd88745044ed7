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


Change = Callable[[dict[str, Any]], Any]


def first(found: dict[str, Any], *path: str) -> Any:
    """A config of the first layer."""
    config = found["spec"]["layers"][0]
    for name in path:
        config = config[name]
    return config


def attention(**changes: Any) -> Change:
    return lambda found: first(found, "mixer").update(changes)


def embedding(**changes: Any) -> Change:
    return lambda found: found["spec"]["embedding"].update(changes)


def rope(**changes: Any) -> Change:
    return lambda found: first(found, "mixer", "rope").update(changes)


def layers(count: int) -> Change:
    return lambda found: found["spec"].update(layers=[first(found)] * count)


def tensor(place: int, **changes: Any) -> Change:
    return lambda found: list(found["tensors"].values())[place].update(changes)


def about(**changes: Any) -> Change:
    return lambda found: next(iter(found["tensors"].values()))["about"].update(changes)


def fewer_experts(found: dict[str, Any]) -> None:
    found["tensors"] = {
        path: one for path, one in found["tensors"].items() if ".mixture.experts.2." not in path
    }


def offsets(found: dict[str, Any]) -> None:
    for one in found["tensors"].values():
        if "layout" in one["about"]:
            one["about"]["offsets"] = True


def no_mixture(found: dict[str, Any]) -> None:
    first(found)["mlp"] = None


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("qwen2_moe", fewer_experts, "there is no tensor layers.0.mixture.experts.2"),
        ("qwen2_moe", no_mixture, "nothing reads layers.0"),
        ("llama", attention(num_heads=2**28 + 4), "num_heads must be"),
        ("llama", attention(num_heads=8), "8 heads"),
        ("llama", attention(head_dim=32), "layers.0.attention.qkv is"),
        ("llama", attention(num_kv_heads=0), "num_kv_heads must be"),
        ("llama", layers(0), "from 1 to 1024 layers"),
        ("llama", layers(1025), "from 1 to 1024 layers"),
        ("llama", layers(2), "nothing reads layers.2"),
        ("llama", layers(4), "there is no tensor layers.3"),
        ("llama", attention(head_dim=BIG), "head_dim must be"),
        ("llama", embedding(vocab_size=640), "embedding is .* the model says"),
        ("llama", lambda found: found["spec"]["norm"].update(eps=1e300), "eps must be"),
        ("llama", rope(kind="yarn", original_max_position=64, beta_slow=0.0), "beta_slow of the rope"),
        ("llama", rope(kind="longrope", original_max_position=64), "factors of the rope"),
        ("llama", rope(rotary_dim=BIG), "rotary_dim of the rope"),
        ("llama", lambda found: first(found, "mixer", "scores").update(window=-1), "window must be"),
        ("llama", offsets, "no groups, offsets or scales"),
        ("llama", lambda found: found.update(eos_token_ids=[-1]), "eos_token_ids holds -1"),
        ("llama", lambda found: found.update(eos_token_ids=[320]), "eos_token_ids holds 320"),
        ("llama", tensor(0, offset=8), "does not lie on a page"),
        ("llama", tensor(-1, nbytes=1 << 40), "does not lie on a page inside"),
        ("llama", about(rows=1 << 24), "embedding is .* the model says"),
        ("llama", tensor(0, nbytes=64), "another size than its shape"),
        ("llama", about(cols=-1), "cannot be used"),
    ],
)  # fmt: skip
def test_impossible_plans_are_refused(
    family: str, change: Change, said: str, engines: dict[str, Path], tmp_path: Path
) -> None:
    engine = Path(shutil.copytree(engines[family], tmp_path / "engine"))
    rewrite(engine, change)
    with pytest.raises(QuireError, match=said):
        run(engine)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_screens_have_possible_bounds(value: float, engines: dict[str, Path], tmp_path: Path) -> None:
    engine = Path(shutil.copytree(engines["llama"], tmp_path / "engine"))

    def change(data: bytearray, manifest: dict[str, Any]) -> None:
        screened = next(t for t in manifest["tensors"].values() if t["about"].get("screened"))
        end = screened["offset"] + screened["nbytes"]
        data[end - 4 : end] = np.float32(value).tobytes()

    rewrite_weights(engine, change)
    with pytest.raises(QuireError, match="bounds that are negative or not finite"):
        run(engine)


def test_a_head_that_is_no_number_is_not_screened(engines: dict[str, Path], tmp_path: Path) -> None:
    """All logits are NaN: no row is a candidate, and the step says so instead of writing to one."""
    engine = Path(shutil.copytree(engines["llama"], tmp_path / "engine"))

    def change(data: bytearray, manifest: dict[str, Any]) -> None:
        head = next(t for t in manifest["tensors"].values() if t["about"].get("screened"))
        rows, columns = head["about"]["rows"], head["about"]["cols"]
        floats = np.frombuffer(data, np.float32, rows * columns, head["offset"])
        floats[:] = np.nan

    rewrite_weights(engine, change)
    with pytest.raises(QuireError, match="NaN"):
        run(engine)
