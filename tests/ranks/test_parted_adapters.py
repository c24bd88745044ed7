"""Adapters of a model that several ranks hold answer as on one rank, alone and mixed; broken ones are refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest
from quire.errors import ModelError
from tests.adapter_files import change_tensors, write_adapter
from tests.ranks.test_ranks import DRAWN, PROMPTS
from tests.tiny import write_checkpoint

OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_model_len": 64}
# All layers; with magnitudes; tables and norms too; of one layer alone, the first or the last.
KINDS: list[dict[str, Any]] = [
    {},
    {"dora": True},
    {"tables": True},
    {"rank": 8, "use_rslora": True, "only": r"\.0\."},
    {"only": r"\.2\."},
]


def write_adapters(folder: Path, model: Path) -> list[LoRARequest | None]:
    paths = [write_adapter(folder / str(i), model, i, **kind) for i, kind in enumerate(KINDS)]
    return [None, *(LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(paths))]


def drawn(llm: LLM, prompts: Sequence[Any], given: Sequence[LoRARequest | None]) -> list[Any]:
    """Tokens and log-probabilities of each answer."""
    outputs = llm.generate(list(prompts), DRAWN, use_tqdm=False, lora_request=list(given))
    found = [output.outputs[0] for output in outputs]
    return [
        (
            list(one.token_ids),
            [sorted((t, p.logprob) for t, p in step.items()) for step in one.logprobs or ()],
        )
        for one in found
    ]


def tokens(answers: list[Any]) -> list[list[int]]:
    return [found for found, _ in answers]


LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"pipeline_parallel_size": 2}, {}),
    ("llama", {"pipeline_parallel_size": 3, "async_scheduling": True}, {}),
    ("llama", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}),
    ("mixtral", {"pipeline_parallel_size": 2}, {}),
]


@pytest.mark.parametrize(("family", "layout", "same"), LAYOUTS)
def test_stages_answer_as_one(
    tmp_path: Path, family: str, layout: dict[str, Any], same: dict[str, Any]
) -> None:
    """Bit for bit as without stages, and as alone. More adapters than fit come and go; all sleep."""
    model = write_checkpoint(tmp_path / "model", family)
    adapters = write_adapters(tmp_path, model)
    each = [adapters[i % len(adapters)] for i in range(len(PROMPTS))]
    with LLM(str(model), **OPTIONS, **same) as whole:
        wanted = drawn(whole, PROMPTS, each)
    assert len(set(map(str, wanted))) == len(PROMPTS)
    with LLM(str(model), **OPTIONS, **layout) as parted:
        assert drawn(parted, PROMPTS, each) == wanted
        alone = [drawn(parted, [p], [one])[0] for p, one in zip(PROMPTS, each, strict=True)]
        assert alone == wanted
        parted.sleep(2)
        parted.wake_up()
        assert drawn(parted, PROMPTS, each) == wanted


def test_ranks_with_whole_experts_draw_the_tokens_of_one(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "mixtral")
    adapters = write_adapters(tmp_path, model)
    each = [adapters[i % len(adapters)] for i in range(len(PROMPTS))]
    with LLM(str(model), **OPTIONS) as whole:
        wanted = tokens(drawn(whole, PROMPTS, each))
    with LLM(str(model), **OPTIONS, tensor_parallel_size=2, enable_expert_parallel=True) as spread:
        found = drawn(spread, PROMPTS, each)
        assert tokens(found) == wanted
        assert [drawn(spread, [p], [one])[0] for p, one in zip(PROMPTS, each, strict=True)] == found


@pytest.mark.parametrize("layer", [0, 2])
def test_an_adapter_that_does_not_fit_any_stage_is_refused_by_name(tmp_path: Path, layer: int) -> None:
    """A module that the base lacks, and one of another shape, in the first stage or the last; others go on."""
    model = write_checkpoint(tmp_path / "model")
    good = write_adapter(tmp_path / "good", model, 0)
    stray, wide = (shutil.copytree(good, tmp_path / name) for name in ("stray", "wide"))
    up = f"layers.{layer}.mlp.up_proj"
    change_tensors(stray, lambda name, values: (name.replace(up, f"layers.{layer}.mlp.side"), values))
    change_tensors(
        wide, lambda name, values: (name, values[:-1] if up in name and "lora_B" in name else values)
    )
    with LLM(str(model), **OPTIONS, pipeline_parallel_size=2) as parted:
        before = drawn(parted, PROMPTS[:1], [LoRARequest("good", 1, good)])
        with pytest.raises(ModelError, match=rf"no place for .*layers\.{layer}\.mlp\.side"):
            parted.add_lora(LoRARequest("stray", 2, str(stray)))
        with pytest.raises(ModelError, match=rf"layers\.{layer}\.mlp\.up_proj"):
            parted.add_lora(LoRARequest("wide", 3, str(wide)))
        assert drawn(parted, PROMPTS[:1], [LoRARequest("good", 1, good)]) == before
