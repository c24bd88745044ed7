"""Promise 2: a request's tokens and logits depend on the request alone, bit for bit, however it was scheduled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import SchedulerConfig
from quire.devices.sampling import NOT_DRAWN, Logits, Sampler, Samples, SlotSampling, takes_largest
from quire.runtime.inputs import StepLayout
from quire.runtime.rows import StepRows
from quire.runtime.slots.sampling import SamplingPart
from quire.runtime.slots.scoring import ScoringPart
from quire.sched.pace import Pace
from quire.sched.sequence import Sequence
from quire.sched.step_plan import StepPlan
from quire.sched.times import StepRates, StepWork
from quire.types import NewSeq, TokenLogprobs
from tests.exactness.requests import PARAMS, make_prompts
from tests.tiny import OTHERS

MODELS = {
    "llama-f32": ("llama", "float32", {}),
    "mistral-f32-window": ("mistral", "float32", {}),
    "llama-f32-kv-bf16": ("llama", "float32", {}),
    "qwen2-bf16-kv-f32": ("qwen2", "bfloat16", {}),
    "qwen3-bf16-tied": ("qwen3", "bfloat16", {"tie_word_embeddings": True}),
    "qwen2-moe-bf16-shared-expert": ("qwen2_moe", "bfloat16", {}),
    "gpt-oss-f32-sinks": ("gpt_oss", "float32", {}),
    "deepseek-v3-f32-latent": ("deepseek_v3", "float32", {}),
    "bloom-bf16-alibi": ("bloom", "bfloat16", {}),
    "llama-int8-kv-int8": ("llama", "bfloat16", {}),
    "qwen3-int4": ("qwen3", "bfloat16", {}),
    "qwen2-moe-int4": ("qwen2_moe", "bfloat16", {}),
    "deepseek-v3-int8-kv-int8": ("deepseek_v3", "float32", {}),
    "qwen2-int4wo-asymmetric": ("qwen2", "bfloat16", {}),
    "llama-fp8-kv-fp8": ("llama", "bfloat16", {}),
    "qwen2-moe-nvfp4-kv-f16": ("qwen2_moe", "bfloat16", {}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama-f32-kv-bf16": {"kv_cache_dtype": "bfloat16"},
    "qwen2-bf16-kv-f32": {"kv_cache_dtype": "float32"},
    "llama-int8-kv-int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "qwen3-int4": {"quantization": "int4", "quantization_group_size": 32},
    "qwen2-moe-int4": {"quantization": "int4", "quantization_group_size": 32},
    "deepseek-v3-int8-kv-int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "qwen2-int4wo-asymmetric": {"quantization": "int4wo", "quantization_symmetric": False},
    "llama-fp8-kv-fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "qwen2-moe-nvfp4-kv-f16": {"quantization": "nvfp4", "kv_cache_dtype": "float16"},
}
# Families that meet the hardest schedule alone; tests/model compares chunks of theirs bit for bit.
OTHER_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    name: (name, "bfloat16" if i % 2 else "float32", {}) for i, name in enumerate(OTHERS)
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunk of 1": {"max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 33": {"max_num_batched_tokens": 33},
    "blocks of 1": {"block_size": 1},
    "blocks of 5": {"block_size": 5},
    "blocks of 64": {"block_size": 64},
    "two at a time": {"max_num_seqs": 2},
    "one thread": {"threads": 1},
    "three threads": {"threads": 3},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_gpu_blocks_override": 12, "max_model_len": 160},
    "preempted, no cache": {
        "num_gpu_blocks_override": 12,
        "max_model_len": 160,
        "enable_prefix_caching": False,
    },
    "preempted, chunks, small blocks": {
        "num_gpu_blocks_override": 37,
        "max_model_len": 160,
        "block_size": 5,
        "max_num_batched_tokens": 19,
    },
    "overlapped": {"async_scheduling": True},
    "overlapped, chunks of 7, no cache": {
        "async_scheduling": True,
        "max_num_batched_tokens": 7,
        "enable_prefix_caching": False,
    },
    "overlapped, preempted, small blocks": {
        "async_scheduling": True,
        "num_gpu_blocks_override": 37,
        "max_model_len": 160,
        "block_size": 5,
        "max_num_batched_tokens": 19,
    },
}


# Schedules of several ranks, by models whose weights, caches and mixtures they divide in different ways.
EXACT = {"tensor_parallel_size": 2, "exact_across_ranks": True}
RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-f32": ("two ranks of two stages", {**EXACT, "pipeline_parallel_size": 2}),
    "qwen2-bf16-kv-f32": ("two ranks, chunks of 7", {"max_num_batched_tokens": 7, **EXACT}),
    "llama-int8-kv-int8": ("two ranks", EXACT),
    "qwen2-moe-int4": ("two ranks, blocks of 5", {"block_size": 5, **EXACT}),
    "deepseek-v3-int8-kv-int8": ("two ranks", EXACT),
    "gpt-oss-f32-sinks": (
        "two stages, preempted",
        {"pipeline_parallel_size": 2, "num_gpu_blocks_override": 12, "max_model_len": 160},
    ),
    "bloom-bf16-alibi": ("three stages", {"pipeline_parallel_size": 3}),
}


@dataclass
class Recorder:
    """A sampler that passes everything on and keeps the bytes of each row of logits by (seed, position)."""

    inner: Sampler
    seeds: dict[int, int]
    rows: dict[tuple[int, int], bytes]

    def set(self, slot: int, sampling: SlotSampling) -> None:
        self.seeds[slot] = sampling.seed
        self.inner.set(slot, sampling)

    def clear(self, slot: int) -> None:
        self.inner.clear(slot)

    def extend(self, slot: int, tokens: list[int]) -> None:
        self.inner.extend(slot, tokens)

    def sample(self, logits: Logits, slots: list[int], positions: list[int], *more: Any) -> Samples:
        samples = self.inner.sample(logits, slots, positions, *more).result()
        for row, slot, position, token in zip(logits.numpy(), slots, positions, samples.tokens, strict=True):
            if token != NOT_DRAWN:  # rows after a rejected draft are of another text
                data = row.tobytes()
                assert self.rows.setdefault((self.seeds[slot], position), data) == data
        return samples

    def logprobs(self, logits: Logits, targets_L: Any, num_top: int) -> list[TokenLogprobs]:
        return self.inner.logprobs(logits, targets_L, num_top)


class WholeLogits:
    """A slot part that asks for all logits, so that a Recorder sees them."""

    active, greedy = True, False

    def set(self, new: NewSeq) -> None: ...
    def clear(self, slot: int) -> None: ...
    def rows(self, step: StepLayout) -> list[int]:
        return []

    def launch(self, rows: StepRows, first: int) -> None: ...


def load(make: Callable[..., str], model: str, **options: Any) -> LLM:
    family, dtype, config = (MODELS | OTHER_MODELS)[model]
    options = {"max_model_len": 160, **OPTIONS.get(model, {}), **options}
    if options.get("kv_cache_dtype") == "int8" and "block_size" in options:  # multiples of 4 alone
        options["block_size"] = -(-options["block_size"] // 4) * 4
    llm = LLM(make(family, dtype, **config), **options)
    llm._front.reasoning_parser = "qwen3"  # for the bound on reasoning
    return llm


def drawing(llm: LLM) -> list[Any]:
    """The parts that ask the sampler."""
    return [part for part in llm._core._executor.parts if isinstance(part, (SamplingPart, ScoringPart))]


def record(llm: LLM) -> Recorder:
    sampling, scoring = drawing(llm)
    llm._core._executor.parts.append(WholeLogits())
    sampling.sampler = scoring.sampler = recorder = Recorder(sampling.sampler, {}, {})
    return recorder


def stop_recording(llm: LLM) -> None:
    runner = llm._core._executor
    sampling, scoring = drawing(llm)
    runner.parts = [part for part in runner.parts if not isinstance(part, WholeLogits)]
    sampling.sampler = scoring.sampler = sampling.sampler.inner


def results(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    llm._core.scheduler.check()
    assert llm.stats().num_used_blocks == 0
    return [(o.prompt_logprobs, o.outputs) for o in outputs]


def remembered(
    make: Callable[..., str], prompts: list[list[int]], params: list[SamplingParams]
) -> Callable[[str], list[Any]]:
    """A function that gives the results of each model as it is, computed once."""
    found: dict[str, list[Any]] = {}

    def run(model: str) -> list[Any]:
        if model not in found:
            found[model] = results(load(make, model), prompts, params)
        return found[model]

    return run


@pytest.fixture(scope="module")
def alone(tiny_model: Callable[..., str]) -> Callable[[str], tuple[list[Any], dict[tuple[int, int], bytes]]]:
    """Each request by itself in one thread, whole prompt at once, no cache: what every schedule must equal."""
    known: dict[str, tuple[list[Any], dict[tuple[int, int], bytes]]] = {}

    def run(name: str) -> tuple[list[Any], dict[tuple[int, int], bytes]]:
        if name not in known:
            llm = load(tiny_model, name, threads=1, enable_prefix_caching=False, async_scheduling=False)
            recorder = record(llm)
            found = []
            for prompt, params in zip(make_prompts(), PARAMS, strict=True):
                found += results(llm, [prompt], [params])
            known[name] = found, recorder.rows
        return known[name]

    return run


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_any_schedule_equals_alone(
    model: str, schedule: str, tiny_model: Callable[..., str], alone: Callable[[str], Any]
) -> None:
    compare(model, load(tiny_model, model, **SCHEDULES[schedule]), schedule, alone)


def compare(model: str, llm: LLM, schedule: str, alone: Callable[[str], Any]) -> None:
    wanted, wanted_rows = alone(model)
    recorder = record(llm)
    assert results(llm, make_prompts(), PARAMS) == wanted
    if "preempted" in schedule:
        assert llm.stats().num_preemptions > 0
    assert results(llm, make_prompts(), PARAMS) == wanted, "a warm prefix cache changed the result"
    for key, row in wanted_rows.items():
        assert row == recorder.rows[key], f"logits of seed and position {key} differ"
    for seed, position in recorder.rows.keys() - wanted_rows.keys():
        assert schedule.startswith("overlapped"), "a token was sampled that no request has"
        assert (seed, position - 1) in wanted_rows, "a step was planned after an end was known"
    stop_recording(llm)
    greedy = [i for i, p in enumerate(PARAMS) if takes_largest(p, ()) and not p.structured_outputs]
    found = results(llm, [make_prompts()[i] for i in greedy], [PARAMS[i] for i in greedy])
    assert found == [wanted[i] for i in greedy], "the largest logits alone gave other tokens"


@pytest.mark.parametrize("model", RANKS)
def test_ranks_equal_one_alone(
    model: str, tiny_model: Callable[..., str], alone: Callable[[str], Any]
) -> None:
    schedule, options = RANKS[model]
    with load(tiny_model, model, threads=2, **options) as llm:
        compare(model, llm, schedule, alone)


@pytest.mark.parametrize("model", OTHER_MODELS)
def test_every_family_equals_alone(
    model: str, tiny_model: Callable[..., str], alone: Callable[[str], Any]
) -> None:
    test_any_schedule_equals_alone(model, "preempted, chunks, small blocks", tiny_model, alone)


@pytest.mark.parametrize("model", MODELS)
def test_random_order_and_company(
    model: str, tiny_model: Callable[..., str], alone: Callable[[str], Any]
) -> None:
    wanted, _ = alone(model)
    llm = load(tiny_model, model, max_num_batched_tokens=29, max_num_seqs=5)
    prompts, rng = make_prompts(), random.Random(3)
    for _ in range(4):
        order = rng.sample(range(len(prompts)), rng.randrange(2, len(prompts)))
        found = results(llm, [prompts[i] for i in order], [PARAMS[i] for i in order])
        assert found == [wanted[i] for i in order]


class Chaos(Pace):
    """Takes prompts in any order, in chunks of any length, and cuts drafts anywhere."""

    def __init__(self, seed: int) -> None:
        super().__init__(SchedulerConfig(max_num_partial_prefills=16), StepRates(), 160)
        self._rng = random.Random(seed)

    def order(self, partial: list[Sequence]) -> list[Sequence]:
        return self._rng.sample(partial, len(partial))

    def oldest(self, prompts: Iterable[Sequence]) -> Sequence | None:
        return self._rng.choice([None, *prompts])

    def chunk(self, plan: StepPlan, start: int, pending: int, ends: bool) -> int:
        return self._rng.choice([0, 1, min(2, pending), self._rng.randint(0, pending), pending])

    def spare(self, work: StepWork, most: int) -> int:
        return self._rng.randint(0, 6)


def make_chaotic(llm: LLM, seed: int) -> None:
    llm._core.scheduler._planner._pace = Chaos(seed)


CHAOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped, preempted": {
        "async_scheduling": True,
        "num_gpu_blocks_override": 37,
        "block_size": 5,
        "max_num_batched_tokens": 23,
    },
}


@pytest.mark.parametrize("schedule", CHAOS)
@pytest.mark.parametrize("model", MODELS)
def test_chunks_of_any_length_in_any_order(
    model: str, schedule: str, tiny_model: Callable[..., str], alone: Callable[[str], Any]
) -> None:
    wanted, _ = alone(model)
    llm = load(tiny_model, model, **CHAOS[schedule])
    make_chaotic(llm, seed=len(model))
    interleaved: list[int] = []
    llm._core.on_batch = lambda batch: interleaved.append(sum(not seq.wants_logits for seq in batch.seqs))
    for _ in range(2):
        assert results(llm, make_prompts(), PARAMS) == wanted
    assert max(interleaved) > 1, "no two prompts were in the making at once"


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_n_samples_equal_separate_requests(model: str, caching: bool, tiny_model: Callable[..., str]) -> None:
    llm = load(tiny_model, model, enable_prefix_caching=caching)
    prompt = {"prompt_token_ids": list(range(40, 77))}
    together = llm.generate(
        prompt, SamplingParams(n=4, seed=11, temperature=0.9, max_tokens=20), use_tqdm=False
    )
    apart = [
        llm.generate(prompt, SamplingParams(seed=11 + i, temperature=0.9, max_tokens=20), use_tqdm=False)
        for i in range(4)
    ]
    assert [o.token_ids for o in together[0].outputs] == [a[0].outputs[0].token_ids for a in apart]
    assert len({tuple(o.token_ids) for o in together[0].outputs}) > 1


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("model", ["llama-f32", "llama-int8-kv-int8"])
def test_samples_that_give_way_equal_separate_requests(
    model: str, caching: bool, tiny_model: Callable[..., str]
) -> None:
    llm = load(tiny_model, model, enable_prefix_caching=caching, max_num_seqs=4)
    sampling = SamplingParams(n=6, seed=11, temperature=0.9, max_tokens=30, ignore_eos=True)
    core, found = llm._core, {i: list[int]() for i in range(6)}
    core.add(llm._front.request("many", list(range(40, 77)), sampling))
    for step in range(200):
        if step in (5, 9, 14):
            core.add(llm._front.request(f"one {step}", [step] * 9, SamplingParams(max_tokens=4)))
        for delta in core.step():
            if delta.request_id == "many":
                found[delta.index] += delta.tokens
    assert not core.has_work
    assert llm.stats().num_preemptions > 0
    for i, tokens in found.items():
        params = SamplingParams(seed=11 + i, temperature=0.9, max_tokens=30, ignore_eos=True)
        (alone,) = llm.generate({"prompt_token_ids": list(range(40, 77))}, params, use_tqdm=False)
        assert alone.outputs[0].token_ids == tokens


def test_native_equals_reference(tiny_model: Callable[..., str]) -> None:
    """Greedy tokens of both backends agree: the kernels compute what the oracle computes."""
    for family in ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "gpt_oss", "deepseek_v3", "bloom"):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        found = [
            LLM(tiny_model(family), backend=backend, max_model_len=128).generate(
                [{"prompt_token_ids": p} for p in make_prompts()[:4]], params, use_tqdm=False
            )
            for backend in ("native", "reference")
        ]
        assert [o.outputs[0].token_ids for o in found[0]] == [o.outputs[0].token_ids for o in found[1]]
