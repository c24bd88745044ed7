"""Adapters on a device: the CPU's tokens, and bits that depend on a request alone, whoever shares its steps."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.devices.adapters import Adapter, Change, Up
from quire.devices.ops import Linear
from quire.devices.registry import make_backend
from quire.errors import QuireError
from tests.adapter_files import write_adapter
from tests.devices.cuda.test_engine import BLOCKS, SMALL
from tests.models import load_model
from tests.tiny import write_checkpoint

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import torch

from quire.devices.cuda.adapters import SlotAdapters
from quire.devices.cuda.record import Recorder

KINDS: tuple[dict[str, Any], ...] = (
    {"rank": 4},
    {"rank": 1, "only": "q_proj|v_proj|c_attn"},
    {"rank": 5, "dora": True},
    {"rank": 3, "tables": True},
)
PROMPTS = [list(b"Once upon"), list(b"A dog"), list(b"The end of"), list(b"Once upon"), list(b"In the")]
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True)


def answers(model: Path, wanted: list[tuple[list[int], LoRARequest | None]], **options: Any) -> list[Any]:
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}
    with LLM(model=str(model), **{**BLOCKS, **lora, **options}) as llm:
        prompts = [{"prompt_token_ids": tokens} for tokens, _ in wanted]
        outputs = llm.generate(
            prompts, PARAMS, use_tqdm=False, lora_request=[adapter for _, adapter in wanted]
        )
    return [
        ([*sample.token_ids], [{t: one.logprob for t, one in place.items()} for place in sample.logprobs])
        for output in outputs
        for sample in output.outputs
    ]


def adapters(model: Path, folder: Path) -> list[LoRARequest | None]:
    paths = [write_adapter(folder / str(i), model, i, **kind) for i, kind in enumerate(KINDS)]
    return [*(LoRARequest(str(i), i + 1, path) for i, path in enumerate(paths)), None]


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen2", {}), ("gpt2", {}), ("llama", {"quantization": "int4", "quantization_group_size": 32})],
)
def test_tokens_of_adapters_equal_the_cpu_s(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    small = {"n_layer": 1} if family == "gpt2" else {**SMALL, "num_hidden_layers": 1}
    model = write_checkpoint(tmp_path / "model", family, **small)
    wanted = list(zip(PROMPTS, adapters(model, tmp_path), strict=True))
    here, there = (answers(model, wanted, device=device, **options) for device in ("interpreter", "cpu"))
    assert [tokens for tokens, _ in here] == [tokens for tokens, _ in there]
    for (_, found), (_, expected) in zip(here, there, strict=True):
        assert found == [pytest.approx(place, abs=2e-3) for place in expected]
    assert here[0] != here[3]


def test_bits_of_adapters_and_of_the_base_depend_on_a_request_alone(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", "bfloat16", **{**SMALL, "num_hidden_layers": 1})
    wanted = list(zip(PROMPTS, adapters(model, tmp_path), strict=True))
    together = answers(model, wanted, device="interpreter")
    assert answers(model, wanted[::-1], device="interpreter", max_num_batched_tokens=7)[::-1] == together
    assert [answers(model, [one], device="interpreter")[0] for one in (wanted[2], wanted[4])] == [
        together[2],
        together[4],
    ]


def test_adapters_that_threads_put_side_by_side_are_all_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    backend: Any = make_backend(threads=1, device="interpreter")
    loaded, rng = load_model(model, backend), np.random.default_rng(0)
    slots = SlotAdapters(loaded.graph, Recorder(backend._run, backend._device, torch.float32), 2, 8)
    path, shape = next((op.path, op.weight.shape) for op in loaded.graph.ops if isinstance(op, Linear))
    down, up = (rng.normal(size=size).astype(np.float32) for size in ((2, shape[1]), (shape[0], 2)))
    adapter = Adapter({path: Change(down, (Up(up, 0, 0),))})
    other, known = Thread(target=slots.put, args=(1, adapter)), SlotAdapters._table

    def table(self: SlotAdapters, *about: Any) -> Any:
        if other.ident is None:
            other.start()
            other.join(0.2)  # it waits, or changes what this call has read
        return known(self, *about)

    monkeypatch.setattr(SlotAdapters, "_table", table)
    slots.put(0, adapter)
    other.join()
    by_slot, changes = slots.of(path)
    assert {*by_slot} == {0, 1}
    assert changes is not None
    assert (changes.ranks > 0).all()


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "qwen2_moe", num_hidden_layers=1)
    adapter = LoRARequest("experts", 1, write_adapter(tmp_path / "adapter", model, 1, only="experts"))
    with pytest.raises(
        QuireError, match=r"changes .*experts.* which no GPU kernel changes: choose --device cpu"
    ):
        answers(model, [(PROMPTS[0], adapter)], device="interpreter")
