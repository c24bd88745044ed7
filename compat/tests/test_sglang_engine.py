"""SGLang's engine, its options, and its server in a child process: the same model under other names."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Installed
from quire import LLM, SamplingParams
from quire.engine.directory import ASSETS
from quire.errors import ConfigError, EngineError, RequestError
from quire.program import function, gen
from quire_compat.sglang.engine import Engine
from quire_compat.sglang.flags import ServerArgs, parsed, read_options
from quire_compat.sglang.runtime import Runtime

PROMPTS = ["Once upon a time", "One day"]
GREEDY = {"temperature": 0, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="", enable_lora=True, disable_cuda_graph=True, log_level="error") as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM() as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_prompts_are_continued_as_llm_does(engine: Engine, expected: list[str]) -> None:
    found = engine.generate(PROMPTS, GREEDY)
    assert [one["text"] for one in found] == expected
    assert engine.generate(PROMPTS[0], GREEDY)["text"] == expected[0]
    tokens = engine.get_tokenizer().encode(PROMPTS[0])  # type: ignore[union-attr]
    assert engine.generate(input_ids=tokens, sampling_params=GREEDY)["text"] == expected[0]
    samples = engine.generate(PROMPTS[0], {**GREEDY, "n": 2}, rid="r")
    assert [one["meta_info"]["id"] for one in samples] == ["r_0", "r_1"]


def test_a_stream_grows(engine: Engine, expected: list[str]) -> None:
    texts = [one["text"] for one in engine.generate(PROMPTS[0], GREEDY, stream=True)]
    assert texts[-1] == expected[0]
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
    last = {one["index"]: one["text"] for one in engine.generate(PROMPTS, GREEDY, stream=True)}
    assert [last[0], last[1]] == expected


def test_all_of_it_can_be_awaited(engine: Engine, expected: list[str]) -> None:
    async def both() -> tuple[Any, list[str]]:
        whole = await engine.async_generate(PROMPTS, GREEDY)
        stream = await engine.async_generate(PROMPTS[0], GREEDY, stream=True)
        return whole, [one["text"] async for one in stream]

    whole, texts = asyncio.run(both())
    assert [one["text"] for one in whole] == expected
    assert texts[-1] == expected[0]
    vector = asyncio.run(engine.async_encode("one"))["embedding"]
    assert engine.encode(["one", "two"])[0]["embedding"] == vector


def test_an_adapter_is_used_by_its_name(engine: Engine) -> None:
    adapter = str(ASSETS / "quire-stories-lora-shakespeare")
    engine.load_lora_adapter("bard", adapter)
    body: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    plain, bard = (engine.generate(PROMPTS[0], GREEDY, **body, lora_path=name) for name in (None, "bard"))
    assert plain["meta_info"]["input_token_logprobs"] != bard["meta_info"]["input_token_logprobs"]
    engine.unload_lora_adapter("bard")
    with pytest.raises(RequestError, match="'bard' is not loaded"):
        engine.generate(PROMPTS[0], GREEDY, lora_path="bard")


def test_the_cache_can_be_emptied(engine: Engine) -> None:
    engine.generate("Empty me", GREEDY)
    assert engine.generate("Empty me", GREEDY)["meta_info"]["cached_tokens"] > 0
    assert engine.flush_cache()
    assert engine.generate("Empty me", GREEDY)["meta_info"]["cached_tokens"] == 0
    assert engine.get_server_info()["internal_states"][0]["num_running"] == 0


def test_memory_is_given_back_and_taken_again(engine: Engine, expected: list[str]) -> None:
    engine.release_memory_occupation()
    with pytest.raises(EngineError, match="sleeps"):
        engine.generate(PROMPTS[0], GREEDY)
    engine.resume_memory_occupation()
    assert engine.generate(PROMPTS[0], GREEDY)["text"] == expected[0]


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"image_data": "x"}, "image_data"),
        ({"sampling_params": {"max_tokens": 3}}, "max_tokens"),
        ({"sampling_params": {"n": "two"}}, "n"),
        ({"prompt": None}, "text"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    engine: Engine, arguments: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError, match=param):
        engine.generate(**{"prompt": "x", **arguments})


def test_options_are_quires(caplog: pytest.LogCaptureFixture) -> None:
    line = (
        "--model-path m --tp 2 --mem-fraction-static 0.8 --disable-radix-cache --context-length 4096 "
        "--chunked-prefill-size 2048 --attention-backend triton --page-size 32 --max-total-tokens 320 "
        "--max-running-requests 8 --dp-size 1 --api-key k --enable-priority-scheduling --log-level error"
    )
    found, notices = read_options(parsed("x", line.split()))
    assert found == {
        "model": "m",
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.8,
        "enable_prefix_caching": False,
        "max_model_len": 320,  # what the cache holds
        "max_num_batched_tokens": 2048,
        "block_size": 32,
        "num_gpu_blocks_override": 10,
        "max_num_seqs": 8,
        "api_key": ("k",),
        "scheduling_policy": "priority",
        "log_level": "error",
        "uvicorn_log_level": "error",
    }
    assert [notice.split()[0] for notice in notices] == [
        "--attention-backend",
        "--dp-size",
        "--context-length",
    ]


def test_options_of_a_script_are_those_of_the_engine() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--own", default=1)
    ServerArgs.add_cli_args(parser)  # type: ignore[attr-defined]
    args = parser.parse_args(["--page-size", "32", "--disable-cuda-graph"])
    found = dataclasses.asdict(ServerArgs.from_cli_args(args))  # type: ignore[attr-defined]
    assert {name: value for name, value in found.items() if value is not None} == {
        "page_size": 32,
        "disable_cuda_graph": True,
    }
    with Engine(**found) as engine:
        assert engine.generate(PROMPTS[0], GREEDY)["meta_info"]["completion_tokens"] == 6


def test_graphs_are_asked_for_as_sglang_does() -> None:
    found, notices = read_options(
        {"cuda_graph_bs": [1, 2], "cuda_graph_max_bs": 8, "disable_cuda_graph": True}
    )
    wanted = {"cudagraph_capture_sizes": ("1", "2"), "max_cudagraph_capture_size": 8, "enforce_eager": True}
    assert (found, notices) == (wanted, [])


def test_drafts_are_asked_for_as_sglang_does() -> None:
    chain = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
    found, _ = read_options({**chain, "speculative_num_draft_tokens": 4})
    assert found == {"spec_method": "eagle3", "spec_tokens": 3}
    found, notices = read_options({**chain, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16})
    assert found == {"spec_method": "eagle3", "spec_tokens": 3}
    assert notices == [
        "--speculative-eagle-topk changes nothing: drafts are chains, which give the same output as trees"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_size": 2}, "--dp-size 2 is not supported"),
        ({"enable_hierarchical_cache": True}, "nearest is --max-total-tokens"),
        ({"speculative_algorithm": "MAGIC"}, "MAGIC is not supported"),
        ({"warp_factor": 9}, "--warp-factor is neither an option of SGLang"),
    ],
)
def test_an_option_that_would_change_a_result_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(**options)


@pytest.fixture
def child(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers run where quire-compat is installed."""
    monkeypatch.setattr(sys, "executable", str(installed.python))


