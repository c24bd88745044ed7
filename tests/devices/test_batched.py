"""Plain torch on all rows at once: the tokens of the CPU's kernels, in families of all kinds and with every feature."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.devices.torch import batched
from tests import tiny
from tests.adapter_files import write_adapter
from tests.exactness.requests import make_prompts
from tests.tiny import write_checkpoint

KNOWN = [tiny.FAMILIES, tiny.OTHERS, tiny.RECURRENT, tiny.CHOOSING, tiny.STREAMS, tiny.INDEXED]
FAMILIES = [*tiny.FAMILIES, *(family for known in KNOWN[1:] for family in list(known)[::3])]
PROMPTS = [prompt[:25] for prompt in make_prompts()[:3]]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
PLAIN = {"backend": "torch", "device": "cpu"}


def answers(
    model: Path,
    params: Any = GREEDY,
    prompts: Sequence[list[int]] = PROMPTS,
    lora: Any = None,
    **options: Any,
) -> Any:
    """The samples of prompts that come together: token ids, and their log-probabilities."""
    with LLM(str(model), **{"threads": 1, "max_model_len": 64, **options}) as llm:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, params, use_tqdm=False, lora_request=lora)
    samples = [sample for output in outputs for sample in output.outputs]
    places = [place for sample in samples for place in sample.logprobs or ()]
    return [list(sample.token_ids) for sample in samples], [
        next(iter(place.values())).logprob for place in places
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_cpu_s(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family)
    wanted, near = answers(model)
    found, logprobs = answers(model, **PLAIN, max_num_batched_tokens=19)  # in chunks
    assert found == wanted
    assert logprobs == pytest.approx(near, abs=5e-3)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3")


@pytest.mark.parametrize(
    "options",
    [
        {"batch_invariant": True},
        {"num_gpu_blocks_override": 7, "max_num_seqs": 3},  # preempted
        {"enable_prefix_caching": False},
        {"block_size": 64},
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_tokens_do_not_depend_on_options(options: dict[str, Any], qwen: Path) -> None:
    common = list(b"abcabcabcabcabcabcabc")
    prompts = [common, [*common, 100], [*common, 100], list(b"A dog")]
    params = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        SamplingParams(seed=1, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=5, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(seed=2, n=2, top_k=9, max_tokens=5, ignore_eos=True),
    ]
    assert answers(qwen, params, prompts, **PLAIN, **options) == answers(qwen, params, prompts)


def test_long_prompts_are_computed_in_pieces(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, near = answers(qwen, **PLAIN)
    monkeypatch.setattr(batched, "MOST_SCORES", 100)
    found, logprobs = answers(qwen, **PLAIN)
    assert found == wanted
    assert logprobs == pytest.approx(near, abs=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_adapters_equal_the_cpu_s(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", family)
    kinds: list[dict[str, Any]] = [{}, {"dora": True}]
    paths = [write_adapter(tmp_path / str(i), model, i, **kind) for i, kind in enumerate(kinds)]
    lora = [None, *(LoRARequest(str(i), i + 1, path) for i, path in enumerate(paths))]
    options = {"lora": lora, "enable_lora": True, "max_loras": 2}
    wanted, near = answers(model, **options)
    found, logprobs = answers(model, **options, **PLAIN)
    assert found == wanted
    assert logprobs == pytest.approx(near, abs=5e-3)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("bfloat16", "auto"),
        ("float16", "auto"),
        ("float32", "bfloat16"),
        ("float32", "fp8"),
        ("float32", "int8"),
    ],
)
def test_other_types_are_near(dtype: str, kv_dtype: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3", "bfloat16")
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=1, ignore_eos=True)
    _, near = answers(model, one, dtype=dtype, kv_cache_dtype=kv_dtype)
    _, found = answers(model, one, **PLAIN, dtype=dtype, kv_cache_dtype=kv_dtype)
    assert found == pytest.approx(near, abs=0.15)


def test_a_start_says_that_bits_are_not_promised(qwen: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers(qwen, **PLAIN)
    assert "--batch-invariant computes each row alone" in caplog.text
    caplog.clear()
    answers(qwen, **PLAIN, batch_invariant=True)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
