"""Sparse attention on a GPU: choices, values and bits, by the formulas and schedules of tests/devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import SamplingParams
from quire.devices.protocol import KVDtype
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.registry import make_backend
from tests.devices.cuda.test_engine import COMMON, answers, tokens
from tests.devices.sparse_cases import FORMS, plain, without_choice
from tests.devices.test_sparse import check_schedules, listed, machine
from tests.tiny import write_checkpoint

pytest.importorskip("triton", reason="the kernels of GPUs need triton")


@pytest.fixture(scope="module")
def backend() -> Any:
    return make_backend(threads=1, device="interpreter")


@pytest.mark.parametrize("name", FORMS)
def test_sparse_attention_is_the_plain_formula(backend: Any, name: str) -> None:
    form = FORMS[name]
    found, weights, x = machine(backend, form, 1)
    tokens = np.random.default_rng(2).integers(0, 90, 40)
    wanted, choices = plain(form, weights, x[tokens])
    got, chosen = found.whole(tokens)
    if form.chooses:
        assert listed(chosen, form) == choices
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "Qwen4-exp", "DeepSeek-V4 CSA"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8_e4m3"])
def test_caches_of_other_types_are_near(backend: Any, name: str, dtype: KVDtype) -> None:
    form, tokens = replace(FORMS[name], chooses=False), np.random.default_rng(13).integers(0, 90, 30)
    got, wanted = (
        machine(one, form, 14, dtype=dtype)[0].whole(tokens)[0] for one in (backend, ReferenceBackend())
    )
    near = {"bfloat16": 0.04, "int8": 0.04}.get(dtype, 0.3)
    np.testing.assert_allclose(got, wanted, rtol=near, atol=near)


@pytest.mark.parametrize("name", ["groups of index heads", "Qwen4-exp"])
def test_of_equal_scores_the_earlier_pool_goes_first(backend: Any, name: str) -> None:
    """Keys that repeat, and products that relu makes 0."""
    form = replace(FORMS[name], turns=False)
    found, weights, x = machine(backend, form, 3)
    numbers = np.tile(np.random.default_rng(4).integers(0, 90, form.size), 40 // form.size)
    _, choices = plain(form, weights, x[numbers])
    assert listed(found.whole(numbers)[1], form) == choices


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "MiniMax-M3"])
def test_who_chooses_everything_has_the_bits_of_full_attention(
    backend: Any, name: str, dtype: KVDtype
) -> None:
    form = FORMS[name]
    every = form.top_k * form.size
    numbers = np.random.default_rng(5).integers(0, 90, every + 4)
    got = machine(backend, form, 6, dtype=dtype)[0].whole(numbers)[0]
    full = machine(backend, without_choice(form), 6, dtype=dtype)[0].whole(numbers)[0]
    assert got[:every].tobytes() == full[:every].tobytes()


@pytest.mark.parametrize("name", ["MiniMax-M3", "GLM-5.3-Flash", "DeepSeek-V4 CSA", "DeepSeek-V4 HCA"])
def test_every_schedule_gives_the_same_bits(backend: Any, name: str) -> None:
    check_schedules(backend, FORMS[name], 3, 16, "int8" if name == "MiniMax-M3" else "bfloat16")


@pytest.mark.parametrize("family", ["minimax_m3", "qwen4", "deepseek_v4", "mistral_large4_text"])
def test_tokens_of_sparse_models_equal_the_cpu_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    model = write_checkpoint(tmp_path, family)
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, ignore_eos=True)
    requests = [(COMMON[:15], params), (COMMON[5:10], params)]
    here, there = (answers(model, requests, device=device) for device in ("interpreter", "cpu"))
    assert tokens(here) == tokens(there)
    for [(_, _, found)], [(_, _, wanted)] in zip(here, there, strict=True):
        assert found == [pytest.approx(place, abs=1e-3) for place in wanted]
    assert "no GPU kernel" not in caplog.text