@pytest.mark.usefixtures("child")
def test_a_runtime_is_a_server_and_a_backend(expected: list[str]) -> None:
    @function
    def tale(s: Any) -> None:
        s += PROMPTS[0] + gen("rest", max_tokens=6, temperature=0)

    async def pieces(runtime: Runtime) -> list[str]:
        return [piece async for piece in runtime.async_generate(PROMPTS[0], GREEDY)]

    adapters = {"bard": str(ASSETS / "quire-stories-lora-shakespeare")}
    options = {
        "max_total_tokens": 4096,
        "lora_paths": adapters,
        "disable_cuda_graph": True,
        "is_embedding": False,
    }
    with Runtime(model_path="", **options) as runtime:
        assert tale.run(backend=runtime)["rest"] == expected[0]
        assert json.loads(runtime.generate(PROMPTS, GREEDY))[1]["text"] == expected[1]
        assert "".join(asyncio.run(pieces(runtime))) == expected[0]
        assert json.loads(runtime.generate(PROMPTS[0], GREEDY, lora_path="bard"))["text"]
        assert runtime.get_model_name() == "quire-stories"
        assert runtime.get_tokenizer().encode("a") == [0, *runtime.get_tokenizer().encode("a")[1:]]
        runtime.cache_prefix("A long way off, ")
        assert runtime.flush_cache()
    with pytest.raises(EngineError, match="does not answer"):
        runtime.get_model_name()


@pytest.mark.usefixtures("child")
def test_a_runtime_that_cannot_start_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineError, match="ended with status 1"):
        Runtime(model_path=str(tmp_path / "nowhere"))
    assert "nowhere" in capfd.readouterr().err
