"""Operations without a kernel, computed by their formulas over a device's cache: sparse attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.devices.protocol import KVDtype
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.registry import make_backend
from tests.devices.cuda.test_engine import COMMON, answers, tokens
from tests.devices.sparse_cases import FORMS, plain
from tests.devices.test_sparse import check_schedules, listed, machine
from tests.model import test_encoders as encoders
from tests.tiny import write_checkpoint

pytest.importorskip("triton", reason="the kernels of GPUs need triton")


make = encoders.make


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


@pytest.mark.parametrize("name", ["MiniMax-M3", "GLM-5.3-Flash", "DeepSeek-V4 CSA"])
def test_every_schedule_gives_the_same_bits(backend: Any, name: str) -> None:
    check_schedules(backend, FORMS[name], 3, 16, "int8" if name == "MiniMax-M3" else "bfloat16")


@pytest.mark.parametrize("family", ["minimax_m3", "qwen4"])
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
    assert "no GPU kernel computes Attend of chosen positions, Choose," in caplog.text


def test_scores_by_distance_make_the_vectors_of_transformers(make: encoders.Make) -> None:
    directory, model = make("deberta-v3", num_hidden_layers=2)
    with LLM(str(directory), device="interpreter", max_num_seqs=4, block_size=16) as llm:
        for output in llm.embed(["a b c d", "z y x q"], pooling="mean", use_tqdm=False):
            expected = encoders.unit(encoders.hidden(model, output.prompt_token_ids).mean(0))
            np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
