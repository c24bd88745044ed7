"""`--device interpreter`, from end to end: the backend of GPUs as an engine uses it, on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.build import build_engine
from quire.config import EngineConfig
from quire.devices.protocol import Limits, ModelInput
from quire.devices.registry import make_backend
from quire.devices.sampling import BAD_LOGITS, NOT_DRAWN, SlotSampling
from quire.devices.torch.run import TorchLogits
from quire.errors import (
    ConfigError,
    DeviceLostError,
    DeviceMemoryError,
    EngineError,
    ModelError,
    ResourceError,
)
from tests.models import inspect_model, load_model
from tests.tiny import write_checkpoint

pytest.importorskip("triton", reason="the kernels of GPUs need triton")


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
BLOCKS: dict[str, Any] = {"max_model_len": 96, "num_gpu_blocks_override": 24, "block_size": 16}
JSON = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}},
    "required": ["a"],
    "additionalProperties": False,
}
COMMON = list(b"Once upon a time there was a dog that ")
REQUESTS = [
    (COMMON, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)),
    (COMMON + list(b"ran"), SamplingParams(seed=1, max_tokens=5, logprobs=2, ignore_eos=True)),
    (list(b"abcabcabcabcabc"), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)),
    (list(b"A"), SamplingParams(seed=2, n=2, top_k=9, max_tokens=4)),
    (list(b"{"), SamplingParams(seed=3, max_tokens=8, structured_outputs=StructuredOutputsParams(json=JSON))),
    (COMMON[:20], SamplingParams(seed=4, max_tokens=4, presence_penalty=0.5, logprobs=1, prompt_logprobs=1)),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", **SMALL)


def answers(model: Path, requests: list[Any] = REQUESTS, **options: Any) -> list[Any]:
    """All that requests get, logprobs included, when they come together."""
    with LLM(model=str(model), **{**BLOCKS, **options}) as llm:
        prompts = [{"prompt_token_ids": tokens} for tokens, _ in requests]
        outputs = llm.generate(prompts, [params for _, params in requests], use_tqdm=False)
    return [
        [([*sample.token_ids], sample.finish_reason, shown(sample.logprobs)) for sample in output.outputs]
        for output in outputs
    ]


def shown(logprobs: Any) -> Any:
    """Log-probabilities to their last bit."""
    return logprobs and [{token: one.logprob for token, one in place.items()} for place in logprobs]


def tokens(found: list[Any]) -> list[Any]:
    return [[(ids, reason) for ids, reason, _ in samples] for samples in found]


def test_tokens_in_float32_equal_the_cpu_s(checkpoint: Path) -> None:
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}}
    here = answers(checkpoint, device="interpreter", **drafts)
    assert tokens(here) == tokens(answers(checkpoint, device="cpu"))


def test_a_request_s_bits_depend_on_itself_alone(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "llama", "bfloat16", **SMALL)
    requests = [(tokens, params) for tokens, params in REQUESTS[:2] + REQUESTS[3:4]]
    for _, params in requests:
        assert params.max_tokens is not None
    own = {"device": "interpreter", "kv_cache_dtype": "fp8"}
    together = answers(model, requests, **own)
    alone = [answers(model, [request], **own)[0] for request in requests]
    assert together == alone
    assert answers(model, requests, max_num_batched_tokens=19, enable_prefix_caching=False, **own) == together
    preempted = {"num_gpu_blocks_override": 6, "max_num_seqs": 4, "async_scheduling": True}
    assert answers(model, requests, **own, **preempted) == together
    blocks = {"block_size": 64, "num_gpu_blocks_override": 8}
    assert answers(model, requests, **own, **blocks) == together


def test_mixtures_and_latent_attention_keep_their_bits(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "deepseek_v3", "bfloat16", num_hidden_layers=2)
    params = SamplingParams(seed=1, max_tokens=3, logprobs=2, ignore_eos=True)
    requests = [(COMMON, params), (list(b"A dog"), params)]
    own = {"device": "interpreter", "kv_cache_dtype": "int8"}
    together = answers(model, requests, **own)
    assert answers(model, requests[:1], max_num_batched_tokens=19, **own) == together[:1]


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"quantization": "int8wo", "dtype": "bfloat16"},
        {"quantization": "int4", "quantization_group_size": 32, "quantization_symmetric": False},
    ],
    ids=lambda options: options["quantization"],
)
def test_quantized_weights_are_near_the_cpu_s(checkpoint: Path, options: dict[str, Any]) -> None:
    request = [(COMMON[:9], SamplingParams(temperature=0.0, max_tokens=2, logprobs=2, ignore_eos=True))]
    [[(here, _, found)]], [[(there, _, wanted)]] = (
        answers(checkpoint, request, device=device, **options) for device in ("interpreter", "cpu")
    )
    assert here == there
    for place, other in zip(found, wanted, strict=True):
        assert place == pytest.approx(other, abs=0.05 if "dtype" in options else 1e-3)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "mxfp4"])
def test_mixtures_of_quantized_weights_give_the_cpu_s_tokens(name: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=2)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    requests = [(COMMON[:20], params), (list(b"A dog"), params)]
    options = {"quantization": name, "quantization_group_size": 32, "kv_cache_dtype": "float32"}
    here, there = (answers(model, requests, device=device, **options) for device in ("interpreter", "cpu"))
    assert tokens(here) == tokens(there)


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "fp8_e5m2"])
def test_caches_of_other_types_are_near(checkpoint: Path, kv_dtype: str) -> None:
    requests = REQUESTS[1:2]
    [[(_, _, found)]], [[(_, _, wanted)]] = (
        answers(checkpoint, requests, device=device, kv_cache_dtype=kv_dtype)
        for device in ("interpreter", "cpu")
    )
    for place, other in zip(found[:1], wanted[:1], strict=True):
        for token in place.keys() & other.keys():
            assert place[token] == pytest.approx(other[token], abs=0.15)


def logits(model: Path, device: str, kv_dtype: Any = "float32") -> Any:
    """Logits of a chunk of a prompt, then of the rest of it beside another one."""
    backend, info = make_backend(threads=1, device=device), inspect_model(model)
    loaded, spec, limits = load_model(model, backend), info.kv_spec(kv_dtype), Limits(40, 2, 3)
    executable = backend.compile(loaded.graph, backend.kv_cache(spec, 8, 16), limits)
    numbers = np.random.default_rng(3).integers(0, info.spec.vocab_size, 64).astype(np.int32)

    def row(*values: int) -> Any:
        return np.array(values, np.int32)

    table = np.array([[1, 7, 2], [4, 3, 0]], np.int32)
    first = ModelInput(
        numbers[:21], np.arange(21, dtype=np.int32), row(0, 21), row(21), row(0), table, row(20)
    )
    yield executable.run(first).numpy().copy()
    places = np.concatenate([np.arange(17), np.arange(21, 40)]).astype(np.int32)
    second = ModelInput(
        numbers[21:57], places, row(0, 17, 36), row(17, 40), row(1, 0), table, row(3, 16, 17, 20, 35)
    )
    yield executable.run(second).numpy().copy()
    yield executable.logits(2, 5).numpy().copy()
    yield np.array(executable.hidden())


FAMILIES = ["mistral", "qwen2", "bloom", "gemma2", "gpt2", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_cpu_s(tmp_path: Path, family: str) -> None:
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    model = write_checkpoint(tmp_path, family, **{layers: 2})
    for found, wanted in zip(logits(model, "interpreter"), logits(model, "cpu"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 24}, "power of two from 16 on, got 24"),
        ({"block_size": 8}, "power of two from 16 on, got 8"),
    ],
)
def test_what_a_gpu_lacks_is_refused_in_one_line(
    checkpoint: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        LLM(model=str(checkpoint), device="interpreter", **{**BLOCKS, **options})
    assert "\n" not in str(caught.value)


def test_ranks_and_an_engine_that_slept_give_the_same(checkpoint: Path) -> None:
    request = [(COMMON[:9], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))]
    wanted = tokens(answers(checkpoint, request, device="cpu"))
    assert tokens(answers(checkpoint, request, device="interpreter", tensor_parallel_size=2)) == wanted
    with LLM(model=str(checkpoint), device="interpreter", **BLOCKS) as llm:
        llm.sleep(level=2)
        llm.wake_up()
        [output] = llm.generate([{"prompt_token_ids": request[0][0]}], request[0][1], use_tqdm=False)
    assert [*output.outputs[0].token_ids] == wanted[0][0][0]


def test_a_choice_made_on_the_device_is_appended_unless_its_slot_was_taken_anew() -> None:
    backend = make_backend(threads=1, device="interpreter")
    sampler: Any = backend.sampler(40)
    for slot in (0, 5):
        sampler.set(slot, SlotSampling(1, SamplingParams(temperature=0.0), [1, 2]))
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    logits[1, 3] = np.inf
    early, later = (sampler.sample(TorchLogits(logits), [5, 0], [2 + i, 2 + i]) for i in range(2))
    assert backend._last_tokens[5] == logits[0].argmax()  # type: ignore[attr-defined]
    sampler.set(5, SlotSampling(1, SamplingParams(seed=1), [1]))
    assert sampler.sample(TorchLogits(logits[:1]), [5], [1]).result().tokens[0] >= 0
    assert early.result() == later.result()
    assert early.result().tokens == [logits[0].argmax(), NOT_DRAWN]
    assert early.result().errors == {1: BAD_LOGITS}
    sampler.retract(5, 1)
    with pytest.raises(EngineError, match="does not have 1 tokens"):
        sampler.retract(5, 1)


def test_unseen_tokens_come_from_the_device(checkpoint: Path) -> None:
    backend, info = make_backend(threads=1, device="interpreter"), inspect_model(checkpoint)
    loaded = load_model(checkpoint, backend)
    executable = backend.compile(
        loaded.graph, backend.kv_cache(info.kv_spec("float32"), 8, 16), Limits(8, 2, 2)
    )
    backend._last_tokens[7] = 65  # type: ignore[attr-defined]

    def row(*values: int) -> Any:
        return np.array(values, np.int32)

    table = np.array([[1], [2]], np.int32)
    known = ModelInput(row(3, 4, 65), row(0, 1, 0), row(0, 2, 3), row(2, 1), row(0, 1), table, row(1, 2))
    wanted = executable.run(known).numpy().copy()
    unseen = msgspec.structs.replace(known, tokens_T=row(3, 4, 0), unseen_U2=row(2, 7).reshape(1, 2))
    np.testing.assert_array_equal(executable.run(unseen).numpy(), wanted)
    with pytest.raises(EngineError, match="unseen"):
        executable.run(msgspec.structs.replace(unseen, unseen_U2=row(3, 7).reshape(1, 2)))


def test_a_gpu_without_memory_says_which_option(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    backend = make_backend(threads=1, device="interpreter")
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ResourceError, match="--gpu-memory-utilization"):
        backend.kv_cache(inspect_model(checkpoint).kv_spec("float32"), 8, 16)


def test_a_gpu_that_fails_in_a_step_says_how(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(threads=1, device="interpreter")
    sampler = backend.sampler(40)
    sampler.set(0, SlotSampling(1, SamplingParams()))

    def failing(error: Exception) -> Any:
        def fail(*args: Any, **options: Any) -> Any:
            raise error

        monkeypatch.setattr(torch, "empty", fail)
        return sampler.sample(TorchLogits(torch.zeros(1, 40)), [0], [0])

    with pytest.raises(DeviceMemoryError, match="--gpu-memory-utilization"):
        failing(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(DeviceLostError, match=r"new process.*illegal memory"):
        failing(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="shape") as caught:
        failing(RuntimeError("shape"))
    assert not isinstance(caught.value, DeviceLostError)


def test_an_engine_directory_of_a_gpu_gives_the_same(checkpoint: Path, tmp_path: Path) -> None:
    built = tmp_path / "engine"
    build_engine(EngineConfig.from_options(model=str(checkpoint), device="interpreter"), built)
    request = REQUESTS[:1]
    assert answers(built, request, device="interpreter") == answers(checkpoint, request, device="interpreter")
    with pytest.raises(ModelError, match=r"was built for gpu layout 1.*device"):
        LLM(model=str(built), device="cpu", **BLOCKS)
