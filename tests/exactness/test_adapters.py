"""Promise 2 with adapters: sequences of eight adapters and of none share steps, and each is what it is alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.lora.arena import AdapterArena
from tests.adapter_files import write_adapter
from tests.exactness.requests import PARAMS, make_prompts
from tests.exactness.test_schedule import Recorder, record, stop_recording

MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama-f32": ("llama", "float32", {}, {}),
    "qwen3-bf16-tied": ("qwen3", "bfloat16", {"tie_word_embeddings": True}, {}),
    "qwen2-int4": ("qwen2", "bfloat16", {}, {"quantization": "int4", "quantization_group_size": 32}),
    "qwen2-moe-int8": ("qwen2_moe", "bfloat16", {}, {"quantization": "int8"}),
    "gpt2-f32": ("gpt2", "float32", {}, {}),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "two adapters at once": {"max_loras": 2, "max_cpu_loras": 3},
    "chunks of 7, preempted": {
        "max_num_batched_tokens": 7,
        "num_gpu_blocks_override": 12,
        "threads": 1,
    },
    "overlapped": {"async_scheduling": True, "max_loras": 3, "max_cpu_loras": 3},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
}
KINDS: tuple[dict[str, Any], ...] = (
    {"rank": 4},
    {"rank": 1, "only": "q_proj|v_proj|c_attn"},
    {"rank": 16},
    {"rank": 5, "dora": True},
    {"rank": 3, "tables": True},
    {"rank": 8, "use_rslora": True},
    {"rank": 4, "only": "mlp"},
    {"rank": 7, "only": "o_proj|c_proj"},
)


@pytest.fixture(scope="module")
def made(tiny_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """By model: its path, its options, and an adapter or none for each request."""
    known: dict[str, Any] = {}

    def make(name: str) -> tuple[str, dict[str, Any], list[LoRARequest | None]]:
        if name not in known:
            family, dtype, config, options = MODELS[name]
            path = tiny_model(family, dtype, **config)
            folder = tmp_path_factory.mktemp("adapters")
            named = [
                LoRARequest(str(i), i + 1, write_adapter(folder / str(i), path, i, **kind))
                for i, kind in enumerate(KINDS)
            ]
            each = [(None, *named)[i % (len(named) + 1)] for i in range(len(PARAMS))]
            known[name] = path, options, each
        return known[name]

    return make


def load(path: str, options: dict[str, Any], **more: Any) -> LLM:
    options = {"enable_lora": True, "max_loras": 8, "max_model_len": 160, **options, **more}
    llm = LLM(path, **options)
    llm._front.reasoning_parser = "qwen3"
    return llm


def results(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], adapters: list[Any]
) -> list[Any]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False, lora_request=adapters)
    llm._core.scheduler.check()
    assert llm.stats().num_used_blocks == 0
    return [(output.prompt_logprobs, output.outputs) for output in outputs]


@pytest.fixture(scope="module")
def alone(made: Callable[[str], Any]) -> Callable[[str], tuple[list[Any], dict[tuple[int, int], bytes]]]:
    """Each request by itself, with one adapter in memory at a time; those of the base without adapters at all."""
    known: dict[str, Any] = {}

    def run(name: str) -> tuple[list[Any], dict[tuple[int, int], bytes]]:
        if name not in known:
            path, options, each = made(name)
            one = {"threads": 1, "enable_prefix_caching": False}
            adapted = load(path, options, max_loras=1, **one)
            base = load(path, options, enable_lora=False, max_loras=1, **one)
            recorders: list[Recorder] = [record(adapted), record(base)]
            found = []
            for prompt, params, adapter in zip(make_prompts(), PARAMS, each, strict=True):
                found += results(base if adapter is None else adapted, [prompt], [params], [adapter])
            stop_recording(adapted)
            known[name] = found, recorders[0].rows | recorders[1].rows
        return known[name]

    return run


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_a_mix_of_adapters_equals_each_alone(
    model: str, schedule: str, made: Callable[[str], Any], alone: Callable[[str], Any]
) -> None:
    wanted, rows = alone(model)
    path, options, each = made(model)
    llm = load(path, options, **SCHEDULES[schedule])
    recorder = record(llm)
    assert results(llm, make_prompts(), PARAMS, each) == wanted
    if "preempted" in schedule:
        assert llm.stats().num_preemptions > 0
    assert results(llm, make_prompts(), PARAMS, each) == wanted, "a warm prefix cache changed the result"
    for key, row in rows.items():
        assert row == recorder.rows[key], f"logits of seed and position {key} differ"
    arena = next(gate for gate in llm._core.gates if isinstance(gate, AdapterArena))
    assert not arena._requests, "an ended request pins its adapter"


def test_samples_and_beams_of_adapters_equal_those_alone(made: Callable[[str], Any]) -> None:
    path, options, each = made("llama-f32")
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts()[:9]]
    params = SamplingParams(n=3, seed=5, max_tokens=12, temperature=0.9)
    beams = BeamSearchParams(beam_width=4, max_tokens=8)
    llm = load(path, options)
    together = llm.generate(prompts, params, use_tqdm=False, lora_request=each[:9])
    searched = llm.beam_search(prompts, beams, lora_request=each[:9])
    for i, prompt in enumerate(prompts):
        assert together[i].outputs == llm.generate(prompt, params, lora_request=each[i])[0].outputs
        (own,) = llm.beam_search([prompt], beams, lora_request=each[i])
        assert [s.tokens for s in searched[i].sequences] == [s.tokens for s in own.sequences]
    texts = {str(output.outputs[0].token_ids) for output in together}
    assert len(texts) > 5, "the adapters change nothing"


def test_a_reloaded_adapter_never_meets_the_old_ones_prefixes(
    tiny_model: Callable[..., str], tmp_path: Path
) -> None:
    path, params = tiny_model("llama"), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(1, 60))}
    llm = load(path, {})
    outputs = []
    for seed in (1, 2, 1):
        folder = write_adapter(tmp_path / "a", path, seed)
        request = LoRARequest("a", 1, folder, load_inplace=True)
        (output,) = llm.generate(prompt, params, lora_request=request)
        outputs.append((output.outputs[0].token_ids, output.num_cached_tokens))
    assert outputs[0][0] == outputs[2][0] != outputs[1][0]
    assert outputs[0][1] == outputs[1][1] == 0, "the cache of other content was used"
    assert outputs[2][1] > 0, "the same content shares its cache"
