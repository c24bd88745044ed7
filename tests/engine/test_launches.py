"""A device that only launches: results are hidden until they are collected, which may be after the next launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.devices.cpu.backend import NativeBackend
from quire.devices.protocol import ModelInput
from quire.devices.sampling import Samples
from quire.errors import DeviceLostError, DeviceMemoryError

PROMPT = [5, 6, 7, 8, 9]
GRAMMAR = StructuredOutputsParams(regex="[ab]{2}cde[0-9]{3,9}")
PARAMS = [
    SamplingParams(temperature=0, max_tokens=23, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=17, repetition_penalty=1.3, logprobs=2),
    SamplingParams(seed=2, max_tokens=30, n=3, top_k=9),
    SamplingParams(seed=3, max_tokens=12, structured_outputs=GRAMMAR),
    SamplingParams(seed=4, max_tokens=9, prompt_logprobs=1, stop_token_ids=list(range(0, 256, 7))),
    SamplingParams(temperature=0, max_tokens=25, ignore_eos=True),
    SamplingParams(
        seed=5, max_tokens=9, logits_processors=[lambda output, row: row.__imul__(1 + len(output))]
    ),
    SamplingParams(seed=6, max_tokens=1),
    SamplingParams(seed=7, max_tokens=30, stop_token_ids=list(range(0, 256, 5))),
]


class Hidden:
    """Samples that nobody has waited for."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def result(self) -> Samples:
        if Late.faults:
            Late.faults -= 1
            raise RuntimeError("injected")
        return self._samples


class Late(NativeBackend):
    """A backend whose executables fill in unseen tokens, and whose samplers hide what they drew."""

    ahead = 0  # steps with unseen tokens
    faults = 0  # of the next results

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Late.ahead = 0
        self.last: dict[int, int] = {}

    @property
    def choices(self) -> Any:
        return msgspec.structs.replace(super().choices, launches=True)

    def compile(self, *args: Any) -> Any:
        executable = super().compile(*args)
        run = executable.run

        def launch(inputs: ModelInput) -> Any:
            if inputs.unseen_U2 is not None:
                Late.ahead += 1
                tokens = inputs.tokens_T.copy()
                for place, slot in inputs.unseen_U2.tolist():
                    tokens[place] = self.last[slot]
                inputs = msgspec.structs.replace(inputs, tokens_T=tokens, unseen_U2=None)
            return run(inputs)

        executable.run = launch  # type: ignore[method-assign]
        return executable

    def sampler(self, vocab_size: int) -> Any:
        sampler = super().sampler(vocab_size)
        sample = sampler.sample

        def draw(logits: Any, slots: list[int], *more: Any) -> Hidden:
            samples = sample(logits, slots, *more).result()
            self.last.update((s, max(t, 0)) for s, t in zip(slots, samples.tokens, strict=True))
            return Hidden(samples)

        sampler.sample = draw  # type: ignore[method-assign]
        return sampler


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Make engines of which the last one's backend is late."""

    def make(model: str, **options: Any) -> LLM:
        with monkeypatch.context() as patch:
            patch.setattr("quire.devices.cpu.backend.NativeBackend", Late)
            return LLM(model, async_scheduling=True, **options)

    return make


def answers(llm: LLM, params: list[SamplingParams] = PARAMS) -> list[Any]:
    prompts = [{"prompt_token_ids": [*PROMPT, 10 + i, *PROMPT[: i % 4]]} for i in range(len(params))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[(*s.token_ids, s.finish_reason, s.logprobs) for s in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 3, "max_num_batched_tokens": 8},
        {"num_gpu_blocks_override": 7, "max_num_seqs": 6},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"speculative_config": {"model": "qwen2", "num_speculative_tokens": 2}},
    ],
    ids=["together", "in chunks", "preempted", "drafted", "drafted by a model"],
)
def test_late_results_change_no_token(
    tiny_model: Callable[..., str], late: Callable[..., LLM], options: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"max_model_len": 64, "block_size": 16}
    with LLM(tiny_model("llama"), **sizes) as llm:
        wanted = answers(llm)
    drafts = options.get("speculative_config", {})
    if "model" in drafts:
        options = {"speculative_config": {**drafts, "model": tiny_model(drafts["model"])}}
    with late(tiny_model("llama"), **sizes, **options) as llm:
        assert answers(llm) == wanted
        assert answers(llm) == wanted
        assert "model" not in drafts or llm.stats().spec_drafts > 0
        assert Late.ahead > 0
        llm._engine.ask(lambda core: core.scheduler.check())  # type: ignore[attr-defined]


def test_a_result_that_fails_takes_later_launches_back(
    tiny_model: Callable[..., str], late: Callable[..., LLM]
) -> None:
    options = {"max_model_len": 64, "block_size": 16}
    with LLM(tiny_model("llama"), **options) as llm:
        wanted = answers(llm)
    with late(tiny_model("llama"), **options) as llm:
        Late.faults = 1
        assert answers(llm) == wanted
        assert not Late.faults
        llm._engine.ask(lambda core: core.scheduler.check())  # type: ignore[attr-defined]


def short_of_memory(llm: LLM, most: int) -> Any:
    """Let the device have memory for steps of `most` tokens; returns the engine's counters."""
    executable: Any = llm._core._executor._executable  # type: ignore[attr-defined]
    run = executable.run

    def run_small(inputs: ModelInput) -> Any:
        if len(inputs.tokens_T) > most:
            raise DeviceMemoryError("no memory left: lower --gpu-memory-utilization")
        return run(inputs)

    executable.run = run_small
    return llm.stats


@pytest.mark.parametrize("device", ["at once", "late"])
def test_steps_become_smaller_if_the_device_has_no_memory_for_them(
    tiny_model: Callable[..., str], late: Callable[..., LLM], device: str
) -> None:
    options = {"max_model_len": 64, "block_size": 16}
    with LLM(tiny_model("llama"), **options) as llm:
        wanted = answers(llm)
    with (late if device == "late" else LLM)(tiny_model("llama"), **options) as llm:
        stats = short_of_memory(llm, 9)
        assert answers(llm) == wanted
        assert 0 < stats().num_oom < 10
        assert answers(llm) == wanted
        llm._engine.ask(lambda core: core.scheduler.check())  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", ["at once", "late"])
def test_without_memory_for_a_token_a_request_ends_typed_and_others_are_served_later(
    tiny_model: Callable[..., str], late: Callable[..., LLM], device: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with (late if device == "late" else LLM)(tiny_model("llama"), max_model_len=64, block_size=16) as llm:
        wanted = answers(llm, [params] * 2)
        executable: Any = llm._core._executor._executable  # type: ignore[attr-defined]
        run = executable.run
        stats = short_of_memory(llm, 0)
        with pytest.raises(DeviceMemoryError, match=r"request .* failed: no memory left: lower --gpu-memory"):
            answers(llm, [params] * 2)
        assert stats().num_oom >= 2
        executable.run = run
        assert answers(llm, [params] * 2) == wanted


def test_a_lost_device_ends_the_engine_by_its_name(tiny_model: Callable[..., str]) -> None:
    with LLM(tiny_model("llama"), max_model_len=64, block_size=16) as llm:
        runner: Any = llm._core._executor  # type: ignore[attr-defined]

        def lost(*args: Any) -> Any:
            raise DeviceLostError("gone")

        runner.parts[0].sampler.sample = lost
        with pytest.raises(DeviceLostError, match="gone"):
            answers(llm)
