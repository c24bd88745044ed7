"""Operations that carry a state, on a device: right by plain formulas, and the same bits however tokens come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import SamplingParams
from quire.devices.registry import make_backend
from tests.devices.cuda.test_engine import COMMON, answers, tokens
from tests.devices.recurrent_cases import KINDS, Machine, drawn
from tests.devices.test_recurrent import check_schedules
from tests.tiny import write_checkpoint

pytest.importorskip("triton", reason="the kernels of GPUs need triton")


@pytest.fixture(scope="module")
def backend() -> Any:
    return make_backend(threads=1, device="interpreter")


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_plain_formula(backend: Any, kind: str) -> None:
    rng = np.random.default_rng(1)
    case = KINDS[kind](rng)
    x = drawn(case, rng, 40)
    tokens = np.random.default_rng(2).integers(0, 39, 18)
    found = Machine(backend, case, x).whole(tokens)
    np.testing.assert_allclose(found, case.plain(x[tokens].astype(np.float64)), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["convolution", "ngrams", "delta", "mamba2", "gated"])
def test_every_schedule_gives_the_same_bits(backend: Any, kind: str) -> None:
    check_schedules(backend, kind, 3)


FAMILIES = ["lfm2", "qwen3_5", "kimi_linear", "zamba2", "minimax", "recurrent_gemma"]
"""Convolutions alone, delta rules by head and by channel, Mamba-2, lightning attention, RG-LRU."""


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_recurrent_models_equal_the_cpu_s(tmp_path: Path, family: str) -> None:
    model = write_checkpoint(tmp_path, family)
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, ignore_eos=True)
    requests = [(COMMON[:7], params), (COMMON[5:10], params)]
    here, there = (answers(model, requests, device=device) for device in ("interpreter", "cpu"))
    assert tokens(here) == tokens(there)
    for [(_, _, found)], [(_, _, wanted)] in zip(here, there, strict=True):
        assert found == [pytest.approx(place, abs=1e-3) for place in wanted]


def test_bits_of_recurrent_models_depend_on_a_request_alone(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3_5", "bfloat16", num_hidden_layers=2)
    own = {"device": "interpreter"}
    params = SamplingParams(seed=1, max_tokens=4, logprobs=2, ignore_eos=True)
    requests = [(COMMON[:20], params), (list(b"abcabcabc"), params)]
    together = answers(model, requests, **own)
    assert answers(model, requests[1:], max_num_batched_tokens=5, **own) == together[1:]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}
    assert answers(model, requests * 2, speculative_config=drafts, **own) == together * 2
